"""The tiny reasoner: it answers, and it needs what it looks back for."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pandas as pd
import pytest

import epiviz as ev
from epiviz import frames, tasks
from epiviz.tasks import batches
from epiviz.tasks.outcomes import judge

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "data" / "models" / "tiny-reasoner"
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")
LINES = int(re.search(r"largest size: (\d+) lines", CARD)[1])


@pytest.fixture(scope="module")
def reasoner():
    return ev.load("tiny-reasoner")


@pytest.fixture(scope="module")
def problems():
    return tasks.load("steps", n=200, seed=5, statements=LINES)  # those of the card


def test_the_card_names_these_weights():
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() in CARD
    assert len(weights) < 10 * 2**20


def test_it_solves_unseen_problems_of_the_size_on_its_card(reasoner, problems):
    scores = batches.score(reasoner, problems)
    assert scores["exact"].mean() >= 0.95
    assert min(problem.meta["solution_words"] for problem in problems) >= 200
    far = [problem.meta["look_back"] >= 100 for problem in problems]
    assert sum(far) >= 0.99 * len(far)


def test_greedy_decoding_writes_what_the_scores_promise(reasoner, problems):
    few = problems[:4]
    longest = max(problem.meta["solution_words"] for problem in few)
    runs = ev.generate(reasoner, [p.prompt for p in few], max_new_tokens=longest + 2, progress=False)
    for problem, run, exact in zip(few, runs, batches.score(reasoner, few)["exact"], strict=True):
        assert (run.text.strip() == problem.solution) == exact
        assert not exact or judge(problem, run.text, run.status, run.tokens).correct


def test_evicting_at_random_costs_answers(reasoner, problems):
    few = problems[:12]
    total = round(sum(map(batches.length, few)) / len(few) / 4)
    budget = ev.Budget(total, sinks=4, recent=16, buffer=16)
    longest = max(problem.meta["solution_words"] for problem in few)
    runs = ev.generate(reasoner, [p.prompt for p in few], "random", budget, max_new_tokens=longest, progress=False)
    assert sum(judge(p, r.text, r.status, r.tokens).correct for p, r in zip(few, runs, strict=True)) <= 0.75 * len(few)


def test_the_shipped_study_is_what_an_evaluation_gives(reasoner, tmp_path):
    """The same problems, budgets and seeds give the same answers; rounding may decide one near-tie otherwise."""
    study = pd.read_parquet(ROOT / "data" / "results" / "accuracy.parquet")
    told = json.loads((ROOT / "data" / "results" / "accuracy.json").read_text())
    asked = {name: told[name] for name in ("statements", "longest_prompt", "seed")}
    few = tasks.load("steps", n=6, kinds=("rounds", "ledger"), **asked)
    budget = ev.Budget(144, sinks=4, recent=16, buffer=16, protect_prompt=True)
    found = ev.evaluate(
        reasoner, few, ["random", "streaming"], budget, max_new_tokens=told["max_new_tokens"], cache=tmp_path
    )
    common, same = frames.same_answers(found.frame, study[study["study"] == "main"])
    assert common == 12 and same >= 11 / 12
