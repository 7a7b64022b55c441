"""The profile of the published lengths runs wherever a model is loaded, with a tiny local one in place of the hub's."""

import os
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from epiviz.parameters import check_parameters, defaults, profile_parameters

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = [path for path in sorted(FOLDER.glob("*.ipynb")) if "model" in defaults(path)]
LENGTH = 120  # tokens in place of 16,384
SHORTER = {
    "01_first_look": {"budget": 48},
    "05_all_methods": {"budget": "0.8,0.9", "others": "epikv,random"},
    "06_evicted_generation": {"budget": 48},
    "07_accuracy_vs_budget": {"budget": "112", "others": "full,random", "n_problems": 2, "max_new_tokens": 60},
    "10_your_own_policy": {"budget": 96},
    "12_published_protocols": {"budget": 512, "n_problems": 2, "data": "../data/problems/word_problems.jsonl"},
}


@pytest.fixture
def shell(monkeypatch, tmp_path):
    """An IPython in this process: what the notebooks import is imported once."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("EPIVIZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EPIVIZ_PROGRESS", "off")
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.timeout(300)
def test_the_paper_profile_runs_with_a_local_model(path, shell, local_model, tmp_path):
    parameters = profile_parameters(path, "paper") | SHORTER.get(path.stem, {})
    if "max_new_tokens" in parameters:
        parameters["max_new_tokens"] = min(parameters["max_new_tokens"] or LENGTH, LENGTH)
    if parameters.get("model") not in (None, "tiny-reasoner"):
        assert parameters["model"] in ("", "Qwen/Qwen3-4B")
        parameters["model"] = str(local_model)
    parameters["out_dir"] = os.path.relpath(tmp_path / "run", FOLDER)
    check_parameters(path, parameters)
    read = load_notebook_node(str(path))
    notebook = parameterize_notebook(read, parameters, kernel_name="python3", language="python")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source, store_history=False).raise_error()
    assert (tmp_path / "run" / "finding.json").is_file()
    assert not pd.read_parquet(tmp_path / "run" / "results.parquet").empty
