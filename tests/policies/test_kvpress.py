"""Scores equal those of NVIDIA's kvpress, an independent implementation; every difference is deliberate and named here.

``fixtures/kvpress.safetensors`` holds inputs and scores; ``fixtures/make_kvpress.py`` made it, once, and says how.
Nothing is compared loosely: a difference of convention is undone in the test. What is left is rounding: float64, but
where attention enters, kvpress' softmax is float32, and epsilons of ours keep degenerate input finite.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from stepper import Stepper

from epiviz import policies
from epiviz.cache import choose
from epiviz.policies import Budget, Slots
from epiviz.policies.lagkv import lag_score

FILE = Path(__file__).parents[1] / "fixtures" / "kvpress.safetensors"
KVPRESS = load_file(FILE)
with safe_open(FILE, "pt") as opened:
    HEADER = opened.metadata()
LAYERS, ROWS, KV, N, SIZE = KVPRESS["keys"].shape
WINDOW, LAG, SINKS = (int(HEADER[name]) for name in ("window", "lag", "sinks"))

EXACT = {"rtol": 1e-12, "atol": 1e-14}
EPSILON = {"rtol": 2e-7, "atol": 0}  # ours adds 1e-9 or 1e-8 to a scale of about 1
FLOAT32_SOFTMAX = {"rtol": 2e-6, "atol": 1e-8}


def slots(queries: int = 1, sinks: int = 0, recent: int = 0, total: int = 30) -> Slots:
    """The cache after the last token, with the queries of the last tokens."""
    slot = torch.arange(N)
    return Slots(
        keys=KVPRESS["keys"],
        values=KVPRESS["values"],
        positions=slot.expand(LAYERS, ROWS, KV, N),
        candidates=((slot >= sinks) & (slot < N - recent))[None, None, None],
        budget=Budget(total, sinks=sinks, recent=recent, buffer=1).resolve(N, 10),
        tracks={},
        queries=KVPRESS["queries"][:, :, :, N - queries :],
        query_positions=slot[N - queries :].expand(ROWS, queries),
    )


class Projection:
    """Stands in for Draws: the matrix that kvpress drew (one per layer, shared by the batch), on our scale."""

    @staticmethod
    def normal(layers, *shape, fixed=False):
        matrix = KVPRESS["cur-projection"] * shape[-1] ** 0.5
        return matrix[:, None].expand(layers, ROWS, *shape)


def priority(name: str, given: Slots, draws=None, **parameters) -> torch.Tensor:
    return policies.get(name, **parameters).rank(given, {}, draws).priority


def close(found: torch.Tensor, expected: torch.Tensor, **tolerance) -> None:
    torch.testing.assert_close(found.double(), expected.expand(found.shape), **tolerance)


def test_the_fixture_says_what_made_it():
    assert HEADER["kvpress"] == "0.5.5" and {"torch", "transformers", "made by"} <= set(HEADER)
    assert FILE.stat().st_size < 200_000


def test_knorm():
    close(priority("knorm", slots()), KVPRESS["knorm"], **EXACT)


def test_keydiff():
    close(priority("keydiff", slots()), KVPRESS["keydiff"], **EPSILON)


def test_tova():
    """kvpress puts the current token above all others; here the budget's ``recent`` protects it."""
    close(priority("tova", slots())[..., :-1], KVPRESS["tova"][:, :, :1, :-1], **FLOAT32_SOFTMAX)


def test_snapkv_with_the_window_in_the_softmax():
    """With nothing protected the softmax runs over all keys, as in kvpress and in the original.

    Pooling then sees the window's own weights, where kvpress has cut them off and sees zeros: with five taps that
    reaches the last two candidates.
    """
    given = slots(queries=WINDOW)
    unpooled = priority("snapkv", given, window=WINDOW, pool=1)[..., :-WINDOW]
    close(unpooled, KVPRESS["snapkv-unpooled"][..., :-WINDOW], **FLOAT32_SOFTMAX)
    found, expected = priority("snapkv", given, window=WINDOW, pool=5), KVPRESS["snapkv"]
    close(found[..., : -WINDOW - 2], expected[..., : -WINDOW - 2], **FLOAT32_SOFTMAX)
    taps = torch.nn.functional.pad(unpooled, (2, 2)).unfold(-1, 5, 1).mean(-1)
    close(taps, expected[..., :-WINDOW], **FLOAT32_SOFTMAX)


