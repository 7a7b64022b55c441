"""Input that no method was made for: no priority is ever NaN, the budget is filled, and a seed decides everything.

What a policy does then is a choice; the tests at the end write the choices down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from stepper import DEPTH, Stepper

from epiviz import policies
from epiviz.policies import Budget, BudgetError, ReserveValues, Sample

LAYERS, HEADS, KV, SIZE, PROMPT, TOKENS = 2, 4, 2, 4, 12, 24
BUDGET = Budget(total=10, sinks=2, recent=3, buffer=4)

# Windows, lags and segments that fit into a text of 24 tokens; what is not named keeps its default.
WINDOW, QUOTAS = {"window": 4}, {"segment": 4, "quotas": (2, 1, 1)}
SMALL = {
    "epikv": WINDOW,
    "epikv-attn": WINDOW,
    "epikv-band": WINDOW,
    "epikv-lag": {"chunk": 4},
    "epikv-lag-key": {"chunk": 4},
    "epikv-mean": WINDOW,
    "epikv-seg": QUOTAS,
    "key-variance": WINDOW,
    "lagkv": {"lag": 4},
    "lagkv-ratio": {"lag": 4},
    "rkv": WINDOW,
    "rkv-simple": WINDOW,
    "segment-hs": QUOTAS,
    "snapkv": WINDOW,
    "snapkv-prefill": WINDOW,
    "thinkv": {"interval": 4, "ladder": (2, 1)},
    "thinkv-tertiles": QUOTAS,
    "value-variance": WINDOW,
    "vase-attnv": WINDOW,
}


def small(name: str, **parameters) -> policies.Policy:
    return policies.get(name, **{**SMALL.get(name, {}), **parameters})


RANKING = [name for name in policies.names() if (policy := policies.get(name)).evicts and not policy.selects]
VARIANTS = [
    *map(small, RANKING),
    small("curdkv", size=0, local=4),
    small("epikv-lag", frozen=False, layers_first=True, first_chunk="raw"),
    small("evict-largest", matched=True),
    small("h2o", accumulate="mean"),
    small("h2o", accumulate="decay"),
    small("rkv", standardise=True),
    small("vase-attnv", statistic="variance", allocation="adaptive"),
    Sample(small("knorm")),
    ReserveValues(Sample(small("epikv"), 0.01), 0.4, "norm"),
]


@dataclass(frozen=True)
class Input:
    """Keys, values and queries ``[layers, heads, tokens, size]`` and hidden states ``[blocks, tokens, channels]``."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    hidden: np.ndarray
    dtype: torch.dtype = torch.float32
    unseen: bool = False  # all attention rows are zero


def given(dtype: torch.dtype = torch.float32, unseen: bool = False, **change) -> Input:
    """Random numbers, of which some are changed by functions."""
    random = np.random.default_rng(0)
    shapes = {
        "keys": (LAYERS, KV, TOKENS, SIZE),
        "values": (LAYERS, KV, TOKENS, SIZE),
        "queries": (LAYERS, HEADS, TOKENS, SIZE),
        "hidden": (DEPTH, TOKENS, 3),
    }
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return Input(**{name: change.get(name, np.asarray)(x) for name, x in arrays.items()}, dtype=dtype, unseen=unseen)


def everything(function) -> dict:
    return dict.fromkeys(("keys", "values", "queries", "hidden"), function)


def same(value: float):
    return lambda x: np.full_like(x, value)


def plus_minus(value: float):
    return lambda x: np.where(x > 0, value, -value)


def one_constant_channel(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full_like(x[..., :1], 2.0), x[..., 1:]], axis=-1)


def thousandfold(x: np.ndarray) -> np.ndarray:
    return 1000 * x


HALF = torch.float16
INPUTS = {
    "ordinary": given(),
    "all zero": given(**everything(same(0.0))),
    "all tokens equal": given(**everything(same(1.5))),
    "keys equal": given(keys=same(1.0)),
    "values equal": given(values=same(1.0)),
    "a constant channel": given(**everything(one_constant_channel)),
    "attention one-hot": given(keys=thousandfold, queries=thousandfold),
    "attention zero": given(unseen=True),
    "float16 of ±300": given(HALF, **everything(plus_minus(300.0))),
    "float16 at its limit": given(HALF, **everything(plus_minus(65504.0))),
}


