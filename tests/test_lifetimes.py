"""Births and deaths against a cache of plain sets, and against numbers worked out by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from histories import simulate, simulations
from hypothesis import given, settings
from statsmodels.duration.survfunc import SurvfuncRight

from epiviz import lifetimes
from epiviz.policies.base import Budget
from epiviz.retention import Retention

quick = settings(max_examples=60, deadline=None)


def made(death, steps, evicts=(), prompt_length=1):
    death = np.array(death, dtype=np.int32)
    return Retention(np.array(steps, dtype=np.int64), death, np.zeros_like(death, np.uint8), prompt_length, evicts)


@pytest.fixture
def history():
    """Two heads, six tokens, budget of three with one recent: events after 4 and 6 tokens."""
    return made([[[0, 1, 2, 1, 2, 2], [2, 0, 1, 1, 2, 2]]], [4, 6])


BUDGET = Budget(3, sinks=0, recent=1, buffer=1).resolve(1, 5)


@quick
@given(simulations())
def test_alive_and_held_are_what_the_sets_hold(made_up):
    history = made_up.history
    for step, held in made_up.held.items():
        alive = history.alive(step)
        for layer, heads in enumerate(held):
            for head, tokens in enumerate(heads):
                assert set(np.flatnonzero(alive[layer, head])) == tokens
        count = [
            sum(token in head for layer in history.evicting for head in held[layer]) for token in range(history.tokens)
        ]
        assert history.held(step) == pytest.approx(np.array(count) / (len(history.evicting) * alive.shape[1]))


@quick
@given(simulations())
def test_a_lifetime_counts_the_later_queries_that_saw_the_slot(made_up):
    history = made_up.history
    lives = lifetimes.lifetimes(history)
    visible = history.visible()
    for index, layer in enumerate(history.evicting):
        assert np.array_equal(lives.steps[index], visible[layer].sum(axis=1) - 1)
        assert np.array_equal(lives.censored[index], history.alive(history.tokens)[layer])


def test_lifetimes_by_hand(history):
    lives = lifetimes.lifetimes(history)
    assert lives.steps.tolist() == [[[3, 4, 3, 2, 1, 0], [5, 2, 3, 2, 1, 0]]]
    assert lives.censored[0, 0].tolist() == [False, False, True, False, True, True]


@quick
@given(simulations())
def test_the_survival_curve_is_kaplan_and_meiers(made_up):
    lives = lifetimes.lifetimes(made_up.history)
    curve = lifetimes.survival_curve(lives)
    reference = SurvfuncRight(lives.steps.ravel(), (~lives.censored).ravel())
    assert len(curve) == lives.steps.max() + 1
    assert curve[reference.surv_times.astype(int)] == pytest.approx(reference.surv_prob)
    assert (np.diff(curve) <= 0).all()


def test_a_curve_of_some_tokens_and_of_none(history):
    lives = lifetimes.lifetimes(history)
    one = lifetimes.survival_curve(lives, np.arange(6) == 1)  # lived 4 and 2 tokens
    assert one.tolist() == [1, 1, 0.5, 0.5, 0]
    assert lifetimes.survival_curve(lives, np.zeros(6, bool)).tolist() == [1]


@quick
@given(simulations(count=2))
def test_overlap_counts_sets(pair):
    first, second = (each.history for each in pair)
    among = np.arange(first.tokens) % 3 > 0
    for step in pair[0].held:
        for mask in (None, among):
            found = lifetimes.overlap(first, second, step, among=mask)
            for index, layer in enumerate(first.evicting):
                for head in range(first.death.shape[1]):
                    a, b = ({t for t in each.held[step][layer][head] if mask is None or mask[t]} for each in pair)
                    where = index, head
                    assert (found.both[where], found.first[where], found.second[where]) == (len(a & b), len(a), len(b))
                    if a | b:
                        assert found.jaccard[where] == pytest.approx(len(a & b) / len(a | b))
                    else:
                        assert np.isnan(found.jaccard[where])


def test_overlap_by_hand(history):
    other = made([[[0, 0, 2, 1, 2, 2], [2, 0, 1, 1, 2, 2]]], [4, 6])
    found = lifetimes.overlap(history, other, 4)
    assert found.jaccard.tolist() == [[2 / 3, 1]]
    assert found.overall == pytest.approx(5 / 6)
    assert lifetimes.overlap(history, other).overall == lifetimes.overlap(history, other, 6).overall == 1
    assert np.isnan(lifetimes.overlap(history, other, 0).overall)


def test_histories_that_cannot_be_compared(history):
    with pytest.raises(ValueError, match="1 layers × 2 heads and 2 × 1"):
        lifetimes.overlap(history, made(np.zeros((2, 1, 6)), [6]))
    with pytest.raises(ValueError, match="evicting in 2 and 1 layers"):
        lifetimes.overlap(made(np.zeros((2, 1, 6)), [6]), made(np.zeros((2, 1, 6)), [6], evicts=(1,)))
    with pytest.raises(ValueError, match="outside 0 … 6"):
        lifetimes.overlap(history, history, 7)


@quick
@given(simulations())
def test_contested_tokens_are_those_an_event_could_take(made_up):
    history, budget = made_up.history, made_up.budget
    for step in made_up.held:
        events = [s for s in history.event_steps if s <= step]
        expected = [any(budget.front <= token < s - budget.recent for s in events) for token in range(history.tokens)]
        assert lifetimes.contested(history, budget, step).tolist() == expected


def test_without_a_budget_nothing_is_contested(history):
    never = made(np.zeros((1, 1, 4)), [])
    assert not lifetimes.contested(never, None).any()
    assert lifetimes.survival(never, np.zeros(4), None).tokens.tolist() == [0]
    assert lifetimes.held_by_chance(never, None, 3).tolist() == [1, 1, 1, 0]


@quick
@given(simulations())
def test_chance_adds_up_to_the_slots_that_are_held(made_up):
    history, budget = made_up.history, made_up.budget
    for step, held in made_up.held.items():
        faced, fired = lifetimes.first_event(history, budget, step), history.fired(step)
        for layer in history.evicting:
            likely = lifetimes.chance(history.death[layer], faced, fired)[:, faced]
            assert likely[:, :step].sum(-1) == pytest.approx([len(head) for head in held[layer]])


@pytest.fixture
def lost():
    """One head, nine tokens: 2 of the candidates 1, 2, 3 leave after six tokens, 2 of the rest and 4, 5 after eight."""
    history = made([[[2, 0, 1, 0, 2, 1, 2, 2, 2]]], [6, 8])
    return history, Budget(4, sinks=1, recent=2, buffer=2).resolve(1, 8)


def test_chance_by_hand(lost):
    assert lifetimes.held_by_chance(*lost) == pytest.approx([1, 1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 3, 1, 1, 1])
    assert lifetimes.held_by_chance(*lost, 7) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 1, 1, 1, 0, 0])
    shared = lifetimes.overlap_by_chance(*lost)
    assert (shared.both.item(), shared.first.item()) == pytest.approx((1 / 3, 1))
    assert shared.overall == pytest.approx(0.2)


def test_chance_is_what_random_evictions_do_on_average():
    budget = Budget(8, sinks=1, recent=3, buffer=4).resolve(6, 0)
    runs = [simulate(seed, 24, 1, 2, budget, 6, (0,)) for seed in range(500)]
    expected = lifetimes.held_by_chance(runs[0].history, budget)
    measured = np.mean([run.history.held(24) for run in runs], axis=0)
    assert len(runs[0].history.event_steps) >= 3 and expected[1] < expected[15] < 1
    error = np.sqrt(expected * (1 - expected) / 1000)
    assert (np.abs(measured - expected) <= 4 * error).all()


def test_agreement_with_a_label_by_hand(lost):
    history, budget = lost
    found = lifetimes.survival(history, np.isin(np.arange(10), [0, 1, 4]), budget)
    assert found.groups.tolist() == [False, True]
    assert found.tokens.tolist() == [3, 2]  # the sink is in the label, and not contested
    assert found.kept[:, 0, 0].tolist() == [0, 0.5]
    assert found.expected[:, 0, 0] == pytest.approx([5 / 27, 2 / 9])


@quick
@given(simulations())
def test_survival_counts_tokens_one_by_one(made_up):
    history, budget = made_up.history, made_up.budget
    groups = np.array(list("aabcc"), dtype=object)[np.arange(history.tokens) % 5]
    step = max(made_up.held)
    found = lifetimes.survival(history, groups, budget)
    contested = lifetimes.contested(history, budget)
    faced, fired = lifetimes.first_event(history, budget), history.events
    for name, tokens, kept, expected in zip(found.groups, found.tokens, found.kept, found.expected, strict=True):
        mine = [token for token in range(history.tokens) if contested[token] and groups[token] == name]
        assert tokens == len(mine)
        for index, layer in enumerate(history.evicting):
            likely = lifetimes.chance(history.death[layer], faced, fired)
            for head, held in enumerate(made_up.held[step][layer]):
                if mine:
                    assert kept[index, head] == pytest.approx(sum(token in held for token in mine) / len(mine))
                    assert expected[index, head] == pytest.approx(np.mean([likely[head, faced[t]] for t in mine]))
                else:
                    assert np.isnan(kept[index, head]) and np.isnan(expected[index, head])


def test_what_does_not_fit_together_is_refused(lost):
    history, budget = lost
    with pytest.raises(ValueError, match="head 0 lost token 1 at event 0, but the budget protects it until event 1"):
        lifetimes.survival(history, np.zeros(9), Budget(6, sinks=1, recent=5, buffer=2).resolve(1, 8))
    with pytest.raises(ValueError, match=r"9 tokens needs a group for each of them, got \(8,\)"):
        lifetimes.survival(history, np.zeros(8), budget)


def test_a_long_history_of_a_thousand_heads_needs_little_more_memory_than_itself():
    tokens, layers, heads, buffer = 32_768, 32, 32, 64
    budget = Budget(2048, sinks=4, recent=64, buffer=buffer).resolve(100, tokens)
    steps = np.arange(budget.peak, tokens, buffer)
    never = made(np.full((1, 1, tokens), len(steps)), steps)
    faced = lifetimes.first_event(never, budget).astype(np.int32)
    death = np.random.default_rng(0).integers(0, 400, (layers, heads, tokens), dtype=np.int32)
    death += faced
    np.minimum(death, len(steps), out=death)
    history = Retention(steps, death, np.zeros((layers, heads, tokens), np.uint8), 100)
    groups = np.arange(tokens) % 8
    asked = {
        "alive": lambda: history.alive(20_000),
        "held": lambda: history.held(20_000),
        "lifetimes": lambda: lifetimes.lifetimes(history),
        "overlap": lambda: lifetimes.overlap(history, history, 20_000),
        "survival": lambda: lifetimes.survival(history, groups, budget),
        "chance": lambda: lifetimes.held_by_chance(history, budget),
        "overlap by chance": lambda: lifetimes.overlap_by_chance(history, budget),
    }
    lives = lifetimes.lifetimes(history)
    asked["curve"] = lambda: lifetimes.survival_curve(lives, groups == 1)
    for name, ask in asked.items():
        tracemalloc.start()
        try:
            ask()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < (180 if name == "lifetimes" else 60) * 2**20, f"{name} took {peak / 2**20:.0f} MiB"
