"""The task ``recall``: codes at the beginning, a question at the end, nothing of either in between."""

from __future__ import annotations

import re

import numpy as np
import pytest

from epiviz import tasks
from epiviz.tasks.outcomes import judge
from epiviz.tasks.recall import filler_text

PROBLEMS = tasks.load("recall", n=120, seed=3, filler=60)


def test_the_answer_is_the_code_of_what_is_asked():
    for problem in PROBLEMS:
        start, filler, question = problem.prompt.split("\n\n")
        codes = dict(re.findall(r"The code of the (\w+ \w+) is (\d{4})\.", start))
        (asked,) = re.findall(r"What is the code of the (\w+ \w+)\?", question)
        assert codes[asked] == problem.answer
        assert list(codes.values()) == problem.meta["candidates"] and len(set(codes.values())) == 4
        assert not re.search(r"\d", filler) and not set(codes) & set(re.findall(r"\w+ \w+", filler))
        assert len(filler.split()) == 60
        assert judge(problem, problem.solution, "finished", thinks=False).correct


def test_every_place_is_asked_for_and_no_answer_stands_out():
    asked = np.bincount([problem.meta["asked"] for problem in PROBLEMS], minlength=4)
    assert asked.min() >= 15, asked
    assert len({problem.answer for problem in PROBLEMS}) > 110
    assert len({problem.prompt for problem in PROBLEMS}) == len({problem.id for problem in PROBLEMS}) == 120


def test_a_problem_is_a_function_of_its_keys():
    assert tasks.load("recall", n=5, seed=3, filler=60) == PROBLEMS[:5]
    assert tasks.load("recall", n=5, seed=4, filler=60)[0].prompt != PROBLEMS[0].prompt
    longer = tasks.load("recall", n=5, seed=3, filler=90)
    assert [one.answer for one in longer] == [one.answer for one in PROBLEMS[:5]], "only the filler is longer"
    assert all(
        one.prompt.startswith(short.prompt.split("\n\n")[0]) for one, short in zip(longer, PROBLEMS, strict=False)
    )


def test_filler_has_exactly_as_many_words_as_asked_for():
    for words in (0, 1, 7, 500):
        assert len(filler_text(np.random.default_rng(0), words).split()) == words
    (problem,) = tasks.load("recall", n=1, filler=0, facts=1)
    assert problem.prompt.count("\n\n") == 1 and len(problem.meta["candidates"]) == 1


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="filler is a number of words, 0 or more, got -1"):
        tasks.load("recall", n=1, filler=-1)
    with pytest.raises(ValueError, match="facts must be 1 to 100, got 101"):
        tasks.load("recall", n=1, facts=101)
    with pytest.raises(ValueError, match="n is needed: recall is made"):
        tasks.load("recall")
