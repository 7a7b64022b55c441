"""What the project says about itself must be true: README, environments, packaging, Makefile."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# written in pieces, so that this file does not contain what it forbids
HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("anaconda", "org"),
        ("anaconda", "com"),
        ("debian", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("unpkg", "com"),
        ("jsdelivr", "net"),
        ("cdnjs", "cloudflare", "com"),
    )
]
FOLDERS = ["work", "root", "tmp", "home", "opt", "Users", "mnt"]
FORBIDDEN = re.compile(
    "|".join([*(re.escape(host) for host in HOSTS), rf"(?<![\w.~*)}}\]])/(?:{'|'.join(FOLDERS)})/[\w.]"])
)


def tracked_files():
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def requirement(line):
    """Split a requirement into its name and its set of bounds."""
    name, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", line).groups()
    return name.lower().replace("_", "-"), frozenset(filter(None, bounds.replace(" ", "").split(",")))


def test_no_file_names_a_registry_or_a_machine_path():
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            if match := FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", [f"see https://{HOSTS[0]}/x", f'open("/{FOLDERS[0]}/x")', f"/{FOLDERS[1]}/.cache"])
def test_the_search_finds_what_it_forbids(line):
    assert FORBIDDEN.search(line)


@pytest.mark.parametrize("line", ["a /work item", "runs/tmp/x", "../work/x", "https://example.org/home/x"])
def test_the_search_passes_what_is_harmless(line):
    assert not FORBIDDEN.search(line)


def test_conda_and_pip_ask_for_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    conda = dict(requirement(line) for line in environment["dependencies"] if isinstance(line, str))
    conda["torch"] = conda.pop("pytorch")
    assert conda.pop("python") == {PROJECT["requires-python"]}
    assert conda.pop("pip") == frozenset()
    project = dict(map(requirement, PROJECT["dependencies"]))
    assert conda == {name: project.get(name) for name in conda}
    heavy = {"torch", "transformers", "numpy", "pandas", "pyarrow", "scipy", "jupyterlab", "ipywidgets", "plotly"}
    assert heavy | {"seaborn", "papermill"} <= set(conda)
    (pip,) = (line["pip"] for line in environment["dependencies"] if isinstance(line, dict))
    assert pip == ["-e .[dev]"]


def test_the_tested_versions_lie_within_the_ranges():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert not any("+" in version for version in pinned.values()), "a local build that others cannot install"
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[wanted.name.lower()]), line


def test_flash_attention_is_documented_and_not_installed():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert "flash-attn" in text
    assert all(line.startswith("#") for line in text.splitlines() if "flash-attn" in line)
    assert not any("flash" in line for line in PROJECT["dependencies"])


def test_readme_shows_the_two_commands_and_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE))
    assert {"study", "lab", "test"} <= named <= targets
    assert len(README.splitlines()) < 200


def test_readme_lists_every_notebook_and_every_policy():
    from epiviz.policies import base

    listed = set(re.findall(r"^\| `(\d\d_\w+|a\d_\w+)` ", README, re.MULTILINE))
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == listed
    policy_table = README.split("## Policies")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]*) \|", policy_table, re.MULTILINE)
    described = {name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)}
    ours = {name for name in base.names() if base._REGISTRY[name].__module__.startswith("epiviz.")}
    assert described == ours


def test_readme_links_to_files_that_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


@pytest.mark.timeout(600)
def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    printed = capsys.readouterr().out
    assert "highest epiphany score at token" in printed
    assert int(re.search(r"evictions=(\d+)", printed).group(1)) >= 3, (
        "an example in which nothing is evicted shows nothing"
    )
    assert (tmp_path / "trace.html").stat().st_size > 10_000


def test_the_wheel_carries_the_front_end(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "epiviz").rglob("*")
        if path.suffix in (".py", ".js", ".css", ".json")
    }
    assert sources <= packed
    assert any(name.endswith(".js") for name in packed)
    assert any(name.endswith(".css") for name in packed)
