import numpy as np
import pandas as pd
import pytest

from epiviz.frames import study


@pytest.fixture
def table():
    """Two runs with replays, which both recorded the full cache, and one with answers."""
    replays = pd.DataFrame(
        {
            "run": ["a", "a", "b", "b"],
            "given_budget": [64, 64, 128, 128],
            "policy": ["full", "epikv", "full", "epikv"],
            "budget": [np.nan, 64, np.nan, 128],
            "nll_increase": [0.0, 0.3, 0.0, 0.1],
            "bounded": [False, True, False, True],
        }
    )
    answers = pd.DataFrame(
        {
            "run": "c",
            "policy": "epikv",
            "budget": 64.0,
            "problem": ["p", "q"],
            "outcome": ["correct", "loop"],
            "tokens": [10, 30],
            "seconds": [1.0, 3.0],
        }
    )
    return pd.concat([replays, answers], ignore_index=True)


def test_a_table_is_parted_into_its_kinds(table):
    replays = study.part(table, "replays")
    assert replays["policy"].tolist() == ["full", "epikv", "epikv"], "the full cache stands once"
    assert "outcome" not in replays and "problem" not in replays
    assert replays["bounded"].dtype == bool
    answers = study.part(table, "answers")
    assert answers["problem"].tolist() == ["p", "q"]
    assert "nll_increase" not in answers
    assert study.part(table[["run", "policy"]], "answers").empty
    with pytest.raises(ValueError, match="replays or answers"):
        study.part(table, "texts")


def test_models_and_notebooks_are_never_drawn_together(table):
    answers = study.part(table, "answers")
    assert list(study.groups(answers)) == [""] and study.groups(answers.iloc[:0]) == {}
    both = pd.concat([answers.assign(model="big", notebook="07"), answers.assign(model="small", notebook="12")])
    parts = study.groups(both.assign(extra=[None, None, 1, 2]))
    assert list(parts) == ["07, big", "12, small"] and all(len(rows) == 2 for rows in parts.values())
    assert "extra" not in parts["07, big"] and "extra" in parts["12, small"]
    assert list(study.groups(both.assign(notebook="07"))) == ["big", "small"]
    cells = pd.DataFrame({"nll_increase": 0.1, "model": "big", "buffer": [1.0, 64.0, 1.0, None], "sinks": 4})
    parts = study.groups(cells)
    assert {name: len(rows) for name, rows in parts.items()} == {"buffer 1.0": 2, "buffer 64.0": 1}


def test_speed_is_tokens_by_seconds_of_all_texts(table):
    (row,) = study.speed(study.part(table, "answers")).itertuples()
    assert (row.texts, row.tokens, row.seconds, row.tokens_per_second) == (2, 40, 4.0, 10.0)


def test_run_times_count_finished_runs_only():
    ends = {"status": ["done", "done", "failed"], "seconds": [2.0, 4.0, 90.0]}
    state = pd.DataFrame({"notebook": "05", "device": "CPU", **ends})
    (row,) = study.run_times(state).itertuples()
    assert (row.runs, row.median, row.least, row.most, row.total) == (2, 3.0, 2.0, 4.0, 6.0)
