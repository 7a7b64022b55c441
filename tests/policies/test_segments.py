"""Methods that keep a quota of each segment, and methods whose memory grows: published cases and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import deviation, evicting_run
from stepper import Stepper
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import policies
from epiviz.policies import Budget
from epiviz.policies.lagkv import lag_score
from epiviz.policies.segments import segment_entropy, tertiles

SEGMENTS = ["epikv-seg", "segment-hs", "thinkv-tertiles"]
SMALL = {"quotas": (6, 4, 2), "segment": 8}


def labels(values, ascending):
    return "".join("RET"[c] for c in tertiles(torch.tensor([values], dtype=torch.float64), ascending)[0])


def test_tertiles_of_the_reference_cases():
    entropy = ["R", "RE", "RRE", "RRET", "RREET", "RRREET", "RRREETT", "RRREEETT"]
    variance = ["R", "ER", "TER", "TERR", "TEERR", "TTEERR", "TTEERRR", "TTEEERRR"]
    for n in range(1, 9):
        assert labels(range(1, n + 1), True) == entropy[n - 1]
        assert labels(range(1, n + 1), False) == variance[n - 1]
    assert labels([3, 3, 3, 3], True) == labels([3, 3, 3, 3], False) == "RRRR"


def test_epikv_seg_keeps_the_tokens_of_the_reference_case():
    """Mean variances of the segments 2, 18, 8, 50 make T, R, E, R; only decode token 2 is dropped."""
    epiphany = policies.get("epikv", layers=(1, 2))
    policy = policies.get("epikv-seg", epiphany=epiphany, quotas=(2, 1, 0), segment=2, merge_tail=False)
    stepper = Stepper(policy, Budget(8, sinks=0, recent=2, buffer=1, protect_prompt=True).resolve(2, 100), size=2)
    keys = [[c, -c] for c in (1, 1, 3, 3, 2, 2, 5, 5, 1)]
    stepper.feed(2, moves={1: [0, 0], 2: [0, 0]}, keys=keys[:2])
    for key, low, high in zip(keys[2:], [5, 1, 4, 2, 8, 3, 6], [2, 2, 9, 1, 1, 5, 3], strict=True):
        priority = None
        if stepper.cache.held[0] == 8:
            stepper.budget = Budget(100, 0, 2, 1, True).resolve(2, 100)  # look before the cut
        stepper.feed(1, moves={1: [low], 2: [high]}, keys=[key])
    stepper.budget = Budget(8, sinks=0, recent=2, buffer=1, protect_prompt=True).resolve(2, 100)
    priority = policy.rank(stepper.slots(), {}, None).priority[0, 0, 0]
    kept = {p - 2 for p, x in enumerate(priority.tolist()) if x > -np.inf} | {5, 6}
    assert kept == {0, 1, 3, 4, 5, 6}


def test_a_single_slot_joins_the_segment_before():
    assert policies.get("epikv-seg").edges(257) == [0, 128, 257]
    assert policies.get("epikv-seg", merge_tail=False).edges(257) == [0, 128, 256, 257]
    assert policies.get("epikv-seg").edges(1) == [0, 1]


def test_entropy_of_a_segment():
    attention = torch.tensor([[0.1, 0.1, 0.1, 0.1]])
    assert segment_entropy(attention).item() == pytest.approx(np.log(4), abs=1e-6)
    assert segment_entropy(torch.tensor([[1.0, 0, 0, 0]])).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("protect", [False, True])
@pytest.mark.parametrize("name", SEGMENTS)
def test_underfilling_policies_pass_the_oracle_and_say_so(name, protect):
    model = tiny_model("qwen3")
    budget = Budget(48, sinks=2, recent=8, buffer=8, protect_prompt=protect)
    prompts = [random_prompt(12), random_prompt(30, 1)]
    for row in evicting_run(model, prompts, policies.get(name, **SMALL), budget, 150):
        assert deviation(model, row) <= 1e-9
        assert row.retention.events >= 3
        held = [row.retention.alive(step).sum(-1) for step in row.retention.event_steps]
        assert all((h == h[0, 0]).all() for h in held), "all heads keep equally many"
        if not protect:
            assert min(h[0, 0] for h in held) < 48, "it underfills"
        assert max(h[0, 0] for h in held) <= 48
        assert row.meter.mean_slots < 56


def test_heads_of_different_length_are_an_error():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Ragged(policies.Policy):
        underfills = True

        def rank(self, slots, state, draws):
            priority = torch.ones(slots.positions.shape)
            priority[0, 0, 0, 5] = -torch.inf
            return policies.Ranking(priority)

    with pytest.raises(ValueError, match="keeps 71 slots in one head and 72 in another"):
        ev.generate(tiny_model("qwen3"), random_prompt(20), Ragged(), Budget(64, 2, 8, 8), 100, progress=False)


# -- LagKV and prefill-only SnapKV


def test_lag_scores_of_a_constant_channel_are_finite():
    parts = torch.randn(1, 1, 3, 6, 4)
    parts[..., 0] = 2.0
    assert lag_score(parts).isfinite().all()


@pytest.mark.parametrize("length", [10, 70])
def test_lagkv_ratio_cuts_each_partition_once(length):
    model, lag = tiny_model("qwen3"), 8
    policy = policies.get("lagkv-ratio", lag=lag, ratio=0.25)
    (row,) = evicting_run(model, [random_prompt(length)], policy, Budget(10**6, sinks=4, recent=0, buffer=1), 80)
    assert deviation(model, row) <= 1e-9
    history = row.retention
    alive = history.alive(history.tokens)
    whole = (history.tokens - 4) // lag
    assert alive[:, :, :4].all()
    assert alive[:, :, 4 + (whole - 1) * lag :].all(), "the last whole partition and the tail stay"
    for part in range(whole - 1):
        a, b = 4 + part * lag, 4 + (part + 1) * lag
        assert (alive[:, :, a:b].sum(-1) == 2).all()
        deaths = history.death[:, :, a:b]
        assert len(set(deaths[deaths < history.events])) == 1, "cut once"
    assert not row.meter.bounded


def test_snapkv_prefill_cuts_the_prompt_and_then_grows():
    model = tiny_model("qwen3")
    budget = Budget(40, sinks=2, recent=8, buffer=8)
    for length in (20, 100):
        (row,) = evicting_run(model, [random_prompt(length)], "snapkv-prefill", budget, 60)
        assert deviation(model, row) <= 1e-9
        assert row.retention.event_steps.tolist() == ([100] if length == 100 else [])
        assert row.meter.peak_slots == min(length, 40) + 59
        assert not row.meter.bounded


def test_lagkv_under_a_budget_keeps_the_newest_partitions():
    model = tiny_model("qwen3")
    (row,) = evicting_run(model, [random_prompt(30)], policies.get("lagkv", lag=8), Budget(40, 2, 4, 8), 100)
    assert deviation(model, row) <= 1e-9
    assert row.retention.alive(row.retention.event_steps[-1])[:, :, -12:].any()


def test_lagkv_ratio_ignores_the_total():
    model, policy = tiny_model("qwen3"), policies.get("lagkv-ratio", lag=8)
    budgets = [Budget(total, sinks=2, recent=6, buffer=5) for total in (24, 10**6)]
    prompts = [random_prompt(50, 1), random_prompt(7, 2)]
    small, large = (ev.generate(model, prompts, policy, budget, 40, progress=False) for budget in budgets)
    for a, b in zip(small, large, strict=True):
        assert np.array_equal(a.retention.death, b.retention.death)
    with pytest.raises(ev.BudgetError, match="20 recent tokens would protect partitions of 8 that are due"):
        ev.generate(model, prompts, policy, Budget(100, 2, 20, 8), 40, progress=False)


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_wrapped_segment_policy_fills_its_budget(name):
    policy = policies.ReserveValues(policies.Sample(policies.get(name, **SMALL)), 0.2)
    (row,) = evicting_run(tiny_model("qwen3"), [random_prompt(30)], policy, Budget(48, 2, 8, 8), 80)
    assert deviation(tiny_model("qwen3"), row) <= 1e-9
    assert (row.retention.alive(row.retention.event_steps[-1]).sum(-1) == 48).all()