def run(policy, budget: Budget, text: Input) -> Stepper:
    """Feed the text in chunks up to each event."""
    resolved = budget.resolve(PROMPT, TOKENS)
    policy.check(resolved, None)
    stepper = Stepper(policy, resolved, SIZE, layers=LAYERS, heads=HEADS, kv_heads=KV, dtype=text.dtype)
    hidden = torch.from_numpy(text.hidden).to(text.dtype)
    start = 0
    while start < TOKENS:
        q = stepper.room(TOKENS - start) if start else PROMPT
        part = slice(start, start + q)
        stepper.feed(
            q,
            hidden={block: states[None, part] for block, states in enumerate(hidden)},
            keys=text.keys[:, None, :, part],
            values=text.values[:, None, :, part],
            queries=text.queries[:, None, :, part],
            rows=np.zeros((q, stepper.cache.held[0] + q)) if text.unseen else None,
        )
        start += q
    return stepper


def check(stepper: Stepper, budget: Budget) -> None:
    """Priorities are numbers; what stays is distinct, protected at both ends, and as much as the budget allows."""
    policy, sinks, recent = stepper.policy, budget.sinks, budget.recent
    for (seen, kept), priority in zip(stepper.events, stepper.rankings, strict=True):
        assert not priority.isnan().any()
        inside = priority[..., sinks : priority.shape[-1] - recent]
        assert policy.underfills or (inside > -torch.inf).all(), "−∞ drops a slot even if there is room"
        assert isinstance(policy, ReserveValues) or (inside < torch.inf).all()
        assert (kept.diff(dim=-1) > 0).all()
        assert policy.underfills or kept.shape[-1] == budget.total
        assert (kept[..., :sinks] == torch.arange(sinks)).all()
        assert (kept[..., kept.shape[-1] - recent :] == torch.arange(seen - recent, seen)).all()


@pytest.mark.parametrize("text", INPUTS)
@pytest.mark.parametrize("policy", VARIANTS, ids=lambda policy: policy.label)
def test_priorities_are_numbers_and_the_budget_is_filled(policy, text):
    stepper = run(policy, BUDGET, INPUTS[text])
    check(stepper, BUDGET)
    assert len(stepper.events) >= (3 if policy.bounded else 1)


@pytest.mark.parametrize("policy", VARIANTS, ids=lambda policy: policy.label)
def test_a_seed_decides_everything(policy):
    first, second = (run(policy, BUDGET, INPUTS["all tokens equal"]) for _ in range(2))
    for (seen, kept), (seen_again, kept_again) in zip(first.events, second.events, strict=True):
        assert seen == seen_again and torch.equal(kept, kept_again)


@pytest.mark.parametrize("name", RANKING)
def test_windows_lags_and_segments_longer_than_the_text(name):
    """As the defaults are: windows of 64; lags, chunks, segments and intervals of 128."""
    stepper = run(policies.get(name), BUDGET, INPUTS["ordinary"])
    check(stepper, BUDGET)
    assert len(stepper.events) >= 3 or not stepper.policy.bounded


@pytest.mark.parametrize("room", [0, 1])
@pytest.mark.parametrize("name", RANKING)
def test_budgets_of_what_is_protected_and_of_one_slot_more(name, room):
    budget = replace(BUDGET, total=BUDGET.sinks + BUDGET.recent + room)
    check(run(small(name), budget, INPUTS["ordinary"]), budget)


@pytest.mark.parametrize("name", ["rkv", "rkv-simple", "snapkv", "vase-attnv", "random-reserve"])
def test_queries_that_see_nothing(name):
    """The attention of an empty window is 0, not 0 / 0."""
    stepper = run(small(name), BUDGET, INPUTS["ordinary"])
    stepper.ring.positions.fill_(-1)
    assert not stepper.priority().isnan().any()