def test_snapkv_with_the_softmax_outside_the_window():
    """As VaSE has it: kvpress was given attention weights that sum to 1 outside the window."""
    found = priority("snapkv", slots(queries=WINDOW, recent=WINDOW), window=WINDOW, pool=5)
    close(found[..., :-WINDOW], KVPRESS["snapkv-outside"][..., :-WINDOW], **FLOAT32_SOFTMAX)


def test_h2o_mean_is_observed_attention():
    """kvpress averages over the query heads of a group, H2O sums."""
    unlimited = Budget(1000, sinks=0, recent=0).resolve(N, 10)
    stepper = Stepper(
        policies.get("h2o", accumulate="mean"), unlimited, SIZE, layers=LAYERS, rows=ROWS, heads=4, kv_heads=KV
    )
    for part in (slice(0, 50), slice(50, N)):  # a prompt in two blocks
        given = {name: KVPRESS[name][:, :, :, part] for name in ("keys", "values", "queries")}
        stepper.feed(part.stop - part.start, **given)
    close(stepper.priority() / 2, KVPRESS["observed"], **FLOAT32_SOFTMAX)


def test_lagkv():
    """kvpress takes the mean of the scores of keys and values, we their sum; and it puts 1 where there is no score."""
    scored = slice(SINKS, SINKS + (N - SINKS) // LAG * LAG - LAG)
    found = priority("lagkv", slots(sinks=SINKS), lag=LAG)
    close(found[..., scored] / 2, KVPRESS["lagkv"][..., scored], **EPSILON)
    assert (KVPRESS["lagkv"][..., scored.stop :] == 1).all()
    assert (found[..., scored.stop :] > found[..., scored].max()).all()
    parts = [KVPRESS[x][..., SINKS : scored.stop + LAG, :].unflatten(3, (-1, LAG)) for x in ("keys", "values")]
    exact = sum(torch.stack([lag_score(layer, epsilon=0.0) for layer in part]) for part in parts).flatten(3)
    close(exact / 2, KVPRESS["lagkv"][..., scored], **EXACT)


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_lagkv_ratio_keeps_what_the_rank_inside_a_partition_says(ratio):
    """By default kvpress replaces scores by their rank inside the partition, over its length."""
    scored = slice(SINKS, SINKS + (N - SINKS) // LAG * LAG - LAG)
    found = priority("lagkv-ratio", slots(sinks=SINKS), lag=LAG, ratio=ratio)
    kept = found > -torch.inf
    assert torch.equal(kept[..., scored], KVPRESS["lagkv-rank"][..., scored] >= 1 - ratio)
    assert kept[..., :SINKS].all() and kept[..., scored.stop :].all()


def test_curdkv_with_local_windows():
    """kvpress' default form. It divides by the sum at the end and sets sinks to 1; the order is the same."""
    found = priority("curdkv", slots(), size=0, local=16)
    share = found / found.sum(-1, keepdim=True)
    close(share[..., SINKS:], KVPRESS["cur"][..., SINKS:], **EXACT)
    assert (KVPRESS["cur"][..., :SINKS] == 1).all()


@pytest.mark.parametrize("name", ["curdkv", "vase-dkv"])
def test_leverage_in_a_random_projection(name):
    found = priority(name, slots(), Projection)
    share = found / found.sum(-1, keepdim=True)
    close(share[..., SINKS:], KVPRESS["cur-projected"][..., SINKS:], **EXACT)


@pytest.mark.parametrize(
    "press, name, protected, parameters",
    [
        ("knorm", "knorm", {}, {}),
        ("keydiff", "keydiff", {}, {}),
        ("tova", "tova", {"recent": 1}, {}),
        ("snapkv-outside", "snapkv", {"queries": WINDOW, "recent": WINDOW}, {"window": WINDOW}),
        ("cur", "curdkv", {"sinks": SINKS}, {"size": 0, "local": 16}),
        ("cur-projected", "curdkv", {"sinks": SINKS}, {}),
    ],
)
@pytest.mark.parametrize("total", [20, 40])
def test_the_same_slots_stay(press, name, protected, parameters, total):
    """What kvpress forces to the top (sinks, window, current token) is what the budget protects here."""
    given = slots(total=total, **protected)
    ranked = priority(name, given, Projection, **parameters).float().expand(LAYERS, ROWS, KV, N)
    keep, _ = choose(ranked, given.budget.front, given.budget.recent, total)
    assert torch.equal(keep, KVPRESS[press].topk(total, dim=-1).indices.sort(-1).values)
