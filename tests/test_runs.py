import hashlib
import json
import socket
import sys
import time

import nbformat
import pytest
from typer.testing import CliRunner

from epiviz import devices, runs
from epiviz.cli import app
from epiviz.manifest import Manifest

PARAMETERS = """\
budget: int = 128  # slots per layer and KV head
seed: int = 0  # of the draws
out_dir: str = "nowhere"  # results go here
"""
RECORD = """\
import pandas as pd
from epiviz.results import save_results
save_results(pd.DataFrame({"twice": [2 * budget]}), out_dir, f"Twice the budget is {2 * budget}.")
"""
# the same finding without the seconds that imports take
NOTE = """\
import json, pathlib
finding = {"finding": f"Twice the budget is {2 * budget}."}
pathlib.Path(out_dir, "finding.json").write_text(json.dumps(finding))
"""


def write_notebook(path, *cells, parameters=PARAMETERS):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# A tiny notebook"),
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, cells),
    ]
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with notebooks/ and two profiles, which is the working directory."""
    (tmp_path / "notebooks" / "profiles").mkdir(parents=True)
    (tmp_path / "notebooks" / "profiles" / "demo.yaml").write_text("default: {budget: 64, seed: 3}\n")
    (tmp_path / "notebooks" / "profiles" / "smoke.yaml").write_text("default: {budget: 8}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs_of(run):
    cells = nbformat.read(run.folder / "executed.ipynb", as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def test_a_run_leaves_notebook_page_results_and_manifest(project):
    look = "import os, sys\nprint(sys.executable, os.path.basename(os.getcwd()), budget, seed)"
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", look, RECORD)
    run = runs.execute(notebook, {"budget": "32"}, project / "out")

    assert run.status == "done"
    assert run.error is None
    assert not run.reused
    assert run.finding == "Twice the budget is 64."
    assert run.parameters == {"budget": 32, "seed": 0, "out_dir": "../out"}
    assert list(run.outputs) == ["executed.html", "executed.ipynb", "finding.json", "results.parquet"]
    assert outputs_of(run).split() == [sys.executable, "notebooks", "32", "0"]

    stored = json.loads((project / "out" / "manifest.json").read_text())
    assert stored["status"] == "done"
    assert {"python", "torch", "transformers", "epiviz"} <= set(stored["versions"])
    assert (stored["seed"], stored["host"], stored["device"]) == (0, socket.gethostname(), devices.describe())
    page = (project / "out" / "executed.html").read_bytes()
    assert stored["outputs"]["executed.html"] == hashlib.sha256(page).hexdigest()
    assert len(stored["parameters_sha256"]) == 64
    assert stored["started"] <= stored["finished"]
    assert str(project) not in json.dumps({**stored, "notebook": None})
    assert Manifest.load(run.folder) == run


def test_the_page_needs_no_network(project):
    show = "from IPython.display import HTML\nHTML('<b>shown</b>')"
    run = runs.execute(write_notebook(project / "notebooks" / "01_tiny.ipynb", show), {}, project / "out")
    page = (run.folder / "executed.html").read_text()
    assert "<b>shown</b>" in page
    assert "budget" in page
    assert str(project) not in page
    for reference in ('src="http', "src='http", 'src=""', 'href="http', "cdnjs", "unpkg", "@import"):
        assert reference not in page, reference


def test_a_failing_cell_is_recorded_and_its_traceback_written(project):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", NOTE, "1 / (budget - 128)", "print('never')")
    run = runs.execute(notebook, {}, project / "out")
    assert run.status == "failed"
    assert run.error == {
        "type": "ZeroDivisionError",
        "message": "division by zero",
        "cell": 4,
        "traceback": "traceback.txt",
    }
    text = (run.folder / "traceback.txt").read_text()
    assert "1 / (budget - 128)" in text
    assert "\x1b" not in text
    assert "never" not in outputs_of(run)
    assert "ZeroDivisionError" in (run.folder / "executed.html").read_text()


def test_wrong_parameters_raise_before_anything_starts(project):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", NOTE)
    with pytest.raises(ValueError, match="did you mean 'budget'"):
        runs.execute(notebook, {"bugdet": 3}, project / "out")
    with pytest.raises(ValueError, match="pass it as out_dir="):
        runs.execute(notebook, {"out_dir": "elsewhere"}, project / "out")
    assert not (project / "out").exists()


def test_an_unchanged_run_is_reused_and_a_changed_one_is_not(project, monkeypatch):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", NOTE)

    def again(parameters=None, **options):
        return runs.execute(notebook, parameters or {}, project / "out", **options)

    first = again()
    second = again()
    assert second.reused
    assert (second.key, second.started) == (first.key, first.started)
    assert again({"seed": 0}).reused, "a default given by hand changes nothing"
    assert not again(force=True).reused

    assert again({"budget": 5}).finding == "Twice the budget is 10."
    write_notebook(notebook, NOTE, "print('one more cell')")
    assert not again({"budget": 5}).reused
    monkeypatch.setattr(runs, "source_hash", lambda: "another source")
    assert not again({"budget": 5}).reused
    (project / "out" / "finding.json").unlink()
    assert not again({"budget": 5}).reused, "a result is missing"
    (project / "out" / "finding.json").write_text("{}")
    assert not again({"budget": 5}).reused, "a result is another"


def test_a_failed_run_is_run_again_without_the_earlier_results(project):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", NOTE)
    runs.execute(notebook, {}, project / "out")
    write_notebook(notebook, "raise SystemExit(3)", NOTE)
    failed = runs.execute(notebook, {}, project / "out")
    assert failed.status == "failed"
    assert failed.finding is None
    assert list(failed.outputs) == ["executed.html", "executed.ipynb", "traceback.txt"]
    assert not runs.execute(notebook, {}, project / "out").reused


def test_a_folder_of_somebody_else_is_left_alone(project):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", NOTE)
    (project / "site").mkdir()
    (project / "site" / "manifest.json").write_text('{"name": "a web page"}')
    for force in (False, True):
        with pytest.raises(FileExistsError, match="not the manifest of a run"):
            runs.execute(notebook, {}, project / "site", force=force)
    assert [path.name for path in (project / "site").iterdir()] == ["manifest.json"]
    (project / "notes").mkdir()
    (project / "notes" / "mine.txt").write_text("a later run would remove it")
    with pytest.raises(FileExistsError, match="holds 'mine.txt' and is no run's folder"):
        runs.execute(notebook, {}, project / "notes")
    assert [path.name for path in (project / "notes").iterdir()] == ["mine.txt"]


def test_a_long_cell_shows_signs_of_life(capsys):
    with runs._signs_of_life("07_long", every=0.05):
        time.sleep(0.3)
    assert "  07_long: still running after 0 s\n" in capsys.readouterr().err


def test_a_cell_that_takes_too_long_fails(project):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", "import time; time.sleep(60)")
    run = runs.execute(notebook, {}, project / "out", cell_timeout=1)
    assert run.status == "failed"
    assert run.error["type"] == "CellTimeoutError"


@pytest.mark.parametrize(("deaths", "status"), [(1, "done"), (2, "failed")])
def test_a_kernel_that_dies_gets_one_more_try(project, deaths, status):
    die = f"""\
