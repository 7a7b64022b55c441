"""Reserves and draws around any policy: adaptive allocation, EpiKV with a reserve, prompts longer than the budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import WatchedSession, deviation, evicting_run
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import policies
from epiviz.draws import Draws, sample_key
from epiviz.engine import make_rows
from epiviz.policies import Budget, RandomReserve, ReserveValues, Sample, Slots
from epiviz.policies.reserve import adaptive_counts

BUDGET = Budget(total=40, sinks=2, recent=8, buffer=8)
EVERY = 4 * 2  # heads of the tiny model


def slots_with(values: torch.Tensor, budget: Budget) -> Slots:
    """Slots with these values ``[layers, rows, kv_heads, n, head_dim]``, at the first positions."""
    n = values.shape[-2]
    slot = torch.arange(n)
    return Slots(
        keys=values,
        values=values,
        positions=slot.expand(values.shape[:-1]),
        candidates=((slot >= budget.sinks) & (slot < n - budget.recent))[None, None, None],
        budget=budget.resolve(1, 100),
        tracks={},
    )


def counts_by_hand(size: np.ndarray, count: int, most: int) -> np.ndarray:
    """Serve ratios to the head's median one by one, for sizes ``[layers, heads, n]`` of one row."""
    layers, heads, _ = size.shape
    queue = []
    for layer in range(layers):
        for head in range(heads):
            ordered = sorted((x for x in size[layer, head] if x > -np.inf), reverse=True)
            median = ordered[len(ordered) // 2]
            for rank, x in enumerate(ordered[:most]):
                ratio = x / median if median else (np.inf if x else 1.0)
                queue.append((-np.float32(ratio), rank, layer, head))
    counts = np.zeros((layers, heads), dtype=int)
    for _, _, layer, head in sorted(queue)[: count * layers * heads]:
        counts[layer, head] += 1
    return counts


@st.composite
def sizes(draw):
    """Sizes ``[layers, rows, heads, n]`` with many ties, the last slots no candidates; slots per head and their bound.

    The numbers come from a seed: left to choose them one by one, hypothesis makes heads that are all alike.
    """
    layers, rows, heads, n = (draw(st.integers(1, most)) for most in (3, 2, 3, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = random.choice(np.float32([0.0, 1.0, 1.5, 2.0, 3.0, 600.0]), (layers, rows, heads, n))
    candidates = draw(st.integers(1, n))
    size[..., candidates:] = -np.inf
    most = draw(st.integers(0, candidates))
    return size, draw(st.integers(0, most)), most


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_adaptive_counts_against_serving_one_by_one(case):
    size, count, most = case
    found = adaptive_counts(torch.from_numpy(size), count, most)[..., 0].numpy()
    for row in range(size.shape[1]):
        assert found[:, row].tolist() == counts_by_hand(size[:, row], count, most).tolist()
    layers, rows, heads, _ = size.shape
    assert found.shape == (layers, rows, heads)
    assert (found.sum((0, 2)) == count * layers * heads).all(), "the total is that of a uniform allocation"
    assert (found >= 0).all() and (found <= most).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.data())
def test_adaptive_counts_follow_their_heads(seed, count, data):
    """Swapped heads swap their counts, other scales change nothing, and the same sizes give the same counts."""
    size = np.random.default_rng(seed).lognormal(0, [[[[0.3]], [[1.0]]], [[[2.0]], [[0.6]]]], (2, 2, 1, 15))
    size = torch.from_numpy(size).movedim(1, 2)  # [layers, 1, heads, n]
    ratio = (size.float() / size.float().median(-1, keepdim=True).values).flatten().sort(descending=True).values
    assume(ratio[4 * count - 1] > ratio[4 * count])
    counts = adaptive_counts(size, count, 10)
    assert torch.equal(counts, adaptive_counts(size, count, 10))
    order = data.draw(st.permutations(range(2)))
    assert torch.equal(adaptive_counts(size[:, :, order], count, 10), counts[:, :, order])
    assert torch.equal(adaptive_counts(size[order], count, 10), counts[order])
    scale = 2.0 ** torch.tensor(data.draw(st.lists(st.integers(-9, 9), min_size=4, max_size=4))).view(2, 1, 2, 1)
    assert torch.equal(adaptive_counts(size * scale, count, 10), counts)


@pytest.mark.parametrize(
    "count, most, expected", [(1, 6, [2, 0]), (2, 6, [2, 2]), (3, 6, [3, 3]), (1, 1, [1, 1]), (0, 6, [0, 0])]
)
def test_adaptive_counts_of_two_heads_by_hand(count, most, expected):
    """Ratios 9, 9, 1, 1, 1, 1 and 3, 2, 2, 1, 1, 1."""
    size = torch.tensor([[1.0, 9, 1, 1, 9, 1], [20, 40, 20, 40, 60, 20]])[None, None]
    assert adaptive_counts(size, count, most).flatten().tolist() == expected


def test_heads_that_are_alike_share_evenly():
    """Constant ranges, half-precision values of 300, and one large value among zeros, which is served first."""
    constant = torch.full((2, 1, 2, 12, 4), 7.0)
    half = torch.tensor([300.0, -300.0, 300.0, -300.0], dtype=torch.float16).expand(2, 1, 2, 12, 4)
    one_hot = torch.zeros(2, 1, 2, 12, 4)
    one_hot[1, 0, 0, 5, 1] = 300.0
    for values, statistic in itertools.product((constant, half, one_hot), ("range", "variance", "norm")):
        slots = slots_with(values, Budget(8, sinks=0, recent=0, buffer=4))
        ranking = ReserveValues(policies.get("recency"), 3 / 8, statistic, allocation="adaptive").rank(slots, {}, None)
        assert not ranking.priority.isnan().any()
        reserved = ranking.reason == ev.Reason.RESERVED
        assert reserved.sum(-1).flatten().tolist() == [3, 3, 3, 3]
        assert reserved[1, 0, 0, 5] or values is not one_hot


# -- in the engine ---------------------------------------------------------------------------------


def reserved_at_the_end(row) -> np.ndarray:
    history = row.retention
    alive = history.alive(int(history.event_steps[-1]))
    return (alive & (history.reason == ev.Reason.RESERVED)).sum(-1)


REST = {
    "vase-attnv": policies.get("vase-attnv", allocation="adaptive"),
    "random-reserve": policies.get("random-reserve", allocation="adaptive"),
    "epikv": ReserveValues(policies.get("epikv"), allocation="adaptive"),
    "vase-dkv": ReserveValues(policies.get("vase-dkv"), allocation="adaptive", statistic="norm"),
    "layers": ReserveValues(Sample(policies.get("epikv")), allocation="adaptive", scope="layer"),
}


@pytest.mark.parametrize("name", REST)
def test_an_adaptive_reserve_moves_slots_between_heads(name):
    model = tiny_model("qwen3")
    for row in evicting_run(model, [random_prompt(12), random_prompt(60, 1)], REST[name], BUDGET, 70):
        assert deviation(model, row) <= 1e-9
        assert row.retention.events >= 3
        counts = reserved_at_the_end(row)
        assert counts.sum() == 8 * EVERY, "round(0.25 · 40) = 10 slots per head, 2 of them sinks"
        assert counts.max() > counts.min() and counts.max() <= 30
        assert (row.retention.alive(int(row.retention.event_steps[-1])).sum(-1) == 40).all()


def test_controls_are_matched_head_by_head():
    """At random, as many as the reserve takes of each head; without the largest, exactly the ones it would take."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 2, 2, 30, 4, generator=generator) * torch.rand(2, 2, 2, 30, 1, generator=generator) ** -1
    slots = slots_with(values, Budget(20, sinks=2, recent=4, buffer=10))
    draws = Draws(0, [1, 2], [0, 0], torch.device("cpu"))
    kept = ReserveValues(policies.get("random"), 0.4, allocation="adaptive").rank(slots, {}, draws)
    reserved = kept.reason == ev.Reason.RESERVED
    assert reserved.sum((0, 2, 3)).tolist() == [6 * 4, 6 * 4]
    assert len(reserved.sum(-1).unique()) > 1
    lot = RandomReserve(policies.get("random"), 0.4, allocation="adaptive").rank(slots, {}, draws)
    drawn = lot.reason == ev.Reason.RESERVED
    assert torch.equal(drawn.sum(-1), reserved.sum(-1)) and not torch.equal(drawn, reserved)
    control = policies.get("evict-largest", matched=True, share=0.4, allocation="adaptive").rank(slots, {}, draws)
    assert torch.equal(control.priority < 0, reserved)
    uniform = policies.get("evict-largest", matched=True, share=0.4).rank(slots, {}, draws)
    assert ((uniform.priority < 0).sum(-1) == 6).all()


def whole_prompt(model, prompt, window):
    """Keys, values ``[layers, heads, n, size]`` and the last queries of a prompt in a cache that holds all of it."""
    policy = policies.get("snapkv", window=window)
    rows = make_rows([prompt], policy, Budget(len(prompt) + 100), 4)
    with WatchedSession(model, policy, rows, 4, 0) as session:
        session.prefill()
        keys, values = session.cache.keys[:, 0].clone(), session.cache.values[:, 0].clone()
        return keys.numpy(), values.numpy(), session.recent.queries[:, 0].numpy(), session.recent.positions[0].numpy()


@pytest.mark.parametrize("allocation", ["uniform", "adaptive"])
@pytest.mark.parametrize("length", [102, 600])
def test_a_prompt_longer_than_the_budget_is_cut_by_reserve_and_draw(length, allocation):
    """Event 0 against a slow reference; 600 tokens pass in two blocks."""
    model, prompt, window = tiny_model("qwen3"), random_prompt(length), 16
    policy = policies.get("vase-attnv", window=window, allocation=allocation)
    (row,) = evicting_run(model, [prompt], policy, BUDGET, 2, seed=5)
    assert row.retention.event_steps.tolist() == [length]
    assert deviation(model, row) <= 1e-9

    keys, values, queries, asked = whole_prompt(model, prompt, window)
    candidates = np.arange(2, length - 8)
    size = np.ptp(values, axis=-1).astype(np.float32)  # equal tokens have equal values in layer 0; the newer wins
    masked = np.full(size.shape, -np.inf)
    masked[..., candidates] = size[..., candidates]
    counts = np.full(size.shape[:2], 8) if allocation == "uniform" else counts_by_hand(masked, 8, 30)
    assert counts.sum() == 8 * EVERY
    draws = Draws(5, [sample_key(prompt)], [0], torch.device("cpu"))
    exponential = -np.log(draws.uniform(torch.arange(length).expand(4, 1, 2, length)).numpy())[:, 0]
    for layer, head in np.ndindex(4, 2):
        old = length - 8
        seen = np.arange(old) <= asked[:, None]
        attention = np.zeros(old)
        for query in queries[layer, 2 * head : 2 * head + 2]:
            logits = np.where(seen, query @ keys[layer, head, :old].T / 4, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            mean = (weights / weights.sum(-1, keepdims=True)).mean(0)
            attention += np.convolve(mean, np.ones(5) / 5, mode="same") / 2
        by_size = candidates[np.argsort(size[layer, head, candidates], kind="stable")]
        reserved = set(by_size[len(candidates) - counts[layer, head] :])
        rest = np.array(sorted(set(candidates) - reserved))
        race = attention[rest] / exponential[layer, head, rest]
        sampled = set(rest[np.argsort(race)[len(rest) - 30 + len(reserved) :]])
        reason = row.retention.reason[layer, head, :length] * (row.retention.death[layer, head, :length] > 0)
        assert set(np.flatnonzero(reason == ev.Reason.RESERVED)) == reserved
        assert set(np.flatnonzero(reason == ev.Reason.SAMPLED)) == sampled


# -- EpiKV with a reserve ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        ReserveValues(policies.get("epikv"), 0.25),
        ReserveValues(policies.get("epikv"), 0.25, scope="global"),
        ReserveValues(Sample(policies.get("epikv"), 0.5), 0.25),
        Sample(policies.get("epikv")),
        Sample(policies.get("epikv"), score_dtype="bfloat16"),
    ],
    ids=lambda policy: policy.label,
)
def test_epikv_under_any_wrapper(policy):
    model = tiny_model("qwen3")
    (row,) = evicting_run(model, [random_prompt(60)], policy, BUDGET, 70)
    assert deviation(model, row) <= 1e-9
    assert row.retention.events >= 3 and row.retention.event_steps[0] == 60
    alike = (row.retention.death == row.retention.death[:1, :1]).all()
    assert alike == (policy.label == "reserve(epikv, 0.25, global)"), "scores are one for all heads, values are not"
    if isinstance(policy, ReserveValues):
        assert (reserved_at_the_end(row) == 8).all()


def test_a_global_reserve_takes_the_values_that_are_large_on_average():
    values = torch.zeros(2, 1, 2, 6, 2)
    values[0, 0, 0, 1, 0], values[..., 3, 0] = 30.0, 10.0  # slot 1 in one head alone: 7.5 on average
    slots = slots_with(values, Budget(4, sinks=0, recent=0, buffer=2))
    reserved = {
        scope: (ReserveValues(policies.get("recency"), 0.25, scope=scope).rank(slots, {}, None).priority == torch.inf)
        for scope in ("head", "layer", "global")
    }
    assert reserved["global"].nonzero()[:, 3].tolist() == [3, 3, 3, 3]
    assert reserved["layer"].nonzero()[:, 3].tolist() == [1, 1, 3, 3]
    assert reserved["head"].nonzero()[:, 3].tolist() == [1, 3, 3, 3]


# -- errors and names ------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["uniform", "adaptive"])
def test_more_reserved_than_free_is_an_error_and_just_as_many_is_not(allocation):
    """With 30 free slots per head, 32 of 40 with two sinks is all there is; the wrapped policy is left with none."""
    model, prompt = tiny_model("qwen3"), random_prompt(60)
    with pytest.raises(ev.BudgetError, match="reserves 32 beside 2 sinks, but only 30 are free"):
        ev.generate(model, prompt, policies.get("vase-attnv", value_share=0.85, allocation=allocation), BUDGET, 5)
    policy = policies.get("vase-attnv", value_share=0.8, allocation=allocation)
    (row,) = evicting_run(model, [prompt], policy, BUDGET, 30)
    assert deviation(model, row) <= 1e-9
    assert (reserved_at_the_end(row) == 30).all()
    (again,) = evicting_run(model, [prompt], policy, BUDGET, 30, seed=1)
    assert np.array_equal(row.retention.death, again.retention.death), "nothing is left to draw"


def test_wrappers_print_what_they_do():
    epikv = policies.get("epikv")
    assert policies.get("vase-attnv", allocation="adaptive").label == "vase-attnv(allocation=adaptive)"
    assert ReserveValues(epikv, allocation="adaptive").label == "reserve(epikv, 0.25, adaptive)"
    assert ReserveValues(epikv, 0.1, "norm", scope="global").label == "reserve(epikv, 0.1, norm, global)"
    assert RandomReserve(epikv, 0.1, allocation="adaptive").label == "random-reserve(epikv, 0.1, adaptive)"
    assert Sample(epikv, 0.5, "bfloat16").label == "sample(epikv, T=0.5, bfloat16)"
    control = policies.get("evict-largest", matched=True, allocation="adaptive")
    assert control.label == "evict-largest(matched=True, allocation=adaptive)"


@pytest.mark.parametrize("name, value", [("allocation", "fair"), ("scope", "token"), ("statistic", "sum")])
def test_a_reserve_checks_its_parameters(name, value):
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{value}'"):
        ReserveValues(policies.get("epikv"), **{name: value})
