"""Every policy's score against a slow reference, for random shapes and numbers, ties and zeros among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import references_of_histories as of_histories
import references_of_slots as of_slots
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from references_of_histories import History
from references_of_slots import Case
from stepper import DEPTH, Stepper

from epiviz import policies
from epiviz.models import ModelShape
from epiviz.policies import Budget, Slots, base

whole, choice, share = st.integers, st.sampled_from, st.floats
SCOPES = choice(["head", "layer", "global"])


@dataclass(frozen=True)
class Pin:
    """What a policy is held to: a reference, the parameters it is drawn with, and how close it must be."""

    reference: Callable
    parameters: Mapping[str, st.SearchStrategy] = field(default_factory=dict)
    tolerance: float = 1e-9  # relative, and absolute; float32 tracks and float32 choices need more


SNAPKV = {"window": choice([1, 2, 5, 12]), "pool": choice([1, 3, 5])}
ATTNV = {**SNAPKV, "value_share": share(0, 0.3), "statistic": choice(list(of_slots.STATISTICS))}
SEGMENTS = {
    "quotas": st.tuples(whole(0, 4), whole(0, 3), whole(0, 2)),
    "segment": whole(1, 5),
    "merge_tail": st.booleans(),
}
LAG = {
    "scope": SCOPES,
    "chunk": whole(2, 6),
    "layers_first": st.booleans(),
    "first_chunk": choice(["own", "raw"]),
}
WINDOW = {"window": whole(2, 6)}
LAYERS = {"layers": choice([(1, 2), (0, 3), (3, 1)])}
BANDS = {"layers": choice([((0, 1), (2, 3)), ((1, 3), (0, 0)), (2, (0, 1))])}


@st.composite
def random_reserves(draw):
    inner = policies.SnapKV(draw(SNAPKV["window"]), draw(SNAPKV["pool"]))
    return policies.Sample(inner, draw(share(0.3, 3)))


# Scores that follow from the slots held at an eviction.
OF_SLOTS = {
    "curdkv": Pin(of_slots.curdkv, {"size": whole(0, 4), "local": whole(0, 5)}),
    "epikv-lag": Pin(of_slots.epikv_lag_of_slots, {**LAG, "frozen": st.just(False)}, 1e-5),
    "epikv-lag-key": Pin(of_slots.epikv_lag_of_slots, {**LAG, "frozen": st.just(False)}, 1e-5),
    "epikv-seg": Pin(of_slots.epikv_seg, SEGMENTS),
    "evict-largest": Pin(of_slots.evict_largest, {"matched": st.booleans(), "share": share(0, 0.6)}),
    "keydiff": Pin(of_slots.keydiff),
    "knorm": Pin(of_slots.knorm),
    "lagkv": Pin(of_slots.lagkv, {"lag": whole(2, 7)}),
    "lagkv-ratio": Pin(of_slots.lagkv_ratio, {"lag": whole(3, 6), "ratio": choice([0.3, 0.5, 0.75])}, 1e-6),
    "longflow": Pin(of_slots.longflow, {"scope": SCOPES}),
    "random": Pin(of_slots.random, {"scope": choice(["head", "global"])}, 0),
    "random-reserve": Pin(of_slots.random_reserve, {"policy": random_reserves(), "share": share(0, 0.3)}),
    "recency": Pin(of_slots.recency, tolerance=0),
    "rkv": Pin(
        of_slots.rkv,
        {**SNAPKV, "balance": share(0, 1), "threshold": share(-0.5, 1), "standardise": st.booleans()},
        1e-7,  # standardising magnifies differences that are all rounding
    ),
    "rkv-simple": Pin(of_slots.rkv_simple, {**SNAPKV, "balance": share(0, 1)}),
    "segment-hs": Pin(of_slots.segment_hs, SEGMENTS),
    "snapkv": Pin(of_slots.snapkv, {**SNAPKV, "group": choice(["mean", "max"])}),
    "snapkv-prefill": Pin(of_slots.snapkv, SNAPKV),
    "streaming": Pin(of_slots.recency, tolerance=0),
    "thinkv-tertiles": Pin(of_slots.thinkv_tertiles, SEGMENTS, 1e-6),
    "tova": Pin(of_slots.tova),
    "vase-attnv": Pin(of_slots.vase_attnv, {**ATTNV, "temperature": share(0.3, 3)}),
    "vase-dkv": Pin(of_slots.vase_dkv, {"size": whole(1, 4)}),
}

# Scores that accumulate, or are frozen, while tokens come in; they are kept in float32.
OF_HISTORIES = {
    "epikv": Pin(of_histories.epikv, {**LAYERS, **WINDOW}, 1e-5),
    "epikv-attn": Pin(of_histories.epikv_attn, {**LAYERS, **WINDOW, "scope": SCOPES}, 1e-3),  # a scaled difference
    "epikv-band": Pin(of_histories.epikv_band, {**BANDS, **WINDOW}, 1e-5),
    "epikv-lag": Pin(of_histories.epikv_lag, LAG, 1e-5),
    "epikv-lag-key": Pin(of_histories.epikv_lag, LAG, 1e-5),
    "epikv-mean": Pin(of_histories.epikv_mean, {**LAYERS, **WINDOW}, 1e-5),
    "h2o": Pin(
        of_histories.h2o,
        {"accumulate": choice(["sum", "mean", "decay"]), "decay": share(0.1, 0.99), "scope": SCOPES},
        1e-5,
    ),
    "key-variance": Pin(of_histories.key_variance, {**WINDOW, "scope": SCOPES}, 1e-5),
    "raas": Pin(of_histories.raas, {"share": share(0.1, 1), "scope": SCOPES}, 0),
    "value-variance": Pin(of_histories.value_variance, {**WINDOW, "scope": SCOPES}, 1e-5),
}

# Policies without a priority, or whose own test file holds the reference.
ELSEWHERE = {
    "seer-oracle": "tests/policies/test_selection.py::test_blocks_are_those_of_a_slow_reference",
    "seer-quest": "tests/policies/test_selection.py::test_blocks_are_those_of_a_slow_reference",
    "thinkv": "tests/policies/test_thinkv.py",
    "full": "tests/test_replay.py::test_the_full_cache_agrees_with_itself_and_with_the_recording",
}


def test_every_policy_is_held_to_a_reference():
    ours = {name for name in policies.names() if base._REGISTRY[name].__module__.startswith("epiviz.")}
    pinned = {*OF_SLOTS, *OF_HISTORIES, *ELSEWHERE}
    assert ours <= pinned, f"{', '.join(sorted(ours - pinned))}: add a reference, or say which test holds it"
    assert pinned <= ours
    for name, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        path = Path(__file__).parents[2] / file
        assert path.is_file() and f"def {function}" in path.read_text(encoding="utf-8"), f"{name}: there is no {test}"


# -- random caches -----------------------------------------------------------------------------------------------------


def vectors(draw, *shape: int) -> np.ndarray:
    """Random numbers of a random kind; hypothesis shrinks the kind and the shape, and draws the rest by seed."""
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(["normal", "zeros", "copies", "some zeros", "large", "one constant channel"]))
    x = random.normal(size=shape)
    if kind == "zeros":
        return np.zeros(shape)
    if kind == "copies":  # of three vectors, so that scores tie exactly
        return random.normal(size=(3, shape[-1]))[random.integers(3, size=shape[:-1])]
    if kind == "some zeros":
        x[random.random(shape[:-1]) < 0.5] = 0
    if kind == "large":
        x *= 300
    if kind == "one constant channel":
        x[..., 0] = 2
    return x


@st.composite
def layouts(draw):
    """Layers, rows, KV heads, query heads per KV head, channels."""
    return [draw(whole(low, high)) for low, high in ((1, 2), (1, 2), (1, 2), (1, 3), (2, 4))]


@st.composite
def caches(draw, policy) -> Case:
    """What a policy ranks at an eviction: sorted positions, protected ones at both ends, a ring of queries."""
    layers, rows, kv_heads, group, size = draw(layouts())
    sinks, recent = draw(whole(0, 3)), draw(whole(0, 4))
    front = draw(choice([sinks, sinks + 2]))  # more than sinks: a protected prompt
    n = max(2, front + recent + draw(whole(1, 14)))
    left = draw(whole(0, 9))  # tokens that have left before
    if policy.name == "lagkv-ratio":  # here a partition must be due, and partitions were cut before
        cut, recent = draw(whole(0, 2)), min(recent, policy.lag)
        n = front + cut * policy.kept + 2 * policy.lag + draw(whole(0, policy.lag + 2))
        left = cut * (policy.lag - policy.kept)
    seen, random = n + left, np.random.default_rng(draw(whole(0, 2**16)))
    positions = np.empty((layers, rows, kv_heads, n), dtype=np.int64)
    for place in np.ndindex(layers, rows, kv_heads):
        inside = random.choice(np.arange(front, seen - recent), n - front - recent, replace=False)
        positions[place] = [*range(front), *sorted(inside), *range(seen - recent, seen)]
    positions[..., -1] = seen - 1  # the newest token is held, even if no recent one is protected
    window = max(1, policy.needs(ModelShape(DEPTH, group * kv_heads, kv_heads, size, 1)).queries)
    queries = [np.roll(range(seen - window, seen), draw(whole(0, window - 1))).clip(min=-1) for _ in range(rows)]
    scores = random.integers(-2, 3, (rows, 1, n)) if draw(st.booleans()) else random.normal(size=(rows, 1, n))
    keys, values = (torch.from_numpy(vectors(draw, layers, rows, kv_heads, n, size)) for _ in range(2))
    slot = torch.arange(n)
    total = draw(whole(max(1, front + recent), n - 1))
    slots = Slots(
        keys=keys,
        values=values,
        positions=torch.from_numpy(positions),
        candidates=((slot >= front) & (slot < n - recent))[None, None, None],
        budget=Budget(total, sinks, recent, protect_prompt=True).resolve(front, 10_000),
        tracks={"score": torch.from_numpy(scores).float().expand(layers, rows, kv_heads, n)},
        queries=torch.from_numpy(vectors(draw, layers, rows, kv_heads * group, window, size)),
        query_positions=torch.from_numpy(np.stack(queries)),
    )
    samples = [draw(whole(0, 2**63)) for _ in range(rows)]
    return Case(slots, draw(whole(0, 9)), samples, [draw(whole(0, 5)) for _ in range(rows)])


@pytest.mark.parametrize("name", OF_SLOTS)
@given(data=st.data())
def test_scores_of_slots(name, data):
    pin = OF_SLOTS[name]
    policy = policies.get(name, **data.draw(st.fixed_dictionaries(dict(pin.parameters))))
    case = data.draw(caches(policy))
    possible(policy, case.slots.budget)
    found = policy.rank(case.slots, {}, case.draws).priority
    agree(found, pin.reference(policy, case), pin.tolerance, case.slots.candidates.expand(case.slots.positions.shape))


@pytest.mark.parametrize("name", OF_HISTORIES)
@settings(suppress_health_check=[HealthCheck.filter_too_much])  # medians among equal weights have no one answer
@given(data=st.data())
def test_scores_of_histories(name, data):
    pin = OF_HISTORIES[name]
    policy = policies.get(name, **data.draw(st.fixed_dictionaries(dict(pin.parameters))))
    layers, rows, kv_heads, group, size = data.draw(layouts())
    prompt, tokens = data.draw(whole(1, 8)), data.draw(whole(9, 20))
    sinks, recent = data.draw(whole(0, 2)), data.draw(whole(0, 3))
    budget = Budget(sinks + recent + data.draw(whole(1, 6)), sinks, recent, buffer=data.draw(whole(1, 4)))
    stepper = Stepper(
        policy,
        budget.resolve(prompt, tokens),
        size,
        layers=layers,
        rows=rows,
        heads=kv_heads * group,
        kv_heads=kv_heads,
    )
    keys, values = (vectors(data.draw, layers, rows, kv_heads, tokens, size) for _ in range(2))
    queries = vectors(data.draw, layers, rows, kv_heads * group, tokens, size)
    hidden = {block: vectors(data.draw, rows, tokens, 3) for block in range(DEPTH)}
    start = 0
    while start < tokens:
        q = stepper.room(min(data.draw(whole(1, 3)), tokens - start)) if start else prompt
        if start + q == tokens:
            stepper.budget = replace(stepper.budget, buffer=tokens)  # look before the cut
        part = slice(start, start + q)
        states = {block: torch.from_numpy(x[:, part]) for block, x in hidden.items()}
        given_ = {"keys": keys[..., part, :], "values": values[..., part, :], "queries": queries[..., part, :]}
        stepper.feed(q, hidden=states, **given_)
        start += q
    slots = stepper.slots()
    assume(slots.candidates.any())
    history = History(keys, values, queries, hidden, prompt, stepper.events, slots.positions.numpy(), stepper.budget)
    everything = torch.ones(slots.positions.shape, dtype=torch.bool)
    agree(stepper.priority(), pin.reference(policy, history), pin.tolerance, everything)


def possible(policy, budget) -> None:
    """Pass over budgets that the policy refuses."""
    try:
        policy.check(budget, None)
    except policies.BudgetError:
        reject()


def agree(found: torch.Tensor, expected: np.ndarray, tolerance: float, where: torch.Tensor) -> None:
    found, where = found.double().expand(where.shape).numpy(), where.numpy()
    np.testing.assert_allclose(found[where], expected[where], rtol=tolerance, atol=tolerance)
