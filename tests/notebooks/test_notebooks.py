"""Every notebook is read as source and run with the smoke profile."""

import ast
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager

from epiviz import runs
from epiviz.parameters import NAMES, check_parameters, declared, defaults, profile_parameters

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXPECTED = {
    "01_first_look",
    "02_epiphany_scores",
    "04_value_states",
    "05_all_methods",
    "06_evicted_generation",
    "07_accuracy_vs_budget",
    "10_your_own_policy",
    "a1_train_the_tiny_reasoner",
}
PROFILES = sorted((FOLDER / "profiles").glob("*.yaml"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def parse(cell):
    return ast.parse(TransformerManager().transform_cell(cell.source))


def test_the_expected_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} >= EXPECTED


def test_every_notebook_is_part_of_a_study():
    assert runs.find_notebooks(folder=FOLDER) == NOTEBOOKS


@each_notebook
def test_a_notebook_is_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert not {"execution", "papermill"} & set(cell.metadata)


@each_notebook
def test_the_second_cell_declares_the_parameters(path):
    cells = nbformat.read(path, as_version=4).cells
    assert [number for number, cell in enumerate(cells) if "parameters" in tags(cell)] == [1]
    statements = parse(cells[1]).body
    assert all(isinstance(each, ast.AnnAssign) for each in statements), "annotate every parameter, nothing else"
    names = [each.target.id for each in statements]
    assert names == list(defaults(path)), "a line that papermill cannot read; keep '=' out of its comment"
    assert {"out_dir", "profile"} <= set(names) <= set(NAMES)
    assert all(parameter["help"] for parameter in declared(path).values()), "comment every parameter"
    assert check_parameters(path, defaults(path)) == defaults(path)


@each_notebook
def test_code_is_short_and_calls_the_library(path):
    for cell in code_cells(path):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= 15, f"{len(lines)} lines of code:\n{cell.source}"
        for line in lines:
            assert len(line) <= 88, f"{len(line)} columns: {line}"
        if path.stem.startswith("10_") and "policy" in tags(cell):
            continue
        defined = [
            node.name
            for node in ast.walk(parse(cell))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        assert not defined, f"define {', '.join(defined)} in the library"


@each_notebook
@pytest.mark.timeout(420)
def test_a_notebook_runs_and_records_what_it_found(path, tmp_path):
    run = runs.execute(path, profile_parameters(path, "smoke"), tmp_path / path.stem, cell_timeout=300)
    assert run.status == "done", (run.folder / run.error["traceback"]).read_text()
    assert run.finding, "record one with save_results(…, finding=…)"
    assert not pd.read_parquet(run.folder / "results.parquet").empty
    megabytes = (run.folder / "executed.ipynb").stat().st_size / 2**20
    assert megabytes <= 5, f"the executed copy has {megabytes:.1f} MB"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
@each_notebook
def test_every_profile_fits_every_notebook(path, profile):
    assert profile_parameters(path, profile.stem)["profile"] == profile.stem


def test_profiles_set_the_same_names():
    assert {path.stem for path in PROFILES} == {"smoke", "demo", "full", "paper"}
    shared = {path.stem: set(yaml.safe_load(path.read_text())["default"]) for path in PROFILES}
    assert len({frozenset(names) for names in shared.values()}) == 1, shared