import os, pathlib
seen = pathlib.Path("deaths")
count = len(seen.read_text()) if seen.exists() else 0
if count < {deaths}:
    seen.write_text("x" * (count + 1))
    os._exit(1)
"""
    run = runs.execute(write_notebook(project / "notebooks" / "01_tiny.ipynb", die), {}, project / "out")
    assert run.status == status
    assert (project / "notebooks" / "deaths").read_text() == "x" * deaths


def test_ctrl_c_is_recorded_as_stopped(project, monkeypatch):
    notebook = write_notebook(project / "notebooks" / "01_tiny.ipynb", NOTE)

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.papermill, "execute_notebook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.execute(notebook, {}, project / "out")
    assert Manifest.load(project / "out").status == "stopped"


def test_a_study_goes_on_after_a_failure_and_reuses_what_is_done(project):
    write_notebook(project / "notebooks" / "01_good.ipynb", NOTE)
    write_notebook(project / "notebooks" / "02_bad.ipynb", "raise ValueError('64 slots are too few\\nsecond line')")
    write_notebook(project / "notebooks" / "a1_last.ipynb", NOTE)
    (project / "notebooks" / "untitled.ipynb").write_text("not a numbered notebook")

    result = CliRunner().invoke(app, ["study"])
    assert result.exit_code == 1
    assert "[1/3] 01_good: started\n[1/3] 01_good: done in" in result.stdout
    assert "Twice the budget is 128." in result.output
    assert "ValueError in cell [3]: 64 slots are too few (see runs/study/02_bad/traceback.txt)" in " ".join(
        result.output.split()
    )
    assert "runs/study/01_good/executed.html" in result.output
    assert "01_good: cell 4 of 4" in result.stderr

    write_notebook(project / "notebooks" / "02_bad.ipynb", NOTE)
    result = CliRunner().invoke(app, ["study"])
    assert result.exit_code == 0
    assert "[1/3] 01_good: reused" in result.output
    assert "[2/3] 02_bad: done in" in result.output


def test_a_study_takes_names_profiles_and_folders(project):
    write_notebook(project / "notebooks" / "01_good.ipynb", NOTE)
    write_notebook(project / "notebooks" / "02_other.ipynb", NOTE)
    result = CliRunner().invoke(app, ["study", "02_other", "--profile", "smoke", "--out", "elsewhere"])
    assert result.exit_code == 0
    assert Manifest.load(project / "elsewhere" / "02_other").parameters["budget"] == 8
    assert not (project / "elsewhere" / "01_good").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["03_none"], "no notebook '03_none'; did you mean '01_good'|no notebook '03_none'; known: 01_good"),
        (["--profile", "demon"], "no profile 'demon' in 'notebooks/profiles'; did you mean 'demo'"),
        (["notebooks/01_good.ipynb", "01_good"], "share a name"),
    ],
)
def test_a_study_that_cannot_start_says_why(project, arguments, message):
    write_notebook(project / "notebooks" / "01_good.ipynb", NOTE)
    result = CliRunner().invoke(app, ["study", *arguments])
    assert result.exit_code == 2
    assert any(part in result.stderr for part in message.split("|"))
    assert not (project / "runs").exists()


def test_a_study_without_notebooks_says_where_to_stand(project):
    result = CliRunner().invoke(app, ["study"])
    assert result.exit_code == 2
    assert "no notebooks in 'notebooks'" in result.stderr


def test_the_bundled_model_is_loaded_once_before_the_notebooks_that_use_it(project, monkeypatch):
    loaded = []
    monkeypatch.setattr("epiviz.models.load", loaded.append)
    (project / "notebooks" / "profiles" / "demo.yaml").write_text("default: {model: smollm2-135m}\n")
    for name in ("01_a", "02_b"):
        write_notebook(project / "notebooks" / f"{name}.ipynb", parameters='model: str = "other"  # a name\n')
    lines = []
    runs.study(say=lines.append)
    runs.study(say=lines.append)
    assert loaded == ["smollm2-135m"]
    assert lines[0].startswith("smollm2-135m: loading")
