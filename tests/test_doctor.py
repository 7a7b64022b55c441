from typer.testing import CliRunner

from epiviz import doctor
from epiviz.cli import app


def found():
    return {finding.what: finding for finding in doctor.examine()}


def test_the_doctor_tells_what_runs_here_and_what_a_missing_piece_means(tmp_path, monkeypatch):
    monkeypatch.setenv("EPIVIZ_CACHE", str(tmp_path / "cache"))
    report = found()
    backends = {name: finding for name, finding in report.items() if name.startswith("attention")}
    (eager,) = [finding for name, finding in backends.items() if "attention eager" in name]
    assert eager.state == "ok" and "0 from the plain formula" in eager.told
    assert all(finding.state != "ok" or "from the plain formula" in finding.told for finding in backends.values())
    assert all("other kernels are used" in each.told for each in backends.values() if each.state == "--")
    assert "torch" in report["versions"].told
    assert report["bundled model"].state == "--" and "fetched (93 MB)" in report["bundled model"].told
    assert report["kernel python3"].state == "ok"
    assert report["widget manager of JupyterLab"].state == report["anywidget in JupyterLab"].state == "ok"
    assert "GB free" in report["disk here"].told


def test_the_command_prints_a_line_for_each():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.stdout
    assert all(line[:4] in ("ok  ", "--  ") for line in result.stdout.splitlines())