# -- choices -----------------------------------------------------------------------------------------------------------

# Deterministic methods whose score is the same for equal tokens, wherever they stand.
BLIND = [
    *("curdkv", "epikv", "epikv-band", "epikv-lag", "epikv-lag-key", "epikv-mean", "evict-largest", "key-variance"),
    *("keydiff", "knorm", "longflow", "recency", "streaming", "tova", "value-variance", "vase-dkv"),
]


@pytest.mark.parametrize("name", BLIND)
def test_of_equal_tokens_the_newest_stay(name):
    stepper = run(small(name), BUDGET, INPUTS["all tokens equal"])
    for seen, kept in stepper.events:
        assert (kept == torch.tensor([0, 1, *range(seen - 8, seen)])).all()


@pytest.mark.parametrize("name", ["rkv", "rkv-simple"])
def test_of_equal_keys_the_newest_stay(name):
    """Official R-KV does not count the newest copy as redundant; the simple form has nothing but attention and ties."""
    keys = torch.ones(1, 1, 20, 4)
    assert (policies.rkv.last_copy_redundancy(keys, 0.5).diff() <= 1e-7).all()
    assert policies.rkv.mean_cosine(keys).var() < 1e-12


def test_pooling_with_zeros_beyond_the_ends_prefers_the_middle():
    """Of equal tokens SnapKV's average of five counts three at the ends, so that the oldest and newest lose."""
    stepper = run(small("snapkv"), BUDGET, INPUTS["all tokens equal"])
    middle = stepper.rankings[0][0, 0, 0, : PROMPT - 3]
    assert middle.tolist() == pytest.approx([1 / 9 * share for share in (0.6, 0.8, 1, 1, 1, 1, 1, 0.8, 0.6)])


def test_segments_of_equal_statistics_are_reasoning():
    """Ties of all tertiles give every segment the highest quota, until the budget is spent; the oldest come first."""
    policy = small("epikv-seg", merge_tail=False)
    priority = run(policy, BUDGET, INPUTS["all tokens equal"]).rankings[0][0, 0, 0]
    assert (priority > -torch.inf).nonzero().flatten().tolist() == [2, 3, 6, 7, 8]


@pytest.mark.parametrize("share, reserved", [(0.7, 5), (0.74, 5), (0.8, None)])
def test_a_reserve_may_take_all_that_is_free_and_no_more(share, reserved):
    """Of 10 slots 5 are free: 2 sinks and 3 recent tokens are protected, and the sinks count as reserved."""
    policy = ReserveValues(Sample(small("snapkv")), share)
    if reserved is None:
        with pytest.raises(
            BudgetError, match=r"share of 0.8 of 10 slots reserves 6 beside 2 sinks, but only 5 are free"
        ):
            run(policy, BUDGET, INPUTS["ordinary"])
        return
    stepper = run(policy, BUDGET, INPUTS["ordinary"])
    check(stepper, BUDGET)
    for (_, kept), priority in zip(stepper.events, stepper.rankings, strict=True):
        assert (priority[..., 2:-3].isinf().sum(-1) == reserved).all()
        assert kept.shape[-1] == 10


def test_a_reserve_of_equal_values_takes_the_newest():
    stepper = run(ReserveValues(small("knorm"), 0.4), BUDGET, INPUTS["values equal"])
    assert (stepper.rankings[0][..., PROMPT - 5 : PROMPT - 3] == torch.inf).all()


def test_slots_of_weight_zero_are_sampled_last():
    """One-hot attention leaves fewer slots with a weight than there is room; none of those with a weight is lost."""
    stepper = run(Sample(small("snapkv", pool=1)), BUDGET, INPUTS["attention one-hot"])
    priority, (_, kept) = stepper.rankings[0], stepper.events[0]
    weightless = priority[..., 2 : PROMPT - 3] == torch.finfo(torch.float32).min
    assert weightless.any()
    stays = torch.zeros(priority.shape, dtype=torch.bool).scatter_(-1, kept, True)[..., 2 : PROMPT - 3]
    assert (stays | weightless).all()
