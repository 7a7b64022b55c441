"""H2O, RaaS, TOVA, LongFlow and R-KV: published cases, eager attention weights, slow references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from oracle import attention_weights
from stepper import Stepper
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import engine, policies
from epiviz.policies import Budget
from epiviz.policies.raas import in_upper_share
from epiviz.policies.rkv import last_copy_redundancy, mean_cosine


def budget(total, sinks=0, recent=0, prompt=0):
    return Budget(total=total, sinks=sinks, recent=recent, buffer=1, protect_prompt=prompt > 0).resolve(prompt, 1000)


def test_h2o_keeps_the_tokens_of_the_reference_case():
    stepper = Stepper(policies.get("h2o"), budget(6, sinks=1, recent=2))
    nothing = np.zeros((5, 5))
    stepper.feed(5, rows=nothing)
    stepper.feed(1, rows=[[0.10, 0.30, 0.10, 0.25, 0.15, 0.10]])
    stepper.feed(1, rows=[[0.20, 0.05, 0.30, 0.01, 0.14, 0.10, 0.20]])
    assert stepper.positions() == [0, 1, 2, 4, 5, 6]
    assert stepper.track("mass") == pytest.approx([0.30, 0.35, 0.40, 0.29, 0.20, 0.20])


def test_h2o_accumulates_in_float32():
    """1/1024 per step: a bfloat16 sum stalls at 0.25, after 256 steps."""
    stepper = Stepper(policies.get("h2o"), budget(10_000))
    for step in range(700):
        stepper.feed(1, rows=[[1 / 1024, *[0.0] * step]])
    assert stepper.track("mass")[0] == pytest.approx(700 / 1024, abs=1e-4)


@pytest.mark.parametrize("accumulate", ["sum", "mean", "decay"])
@pytest.mark.parametrize("length", [30, 600])
def test_h2o_mass_equals_eager_attention_weights(accumulate, length):
    """Every query so far, those of a prompt of several blocks included, under the cache that each query really saw."""
    model = tiny_model("qwen3")
    policy = policies.get("h2o", accumulate=accumulate, decay=0.9)
    rows = engine.make_rows([random_prompt(length)], policy, Budget(40, sinks=2, recent=8, buffer=8), 60)
    tokens = random_prompt(50, 4)
    with engine.Session(model, policy, rows, 60, 0) as session:
        session.prefill()
        for token in tokens:
            session.feed(torch.tensor([[token]]))
        held = session.cache.held[0]
        positions = session.cache.tracks["position"][:, 0, :, :held]
        mass = session.cache.tracks["mass"][:, 0, :, :held]
        priority = policy.rank(slots_of(session, rows[0]), {}, None).priority[:, 0]
        session.finish(session.rows)
    history = rows[0].retention
    assert history.events >= 3
    seen = length + 50
    weights = attention_weights(model, rows[0].prompt + tokens, history.visible())
    age = torch.arange(seen - 1, -1, -1, dtype=torch.float64)
    kept = 0.9**age if accumulate == "decay" else torch.ones(seen, dtype=torch.float64)
    received = torch.einsum("lhqk,q->lhk", weights, kept).unflatten(1, (2, 2)).sum(2)
    assert torch.allclose(mass.double(), received.gather(2, positions), atol=1e-4)
    expected = mass / (seen - positions) if accumulate == "mean" else mass
    assert torch.allclose(priority, expected)


def slots_of(session, row):
    held = session.cache.held[0]
    named = session.cache.slots([0], held)
    return policies.Slots(
        named.pop("keys"),
        named.pop("values"),
        named.pop("position"),
        torch.ones(1, 1, 1, held, dtype=bool),
        row.budget,
        named,
    )


def test_raas_stamps_of_the_reference_case():
    stepper = Stepper(policies.get("raas"), budget(5, prompt=1))
    stepper.feed(1)
    stamps = []
    for row in ([0.5], [0.3, 0.5], [0.1, 0.4, 0.3], [0.05, 0.3, 0.35, 0.2], [0.02, 0.08, 0.3, 0.3, 0.2]):
        stepper.feed(1, rows=[[0.0, *row]])
        stamps.append(stepper.track("stamp")[1:])
    assert stamps[:4] == [[1], [2, 2], [2, 3, 3], [2, 4, 4, 4]]
    assert stamps[4] == [4, 5, 5, 5]
    assert stepper.positions() == [0, 2, 3, 4, 5]


def test_upper_share_is_the_lower_median_for_a_half():
    x = torch.tensor([0.1, 0.4, 0.3, 0.2, 9.0])
    counted = torch.tensor([True, True, True, True, False])
    assert in_upper_share(x, counted, 0.5).tolist() == [False, True, True, True, False]
    assert in_upper_share(x, counted, 1.0).tolist() == [True, True, True, True, False]
    assert not in_upper_share(x, torch.zeros(5, dtype=bool), 0.5).any()


def test_raas_equals_a_plain_loop():
    """Stamps from eager weights, per layer and KV head, after several evictions."""
    model, policy = tiny_model("qwen3"), policies.get("raas")
    rows = engine.make_rows([random_prompt(20)], policy, Budget(50, 0, 4, 6, protect_prompt=True), 60)
    tokens = random_prompt(60, 4)
    with engine.Session(model, policy, rows, 60, 0) as session:
        session.prefill()
        for token in tokens:
            session.feed(torch.tensor([[token]]))
        held = session.cache.held[0]
        positions = session.cache.tracks["position"][:, 0, :, :held]
        stamp = session.cache.tracks["stamp"][:, 0, :, :held]
        session.finish(session.rows)
    visible = rows[0].retention.visible()
    weights = attention_weights(model, rows[0].prompt + tokens, visible).unflatten(1, (2, 2)).mean(2)
    for layer, head in itertools.product(range(4), range(2)):
        stamps = {}
        for query in range(20, 80):
            stamps[query] = query
            alive = [k for k in range(20, query + 1) if visible[layer, head, query, k]]
            values = sorted((weights[layer, head, query, k].item() for k in alive), reverse=True)
            threshold = values[min(len(alive) // 2, len(alive) - 1)]
            stamps.update({k: query for k in alive if weights[layer, head, query, k] >= threshold - 1e-12})
        for position, found in zip(positions[layer, head].tolist(), stamp[layer, head].tolist(), strict=True):
            assert position < 20 or stamps[position] == found


def test_longflow_drops_the_slot_of_the_reference_case():
    stepper = Stepper(policies.get("longflow"), budget(3), size=1)
    weights, values = [0.4, 0.05, 0.25, 0.3], [1, -4, 2, 1]
    stepper.feed(3, keys=np.log(weights[:3])[:, None], values=np.array(values[:3])[:, None])
    slots_before = stepper.cache.held[0]
    stepper.feed(1, keys=[[np.log(0.3)]], values=[[1]], queries=[[1.0]])
    assert slots_before == 3 and stepper.positions() == [0, 2, 3]
    # products .4 .2 .5 .3
    assert policies.get("tova").needs(None).queries == 1


def test_tova_drops_what_the_current_query_looks_at_least():
    stepper = Stepper(policies.get("tova"), budget(3), size=1)
    stepper.feed(3, keys=np.log([0.4, 0.2, 0.1])[:, None])
    stepper.feed(1, keys=[[np.log(0.3)]], queries=[[1.0]])
    assert stepper.positions() == [0, 1, 3]


def test_one_row_policies_equal_eager_attention():
    model = tiny_model("qwen3")
    for name in ("tova", "longflow"):
        policy = policies.get(name)
        rows = engine.make_rows([random_prompt(20)], policy, Budget(200), 60)
        tokens = random_prompt(30, 4)
        with engine.Session(model, policy, rows, 60, 0) as session:
            session.prefill()
            for token in tokens:
                session.feed(torch.tensor([[token]]))
            slots = slots_of(session, rows[0])
            slots.queries = session.recent.queries
            priority = policy.rank(slots, {}, None).priority[:, 0]
            values = slots.values[:, 0]
        causal = np.broadcast_to(np.tril(np.ones((50, 50), dtype=bool)), (4, 2, 50, 50))
        row = attention_weights(model, rows[0].prompt + tokens, causal)[:, :, -1]
        if name == "tova":
            expected = row.mean(1, keepdim=True)
        else:
            expected = row.unflatten(1, (2, 2)).mean(2) * values.abs().sum(-1)
        assert torch.allclose(priority, expected, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_mean_cosine_needs_no_matrix(seed):
    keys = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 3, 37, 8)))
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    matrix = (unit @ unit.transpose(-1, -2)).masked_fill(torch.eye(37, dtype=bool), 0)
    assert torch.allclose(mean_cosine(keys), matrix.mean(-1), atol=1e-6)


@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_redundancy_spares_the_newest_copy(threshold):
    keys = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 2, 41, 4)))
    found = last_copy_redundancy(keys, threshold, block=7)
    for head in range(2):
        unit = (keys[0, head] / keys[0, head].norm(dim=-1, keepdim=True)).numpy()
        similar = unit @ unit.T
        np.fill_diagonal(similar, 0)
        for i in range(41):
            copies = np.flatnonzero(similar[i] > threshold)
            if len(copies):
                similar[i, copies[-1]] = 0
        mean = similar.mean(0)
        expected = np.exp(mean) / np.exp(mean).sum()
        assert found[0, head].numpy() == pytest.approx(expected, rel=1e-6)


def test_rkv_prefers_new_copies_over_old_ones():
    """Of three equal keys the newest counts as least redundant."""
    keys = np.random.default_rng(0).normal(size=(12, 8))
    keys[5] = keys[7] = keys[3]
    redundancy = last_copy_redundancy(torch.from_numpy(keys)[None, None], 0.9)[0, 0]
    assert redundancy[3] > redundancy[5] > redundancy[7]


def test_parameters_are_checked():
    for name, wrong in [
        ("h2o", {"accumulate": "max"}),
        ("h2o", {"decay": 1.0}),
        ("raas", {"share": 0}),
        ("rkv", {"pool": 2}),
    ]:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.* must|pool odd"):
            policies.get(name, **wrong)
    with pytest.raises(ev.BudgetError, match="streaming keeps attention sinks"):
        ev.generate(tiny_model("qwen3"), [1, 2], "streaming", Budget(20, 0, 4, 4), 5, progress=False)
