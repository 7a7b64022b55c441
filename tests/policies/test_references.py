"""What is kept: published cases, reserves and samples on fixed keys, values, queries and noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import references_of_slots as of_slots
import torch
from references_of_slots import Case
from stepper import Stepper

from epiviz import policies
from epiviz.cache import choose
from epiviz.policies import Budget, ReserveValues, Sample, Slots
from epiviz.policies.order import largest
from epiviz.policies.scoring import standardise
from epiviz.retention import Reason

LAYERS, ROWS, HEADS, KV, N, SIZE, WINDOW = 2, 2, 4, 2, 23, 5, 6
BUDGET = Budget(total=16, sinks=2, recent=4, buffer=7).resolve(10, 100)


class Noise:
    """Stands in for Draws with numbers that the reference sees too."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.exponential = self.random.exponential(size=(LAYERS, ROWS, KV, N))
        self.matrix = self.random.normal(size=(LAYERS, ROWS, SIZE, 20))

    def gumbel(self, positions):
        return torch.from_numpy(-np.log(self.exponential))

    def normal(self, layers, *shape, fixed=False):
        assert (layers, *shape) == (LAYERS, SIZE, 20)
        return torch.from_numpy(self.matrix)


@pytest.fixture
def slots():
    random = np.random.default_rng(1)
    seen = 40
    positions = np.stack(
        [
            np.sort(np.r_[0, 1, random.choice(np.arange(2, seen - 7), N - 9, replace=False), seen - 7 : seen])
            for _ in range(LAYERS * ROWS * KV)
        ]
    ).reshape(LAYERS, ROWS, KV, N)
    slot = torch.arange(N)
    return Slots(
        keys=torch.from_numpy(random.normal(size=(LAYERS, ROWS, KV, N, SIZE))),
        values=torch.from_numpy(random.normal(size=(LAYERS, ROWS, KV, N, SIZE))),
        positions=torch.from_numpy(positions),
        candidates=((slot >= 2) & (slot < N - 4))[None, None, None],
        budget=BUDGET,
        tracks={},
        queries=torch.from_numpy(random.normal(size=(LAYERS, ROWS, HEADS, WINDOW, SIZE))),
        query_positions=torch.tensor([[36, 37, 38, 39, 34, 35], [39, 34, 35, 36, 37, 38]]),
    )


def heads():
    return itertools.product(range(LAYERS), range(ROWS), range(KV))


def test_vase_attnv_reserves_ranges_and_samples_attention(slots):
    noise = Noise()
    ranking = policies.get("vase-attnv", window=WINDOW, value_share=0.375).rank(slots, {}, noise)
    keep, _ = choose(ranking.priority, BUDGET.front, BUDGET.recent, BUDGET.total)
    attention = of_slots.snapkv(policies.SnapKV(WINDOW), Case(slots, 0, [0] * ROWS, [0] * ROWS))
    for layer, row, head in heads():
        candidates = list(range(2, N - 4))
        values = slots.values[layer, row, head].numpy()
        by_range = sorted(candidates, key=lambda i: values[i].max() - values[i].min())
        reserved = set(by_range[-4:])  # round(0.375 · 16) = 6, two of them sinks
        race = {i: attention[layer, row, head, i] / noise.exponential[layer, row, head, i] for i in candidates}
        sampled = set(sorted(set(candidates) - reserved, key=race.get)[-6:])
        expected = {0, 1, *reserved, *sampled, *range(N - 4, N)}
        assert set(keep[layer, row, head].tolist()) == expected
        reasons = ranking.reason[layer, row, head]
        assert {i for i in candidates if reasons[i] == Reason.RESERVED} == reserved


def test_vase_dkv_survives_large_half_precision_values(slots):
    slots.keys, slots.values = (torch.full_like(x, 300.0, dtype=torch.float16) for x in (slots.keys, slots.values))
    assert policies.get("vase-dkv").rank(slots, {}, Noise()).priority.isfinite().all()


# -- EpiKV, stepping through a cache of one head ---------------------------------------------------

G_LOW, G_HIGH = [5, 1, 4, 2, 8, 3, 6, 7], [2, 2, 9, 1, 1, 5, 3, 4]
VALUES = [[1, 1, 1], [0, 9, 0], [0, 1, 0], [5, 5, 5], [0, 0, 2], [0, 0, 0], [0, 1, 1], [2, 0, 0]]


def kept_decode_tokens(policy, budget, low, high, prompt=2, values=None):
    """Step a policy over given displacements, one eviction per overflow; yield the kept decode tokens after each."""
    stepper = Stepper(policy, budget)
    stepper.feed(prompt, moves={1: [0.0] * prompt, 2: [0.0] * prompt})
    values = values or [[0, 0, 0]] * len(low)
    for a, b, value in zip(low, high, values, strict=True):
        stepper.feed(1, moves={1: [float(a)], 2: [float(b)]}, values=[value])
        yield {p - prompt for p in stepper.positions() if p >= prompt}


def budget(total, recent, prompt):
    return Budget(total=total, sinks=0, recent=recent, buffer=1, protect_prompt=True).resolve(prompt, 1000)


EPIKV = policies.get("epikv", layers=(1, 2))


