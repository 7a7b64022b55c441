"""EpiKV's relatives: published cases and slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stepper import Stepper
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import engine, policies, signals
from epiviz.policies import Budget

G_LOW, G_HIGH = [5, 1, 4, 2, 8, 3, 6, 7], [2, 2, 9, 1, 1, 5, 3, 4]
FROZEN = ["epikv", "epikv-mean", "epikv-band", "key-variance", "value-variance", "epikv-lag", "epikv-lag-key"]


def test_mean_difference_keeps_the_tokens_of_the_reference_case():
    """The scores are 3, 1, −1, −.5, 1, .5, .857, 1.125; tokens 1 and 4 tie and both stay."""
    policy = policies.get("epikv-mean", layers=(1, 2))
    stepper = Stepper(policy, Budget(8, sinks=0, recent=2, buffer=1, protect_prompt=True).resolve(2, 100))
    stepper.feed(2, moves={1: [0, 0], 2: [0, 0]})
    for low, high in zip(G_LOW, G_HIGH, strict=True):
        stepper.feed(1, moves={1: [low], 2: [high]})
    assert {p - 2 for p in stepper.positions()[2:]} == {0, 1, 4, 5, 6, 7}


def test_band_scores_average_displacements_before_the_zscore():
    policy = policies.get("epikv-band", layers=((0, 1), (2, 3)))
    stepper = Stepper(policy, Budget(200, 0, 2, 1).resolve(1, 100))
    random = np.random.default_rng(0).uniform(0, 9, (4, 30))
    stepper.feed(1, moves={layer: [0.0] for layer in range(4)})
    for step in range(30):
        stepper.feed(1, moves={layer: [random[layer, step]] for layer in range(4)})
    low, high = (torch.from_numpy(random[a : a + 2].mean(0)) for a in (0, 2))
    expected = 1.29 * signals.causal_zscore(low) - signals.causal_zscore(high)
    assert stepper.track("score")[1:] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("scope", ["global", "layer", "head"])
@pytest.mark.parametrize("name, tensor", [("key-variance", "keys"), ("value-variance", "values")])
def test_variances_are_rolling_means_of_new_tokens(name, tensor, scope):
    score, storage, _ = scores_of(policies.get(name, scope=scope), 40, 90)
    variance = storage[tensor].var(-1, correction=1)
    axes = {"global": (0, 1), "layer": (1,), "head": ()}[scope]
    variance = variance.mean(axes, keepdim=True) if axes else variance
    expected = torch.empty_like(variance)
    for t in range(130):
        start = max(0 if t < 40 else 40, t - 63)
        expected[..., t] = variance[..., start : t + 1].mean(-1)
    assert torch.allclose(score, expected.expand(score.shape).float(), rtol=1e-4)


def scores_of(policy, prompt, steps):
    """Feed random tokens without eviction; return the score track, the cached tensors and the slots."""
    model = tiny_model("qwen3")
    rows = engine.make_rows([random_prompt(prompt)], policy, Budget(4096), steps + 1)
    with engine.Session(model, policy, rows, steps + 1, 0) as session:
        session.prefill()
        for token in random_prompt(steps, 2):
            session.feed(torch.tensor([[token]]))
        named = session.cache.slots([0], prompt + steps)
    storage = {name: named[name][:, 0].clone() for name in ("keys", "values")}
    return named["score"][:, 0].clone(), storage, named


def lag_reference(x, chunk, raw):
    """Per token, in plain numpy: chunks over positions, the first one on the scale of what it has seen."""
    out = np.zeros(x.shape[:-1])
    for layer, head, t in np.ndindex(out.shape):
        c = t // chunk
        if c == 0 and raw:
            out[layer, head, t] = x[layer, head, t].std(ddof=1)
            continue
        reference = x[layer, head, : t + 1] if c == 0 else x[layer, head, (c - 1) * chunk : c * chunk]
        low, high = reference.min(0), reference.max(0)
        out[layer, head, t] = ((x[layer, head, t] - low) / (high - low + 1e-9)).std(ddof=1)
    return out


@pytest.mark.parametrize("first_chunk", ["own", "raw"])
@pytest.mark.parametrize("name", ["epikv-lag", "epikv-lag-key"])
def test_frozen_lag_scores(name, first_chunk):
    policy = policies.get(name, chunk=16, scope="head", first_chunk=first_chunk)
    score, storage, _ = scores_of(policy, 20, 40)
    tensors = ["keys", "values"] if name == "epikv-lag" else ["keys"]
    expected = sum(lag_reference(storage[tensor].numpy(), 16, first_chunk == "raw") for tensor in tensors)
    assert score.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_lag_scores_of_the_public_code():
    """Recomputed over the slots that are left, tensors averaged over layers, raw first chunk."""
    policy = policies.get("epikv-lag", chunk=16, frozen=False, layers_first=True, first_chunk="raw")
    model = tiny_model("qwen3")
    random = np.random.default_rng(1)
    keys, values = (torch.from_numpy(random.normal(size=(4, 1, 2, 50, 16))) for _ in range(2))
    slots = policies.Slots(keys, values, torch.arange(50).expand(4, 1, 2, 50), None, None, {})
    expected = np.zeros((2, 50))
    for tensor in (keys, values):
        x = tensor.float().mean(0)[0].numpy()
        for head in range(2):
            for start in range(0, 50, 16):
                chunk = x[head, start : start + 16]
                if start:
                    before = x[head, start - 16 : start]
                    chunk = (chunk - before.min(0)) / (before.max(0) - before.min(0) + 1e-9)
                expected[head, start : start + 16] += chunk.std(-1, ddof=1)
    found = policy.rank(slots, {}, None).priority
    assert found.shape == (1, 1, 1, 50)
    assert found[0, 0, 0].numpy() == pytest.approx(expected.mean(0), rel=1e-4)
    run = ev.generate(model, random_prompt(30), policy, Budget(40, 2, 8, 8), 60, progress=False)
    assert run.retention.events >= 3


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_scores_are_the_offline_top(name):
    """Streaming eviction keeps protected + recent + the best of the rest, whatever the method, in every head."""
    model, policy = tiny_model("qwen3"), policies.get(name)
    budget = Budget(50, sinks=0, recent=10, buffer=1, protect_prompt=True)
    rows = engine.make_rows([random_prompt(12)], policy, budget, 150)
    births = {}
    with engine.Session(model, policy, rows, 150, 0) as session:
        session.prefill()
        for token in random_prompt(120, 3):
            session.feed(torch.tensor([[token]]))
            newest = session.cache.held[0] - 1
            births[session.cache.seen[0] - 1] = session.cache.tracks["score"][:, 0, :, newest].clone()
        session.finish(session.rows)
    alive = rows[0].retention.alive(132)
    for layer in range(4):
        for head in range(2):
            older = sorted(range(12, 122), key=lambda p: (births[p][layer, head].item(), p))
            expected = {*range(12), *older[-28:], *range(122, 132)}
            assert set(np.flatnonzero(alive[layer, head])) == expected


def test_attention_plus_hidden_states_adds_two_scaled_scores():
    policy = policies.get("epikv-attn", layers=(1, 2))
    stepper = Stepper(policy, Budget(200, 0, 2, 1).resolve(1, 100))
    random = np.random.default_rng(0)
    stepper.feed(1, moves={1: [0.0], 2: [0.0]}, rows=[[1.0]])
    low, rows = random.uniform(0, 9, 20), [random.dirichlet(np.ones(n + 2)) for n in range(20)]
    for step in range(20):
        stepper.feed(1, moves={1: [low[step]], 2: [0.0]}, rows=rows[step][None])
    mass = np.array([sum(row[slot] for row in rows if slot < len(row)) + (slot == 0) for slot in range(21)])
    z = np.r_[0.0, signals.causal_zscore(torch.from_numpy(low)).numpy()]
    inside = slice(0, 19)  # the two newest are protected
    expected = sum((x - x[inside].min()) / (x[inside].max() - x[inside].min() + 1e-9) for x in (mass, z))
    found = policy.rank(stepper.slots(), {}, None).priority[0, 0, 0]
    assert found.numpy() == pytest.approx(expected, abs=1e-4)


def test_constant_channels_stay_finite():
    x = torch.zeros(1, 1, 1, 40, 8)
    slots = policies.Slots(x, x, torch.arange(40).expand(1, 1, 1, 40), None, None, {})
    assert policies.get("epikv-lag", frozen=False, chunk=8).rank(slots, {}, None).priority.isfinite().all()


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="scope must be one of global, layer, head"):
        policies.get("key-variance", scope="row")
    with pytest.raises(ValueError, match="first_chunk must be"):
        policies.get("epikv-lag", first_chunk="last")
    with pytest.raises(ValueError, match="two different decoder blocks or bands"):
        policies.get("epikv-band", layers=((1, 2), (1, 2)))
