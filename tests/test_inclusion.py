"""VaSE's bound, the exact inclusion probability against all orders of draws, and what Sample really keeps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import inclusion, policies
from epiviz.inclusion import with_replacement, without_replacement


def by_enumeration(weights, draws):
    """Sum the probabilities of all orders in which ``draws`` tokens can be drawn one after the other."""
    found = np.zeros(len(weights))
    for order in itertools.permutations(range(len(weights)), draws):
        probability, left = 1.0, sum(weights)
        for token in order:
            probability *= weights[token] / left
            left -= weights[token]
        found[list(order)] += probability
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-12, 3), min_size=2, max_size=6), st.data())
def test_the_exact_probability_is_that_of_all_orders(logs, data):
    weights = np.exp(logs)
    draws = data.draw(st.integers(1, len(logs)))
    exact = without_replacement(weights, draws)
    # summing the orders loses digits where little is left to draw from
    assert exact == pytest.approx(by_enumeration(weights, draws), abs=1e-9)


@pytest.mark.parametrize(("n", "draws", "spread"), [(60, 20, 1.0), (120, 100, 2.0), (150, 3, 3.0), (40, 39, 5.0)])
def test_probabilities_add_up_to_the_draws_and_keep_the_bound(n, draws, spread):
    weights = np.exp(spread * np.random.default_rng(n).normal(size=n))
    exact, bound = without_replacement(weights, draws), with_replacement(weights, draws)
    assert exact.sum() == pytest.approx(draws, abs=1e-8)
    assert (exact >= bound - 1e-10).all()
    assert (np.diff(exact[np.argsort(weights)]) >= -1e-12).all()


def test_by_hand():
    assert with_replacement([3, 1], 2).tolist() == pytest.approx([1 - 1 / 16, 1 - 9 / 16])
    # two of three: 1 − P(last) with P(last = 4) = 2/7·1/5 + 1/7·2/6
    assert without_replacement([4, 2, 1], 2)[0] == pytest.approx(1 - (2 / 7 / 5 + 1 / 7 * 2 / 6))
    assert without_replacement(np.full(50, 0.1), 5) == pytest.approx(np.full(50, 0.1))
    assert with_replacement([2.0], 1).tolist() == [1] and with_replacement([1, 2], 0).tolist() == [0, 0]
    assert without_replacement([5, 1], 0).tolist() == [0, 0]


def test_weight_zero_comes_last_and_the_newest_first():
    assert without_replacement([0, 2, 0, 1, 0], 3).tolist() == [0, 1, 0, 1, 1]
    assert with_replacement([0, 2, 0, 1, 0], 3)[0] == 0
    assert inclusion.count_kept([0, 2, 0, 1, 0], 3, seeds=5).tolist() == [0, 5, 0, 5, 5]


def test_sample_keeps_each_token_as_often_as_the_exact_probability_says():
    weights = np.exp(2 * np.random.default_rng(1).normal(size=40))
    found = inclusion.inclusion(weights, 12, seeds=800)
    assert found.kept.sum() == 12 * 800
    assert not found.differs(found.exact).any()
    assert (found.differs(found.bound) == 1).any() and (found.differs(found.bound) >= 0).all()
    low, high = found.interval()
    assert (low <= found.frequency).all() and (found.frequency <= high).all()
    inside = (low <= found.exact) & (found.exact <= high)
    assert inside.mean() > 0.85


def test_a_wrong_sampler_would_be_found_out(monkeypatch):
    weights = np.exp(2 * np.random.default_rng(1).normal(size=40))
    cubed = inclusion.count_kept(weights**3, 12, seeds=800)
    monkeypatch.setattr(inclusion, "count_kept", lambda *args: cubed)
    found = inclusion.inclusion(weights, 12, seeds=800)
    assert (found.differs(found.bound) == -1).any()


def test_temperature_flattens():
    weights = np.array([8.0, 4.0, 2.0, 1.0])
    found = inclusion.inclusion(weights, 2, seeds=800, temperature=2.0)
    assert found.share == pytest.approx(weights**0.5 / (weights**0.5).sum())
    assert not found.differs(found.exact).any()
    assert found.exact[3] > without_replacement(weights, 2)[3]


@pytest.mark.parametrize(
    ("weights", "draws", "message"),
    [
        ([1, -1], 1, "smallest -1"),
        ([1, np.nan], 1, "finite numbers"),
        ([0, 0], 1, "one of them above"),
        ([], 0, r"shape \(0,\)"),
        ([[1, 2]], 1, r"shape \(1, 2\)"),
        ([1, 2], 3, "3 slots cannot be drawn from 2"),
    ],
)
def test_bad_weights_are_refused(weights, draws, message):
    with pytest.raises(ValueError, match=message):
        without_replacement(weights, draws)


def test_weights_of_a_real_eviction_are_those_of_the_policy_that_ranks():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(12), tokens=random_prompt(80, 3), progress=False)
    budget = ev.Budget(40, sinks=2, recent=16, buffer=8)
    weights, draws = inclusion.weights_at_first_event(model, trace, budget, policies.get("snapkv", window=16))
    assert weights.shape == (4, 2, 48 - 2 - 16) and draws == 40 - 2 - 16 and (weights >= 0).all()
    found = ev.replay(model, trace, policies.get("snapkv", window=16), budget, progress=False).retention
    for layer, head in np.ndindex(4, 2):
        kept = np.flatnonzero(found.death[layer, head, 2:32] > 0)
        assert set(kept) == set(np.argsort(weights[layer, head])[-draws:])
    drawn = inclusion.inclusion(weights[1, 0], draws, seeds=60)
    assert drawn.kept.sum() == 60 * draws and (drawn.exact >= drawn.bound - 1e-10).all()
    with pytest.raises(ValueError, match="scores of 'epikv' are no weights"):
        inclusion.weights_at_first_event(model, trace, budget, "epikv")
    assert inclusion.weights_at_first_event(model, trace, np.int64(120)) is None
