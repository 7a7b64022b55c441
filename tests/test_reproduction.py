"""Every published protocol runs, with a tiny local model in place of the hub's and two problems in place of all."""

import dataclasses

import pytest
from tasks.test_public_sets import AIME24, ARENA, CODE, GPQA, GSM8K, MATH500, write

import epiviz as ev
from epiviz import reproduction
from epiviz.tasks.protocols import PROTOCOLS

ROWS = {"aime24": AIME24, "math500": MATH500, "gpqa-diamond": GPQA, "livecodebench": CODE, "gsm8k": GSM8K}


@pytest.mark.parametrize("key", PROTOCOLS, ids="/".join)
def test_every_protocol_runs_with_a_local_model_and_two_problems(key, local_model, tmp_path):
    asked = reproduction.find("/".join(key))
    rows = ROWS.get(asked.task, ARENA) * (1 if len(ROWS.get(asked.task, ARENA)) > 1 else 2)
    solved = reproduction.reproduce(
        ev.load(local_model),
        asked,
        ["full", "random"],
        min(asked.budgets),
        n_problems=2,
        max_new_tokens=4,
        path=write(tmp_path / "rows.jsonl", rows),
        cache=tmp_path / "texts",
        progress=False,
    )
    frame = solved.frame
    assert len(frame) == 2 * 2 * asked.samples
    assert set(frame["outcome"]) <= {"length", "loop"}, "four tokens of a random model are no answer"
    budget = reproduction.limit(asked, min(asked.budgets))
    evicting = frame[frame["policy"] == "random"]
    assert set(evicting["slots"]) == {budget.total} and set(evicting["recent"]) == {budget.recent}


def test_a_prompt_and_its_text_share_the_tokens_that_a_protocol_allows(local_model, tmp_path):
    asked = dataclasses.replace(reproduction.find("vase/gsm8k"), max_tokens=400)
    path = write(tmp_path / "rows.jsonl", GSM8K)
    model = ev.load(local_model)
    options = {"path": path, "n_problems": 1, "samples": 1, "cache": tmp_path / "texts", "progress": False}
    solved = reproduction.reproduce(model, asked, "full", **options)
    (problem,) = ev.tasks.load("gsm8k", 1, protocol="vase", path=path)
    assert solved.frame["tokens"].tolist() == [400 - len(model.encode(problem.prompt))]


def test_problems_are_the_same_under_every_seed(local_model, tmp_path):
    """Otherwise a question whose options are shuffled anew would count as another, independent problem."""
    asked = reproduction.find("vase/gpqa-diamond")
    options = {"path": write(tmp_path / "rows.jsonl", GPQA), "max_new_tokens": 2, "samples": 1, "progress": False}
    model = ev.load(local_model)
    frames = [
        reproduction.reproduce(model, asked, "full", n_problems=1, seed=seed, cache=tmp_path / "texts", **options).frame
        for seed in (0, 1)
    ]
    assert frames[0]["problem"].tolist() == frames[1]["problem"].tolist()
    assert [frame["seed"].tolist() for frame in frames] == [[0], [1]]


def test_a_protocol_that_nobody_published_is_refused():
    with pytest.raises(ValueError, match="named paper/task, not 'gsm8k'; there is epikv/math500"):
        reproduction.find("gsm8k")
    with pytest.raises(ValueError, match="no published protocol of 'epikv' on 'gsm8k'"):
        reproduction.find("epikv/gsm8k")