def test_epikv_keeps_the_tokens_of_the_reference_case():
    *_, seventh, eighth = kept_decode_tokens(EPIKV, budget(8, 2, 2), G_LOW, G_HIGH)
    assert seventh == {0, 1, 3, 4, 5, 6}
    assert eighth == {0, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("statistic", ["range", "norm"])
def test_value_reserve_swaps_the_reference_token_in(statistic):
    policy = ReserveValues(EPIKV, share=0.125, statistic=statistic)
    *_, eighth = kept_decode_tokens(policy, budget(8, 2, 2), G_LOW, G_HIGH, values=VALUES)
    assert eighth == {0, 1, 3, 4, 6, 7}
    *_, eighth = kept_decode_tokens(ReserveValues(EPIKV, share=0.0), budget(8, 2, 2), G_LOW, G_HIGH, values=VALUES)
    assert eighth == {0, 3, 4, 5, 6, 7}


def test_epikv_streaming_equals_the_offline_top():
    from epiviz import signals

    low, high = np.random.default_rng(4).uniform(0, 10, (2, 300))
    *_, last = kept_decode_tokens(EPIKV, budget(60, 12, 10), low, high, prompt=10)
    score = signals.causal_zscore(torch.tensor(low)) - signals.causal_zscore(torch.tensor(high))
    best = score[:288].argsort(descending=True)[:38].tolist()
    assert last == {*best, *range(288, 300)}


# -- composition -----------------------------------------------------------------------------------


class Scores(policies.Policy):
    """Fixed scores for any slots."""

    def __init__(self, scores, weights):
        object.__setattr__(self, "scores", torch.as_tensor(scores, dtype=torch.float64))
        object.__setattr__(self, "weights", weights)

    def rank(self, slots, state, draws):
        return policies.Ranking(self.scores.expand(slots.positions.shape))


def sampled(scores, slots, weights=True, temperature=1.0, seed=0):
    ranking = Sample(Scores(scores, weights), temperature).rank(slots, {}, Noise(seed))
    keep, _ = choose(ranking.priority, BUDGET.front, BUDGET.recent, BUDGET.total)
    return ranking.priority, keep


def test_zero_weights_lose_and_are_taken_newest_first(slots):
    weights = np.zeros(N)
    weights[[5, 9, 12]] = 1
    priority, keep = sampled(weights, slots)
    assert priority.isfinite().all()
    expected = [0, 1, 5, 9, 11, *range(12, N)]
    assert (keep == torch.tensor(sorted(expected))).all(), "3 weighted, the other 7 by recency, no duplicates"
    _, keep = sampled(np.zeros(N), slots)
    assert (keep == torch.tensor([0, 1, *range(N - 14, N)])).all()


def test_signed_scores_race_as_exponentials_of_z(slots):
    scores = np.random.default_rng(2).normal(3, 7, N)
    priority, _ = sampled(scores, slots, weights=False, temperature=0.5)
    inside = scores[2 : N - 4]
    z = (scores - inside.mean()) / inside.std()
    expected = z / 0.5 - np.log(Noise().exponential)
    assert priority.numpy() == pytest.approx(expected)


def test_low_temperature_is_the_top(slots):
    scores = np.random.default_rng(2).permutation(N).astype(float)
    _, keep = sampled(scores, slots, weights=False, temperature=1e-6)
    best = 2 + np.argsort(scores[2 : N - 4])[-10:]
    assert (keep == torch.tensor(sorted([0, 1, *best, *range(N - 4, N)]))).all()


def test_sampling_follows_the_weights(slots):
    """One slot of twice the weight wins the first place of a race twice as often."""
    weights = np.ones(N)
    weights[10] = 2
    wins = np.zeros(N)
    for seed in range(400):
        priority, _ = sampled(weights, slots, seed=seed)
        inside = priority[..., 2 : N - 4]
        wins += np.bincount(2 + inside.argmax(-1).flatten().numpy(), minlength=N)
    total, share = wins.sum(), 2 / 18
    assert abs(wins[10] / total - share) < 4 * (share * (1 - share) / total) ** 0.5


def test_constant_scores_standardise_to_zero():
    z = standardise(torch.full((1, 1, 1, 5), 3.0), torch.ones(1, 1, 1, 5, dtype=torch.bool))
    assert (z == 0).all()


def test_ties_go_to_the_newer():
    assert largest(torch.tensor([1.0, 2, 2, 2]), 2).tolist() == [False, False, True, True]
    keep, gone = choose(torch.zeros(1, 1, 1, 10), 2, 3, 7)
    assert keep.flatten().tolist() == [0, 1, 5, 6, 7, 8, 9] and gone.flatten().tolist() == [2, 3, 4]


def test_names_show_wrappers_and_parameters():
    assert policies.get("vase-attnv").label == "vase-attnv"
    assert policies.get("vase-attnv", value_share=0.5).label == "vase-attnv(value_share=0.5)"
    assert ReserveValues(Sample(policies.get("epikv"), 2.0), 0.1).label == "reserve(sample(epikv, T=2), 0.1)"
    assert policies.get("random", scope="global").label == "random(scope=global)"


def test_global_random_keeps_one_set_for_all_heads():
    from tiny import random_prompt, tiny_model

    import epiviz as ev

    run = ev.generate(
        tiny_model("qwen3"),
        random_prompt(30),
        policies.get("random", scope="global"),
        Budget(40, 2, 8, 8),
        60,
        progress=False,
    )
    assert (run.retention.death == run.retention.death[:1, :1]).all()
    per_head = ev.generate(tiny_model("qwen3"), random_prompt(30), "random", Budget(40, 2, 8, 8), 60, progress=False)
    assert (per_head.retention.death != per_head.retention.death[:1, :1]).any()
