"""What differs from the oracle fails it; that every policy equals it is shown by the matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import deviation, evicting_run
from tiny import random_prompt, tiny_model

import epiviz as ev

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)
PROMPT = random_prompt(30)


@pytest.mark.parametrize("buffer", [1, 8])
@pytest.mark.parametrize("policy", ["epikv", "vase-attnv"])
def test_protected_prompt_and_plain_stepping(policy, buffer):
    model = tiny_model("qwen3")
    budget = ev.Budget(total=60, sinks=2, recent=8, buffer=buffer, protect_prompt=True)
    (row,) = evicting_run(model, [PROMPT], policy, budget, 80)
    assert deviation(model, row) <= 1e-9
    assert (row.retention.death[:, :, :30] == row.retention.events).all()


@pytest.fixture(scope="module")
def witnessed():
    """A run whose kept sets differ between heads, and whose oracle agrees."""
    model = tiny_model("qwen3")
    (row,) = evicting_run(model, [PROMPT], "vase-attnv", BUDGET, 100)
    assert deviation(model, row) <= 1e-9
    return model, row


def test_mutant_position_off_by_one_fails(witnessed):
    model, row = witnessed
    positions = np.arange(row.retention.tokens)
    positions[row.retention.event_steps[0] :] += 1
    assert deviation(model, row, positions=positions) > 1e-5


def test_mutant_swapped_heads_fail(witnessed):
    model, row = witnessed
    swapped = row.retention.death.copy()
    swapped[1] = swapped[1, ::-1]
    assert deviation(model, row, replace(row.retention, death=swapped)) > 1e-5


@pytest.mark.parametrize("shift", [-1, 1])
def test_mutant_death_shifted_by_one_event_fails(witnessed, shift):
    model, row = witnessed
    death = row.retention.death.copy()
    layer, head, token = np.argwhere((death > 0) & (death < row.retention.events - 1))[0]
    death[layer, head, token] += shift
    assert deviation(model, row, replace(row.retention, death=death)) > 1e-5
