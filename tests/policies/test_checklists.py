"""What an independent implementation of both papers must show beyond its scores: cycles, invariants, laws of draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import evicting_run
from stepper import Stepper
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import engine, policies
from epiviz.draws import Draws
from epiviz.policies import Budget, Policy, Ranking, Sample, Slots

EVICTING = [name for name in policies.names() if policies.get(name).evicts]


# -- a budget that nothing exceeds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVICTING)
def test_a_budget_as_long_as_the_text_is_the_full_cache(name):
    model, prompt = tiny_model("qwen3"), random_prompt(20)
    budget = Budget(1000, protect_prompt=True)
    policy = policies.get(name, **({"lag": 100} if name == "lagkv-ratio" else {}))
    (found,), (full,) = (evicting_run(model, [prompt], p, b, 30) for p, b in ((policy, budget), ("full", None)))
    assert found.retention.events == 0
    assert torch.equal(torch.stack(found.logits), torch.stack(full.logits))


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65])
@pytest.mark.parametrize("name", ["snapkv", "rkv", "rkv-simple", "vase-attnv"])
def test_windows_of_64_and_prompts_around_them(name, length):
    """Places of the ring that are still empty do not count, and nothing changes before something is evicted."""
    model, policy = tiny_model("qwen3"), policies.get(name, window=64)
    run = ev.generate(model, random_prompt(length), policy, Budget(20, 2, 4, 4), 32, progress=False)
    full = ev.generate(model, random_prompt(length), "full", None, 32, progress=False)
    assert run.retention.events >= 3
    untouched = int(run.retention.event_steps[0]) - length + 1
    assert run.tokens[:untouched] == full.tokens[:untouched]


# -- VaSE: the cycle of lengths, the order of slots --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vase-attnv", "vase-dkv", "snapkv", "rkv-simple", "curdkv"])
def test_lengths_cycle_between_the_budget_and_the_peak(name):
    """A prompt that fits: the first cut at budget + buffer, then every buffer tokens; one that does not: at its end."""
    budget = Budget(total=32, sinks=4, recent=8, buffer=8)
    for length, steps in ((10, [40, 48, 56, 64]), (32, [40, 48, 56, 64]), (45, [45, 53, 61])):
        (row,) = evicting_run(tiny_model("qwen3"), [random_prompt(length)], name, budget, 66 - length)
        assert row.retention.event_steps.tolist() == steps
        for step in steps:
            alive = row.retention.alive(step)
            assert (alive.sum(-1) == 32).all() and alive[:, :, step - 8 : step].all()


def test_the_order_of_slots_does_not_change_attention():
    """Kept keys carry their rotation: a cache whose slots are shuffled gives the next token the same logits."""
    model = tiny_model("qwen3")
    logits = []
    for shuffled in (False, True):
        rows = engine.make_rows([random_prompt(40)], policies.get("vase-dkv"), Budget(24, 2, 4, 8), 5)
        with engine.Session(model, policies.get("vase-dkv"), rows, 5, 0) as session:
            session.prefill()
            held = session.cache.held[0]
            order = torch.randperm(held, generator=torch.Generator().manual_seed(0)) if shuffled else slice(None)
            for storage in (session.cache.keys, session.cache.values):
                storage[:, :, :, :held] = storage[:, :, :, :held][:, :, :, order]
            logits.append(session.feed(torch.tensor([[3]])))
    assert torch.allclose(*logits, atol=1e-12)


# -- draws without replacement -----------------------------------------------------------------------------------------


class Weights(Policy):
    """Four slots of weight 1, 2, 3 and 4."""

    weights = True

    def rank(self, slots, state, draws):
        return Ranking(torch.tensor([1.0, 2, 3, 4]).expand(slots.positions.shape))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_race_has_the_law_of_successive_draws(temperature):
    """Ordered pairs are drawn as often as by weight, one after the other, without replacement."""
    layers, heads = 100, 100
    positions = torch.arange(4).expand(layers, 1, heads, 4)
    everything = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    slots = Slots(positions.double()[..., None], positions[..., None], positions, everything, None, {})
    race = Sample(Weights(), temperature).rank(slots, {}, Draws(5, [7], [0], torch.device("cpu"))).priority
    first, second = race.topk(2).indices.flatten(0, 2).T.tolist()
    drawn = list(zip(first, second, strict=True))
    weight = [w ** (1 / temperature) for w in (1, 2, 3, 4)]
    statistic = 0.0
    for a, b in itertools.permutations(range(4), 2):
        expected = layers * heads * weight[a] / sum(weight) * weight[b] / (sum(weight) - weight[a])
        statistic += (drawn.count((a, b)) - expected) ** 2 / expected
    assert statistic < 31.3  # the 0.1 % quantile of chi-square with 11 degrees of freedom


# -- EpiKV: lengths of ThinKV as its harness runs it -------------------------------------------------------------------


@pytest.mark.parametrize("total, low", [(512, 233), (1024, 369), (2048, 649), (4096, 1201), (8192, 2313)])
def test_lengths_after_a_compaction_follow_the_published_law(total, low):
    """A tail of one slot takes class R. The next compaction comes when the budget overflows again."""
    policy = policies.get("thinkv-tertiles", merge_tail=False)
    budget = Budget(total, sinks=0, recent=128, buffer=1).resolve(total + 1, 10_000)
    stepper = Stepper(policy, budget, size=4, capacity=total + 1)
    random = torch.Generator().manual_seed(0)

    def feed(q):
        numbers = (torch.randn(1, 1, 1, q, 4, generator=random, dtype=torch.float64) for _ in range(2))
        stepper.feed(q, **dict(zip(("keys", "queries"), numbers, strict=True)))

    feed(total + 1)
    assert stepper.cache.held[0] == low
    feed(stepper.room(10_000))
    assert [seen for seen, _ in stepper.events] == [total + 1, total + 1 + total + 1 - low]
