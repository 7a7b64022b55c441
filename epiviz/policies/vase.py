"""VaSE (arXiv 2606.03928): keep the few value states of abnormal range, and prefer sampling to the top."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace

import torch

from epiviz.choices import check_choice
from epiviz.draws import LOT, Draws
from epiviz.policies.base import Policy, Ranking, Slots, label, register
from epiviz.policies.compose import Sample
from epiviz.policies.reserve import ReserveValues
from epiviz.policies.scoring import average
from epiviz.policies.simple import Random
from epiviz.policies.snapkv import SnapKV
from epiviz.retention import Reason
from epiviz.signals import SCORE_DTYPES, in_score_dtype


@register("vase-attnv")
def vase_attnv(
    value_share: float = 0.25,
    statistic: str = "range",
    temperature: float = 1.0,
    window: int = 64,
    pool: int = 5,
    allocation: str = "uniform",
    pool_over: str = "position",
    score_dtype: str = "float32",
) -> ReserveValues:
    """Reserved value slots, the rest sampled by attention (VaSE-AttnV, section 4.1).

    ``round(value_share · total)`` slots, sinks included, go to the largest value ranges of each head; the others are
    drawn without replacement with SnapKV's attention as weights. With ``allocation="adaptive"`` heads whose value
    ranges have a heavier tail reserve more of them, the total unchanged.
    """
    given = dict(locals())
    defaults = inspect.signature(vase_attnv).parameters
    title = label("vase-attnv", {name: (value, defaults[name].default) for name, value in given.items()})
    drawn = Sample(SnapKV(window, pool, pool_over, score_dtype), temperature, score_dtype)
    return ReserveValues(drawn, value_share, statistic, allocation, score_dtype=score_dtype, title=title)


@dataclass(frozen=True)
class Leverage(Policy):
    """Base of the policies that score keys and values in a random projection.

    Parameters
    ----------
    size : int
        Columns of the projection (r = 20 in the public code).
    shared_projection : bool
        One projection for all samples, not one for each: the rows of a batch then share its luck.
    score_dtype : {"float32", "bfloat16"}
        Precision of the projection, the norms and their product; bfloat16 in the public code.
    """

    size: int = 20
    shared_projection: bool = False
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choice("score_dtype", self.score_dtype, SCORE_DTYPES)

    def projection(self, slots: Slots, draws: Draws, fixed: bool = False) -> torch.Tensor:
        """Draw ``[layers, rows, head_dim, size]`` from N(0, 1 / size), anew at each event unless ``fixed``."""
        if self.shared_projection:
            draws = replace(draws, samples=[0] * len(draws.samples))
        return draws.normal(slots.layers, slots.keys.shape[-1], self.size, fixed=fixed) / self.size**0.5

    def score(self, slots: Slots, projection: torch.Tensor, local: int = 0) -> Ranking:
        # Layer by layer: a float32 copy of a whole half-precision cache would double its memory.
        layers = zip(slots.keys, slots.values, projection, strict=True)
        return Ranking(torch.stack([leverage(*layer, local, self.score_dtype) for layer in layers]))


@register("vase-dkv")
@dataclass(frozen=True)
class VaseDKV(Leverage):
    """Leverage scores of keys and values in a fresh random projection at each eviction (VaSE-DKV, section 4.2).

    ``‖k G‖² · ‖v G‖²`` with one ``G ~ N(0, 1/size)`` of ``head_dim × size`` per sample, layer and event, shared by the
    layer's KV heads and by keys and values.

    Parameters
    ----------
    size, shared_projection, score_dtype
        As in :class:`Leverage`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return self.score(slots, self.projection(slots, draws))


def leverage(
    keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor, local: int = 0, score_dtype: str = "float32"
) -> torch.Tensor:
    """Return ``‖k G‖² · ‖v G‖²``, each divided by its sum over ``local`` neighbours if that is not 0.

    Parameters
    ----------
    keys, values : ``[rows, kv_heads, n, head_dim]``
    projection : ``[rows, head_dim, size]``
    local : int
    score_dtype : {"float32", "bfloat16"}

    Returns
    -------
    ``[rows, kv_heads, n]``
    """
    keys, values = in_score_dtype(keys, score_dtype), in_score_dtype(values, score_dtype)
    projection = projection.to(keys.dtype).unsqueeze(1)
    norms = [(x @ projection).square().sum(-1) for x in (keys, values)]
    if local:
        least = torch.finfo(keys.dtype).tiny  # a window of zeros alone scores 0, where 0 / 0 would be NaN
        norms = [norm / local_sum(norm, local).clamp(min=least) for norm in norms]
    return norms[0] * norms[1]


def local_sum(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sum over each window of ``width`` neighbours along the last axis, spread over the window."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % width))
    sums = padded.unflatten(-1, (-1, width)).sum(-1, keepdim=True)
    return sums.expand(*sums.shape[:-1], width).flatten(-2)[..., :n]


@register("curdkv")
@dataclass(frozen=True)
class CurDKV(Leverage):
    """CurDKV (arXiv 2509.15038) as VaSE compares with it: leverage scores in one projection for the whole run.

    Parameters
    ----------
    size : int
        Columns of the projection; 0 uses keys and values as they are.
    shared_projection, score_dtype
        As in :class:`Leverage`.
    local : int
        Normalise the squared norms inside windows of so many neighbours (16 in kvpress' default); 0 does not.
    """

    local: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 0 or self.local < 0:
            raise ValueError(f"size and local must not be negative, got {self.size} and {self.local}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        if self.size:
            projection = self.projection(slots, draws, fixed=True)
        else:
            width = slots.keys.shape[-1]
            projection = torch.eye(width, device=slots.keys.device).expand(slots.layers, slots.keys.shape[1], -1, -1)
        return self.score(slots, projection, self.local)


@register("random-reserve")
@dataclass(frozen=True)
class RandomReserve(ReserveValues):
    """The control of the value reserve: as many slots of each head reserved, but at random.

    Parameters
    ----------
    policy : Policy
        Fills the rest.
    share, statistic, allocation, scope, score_dtype
        As in :class:`~epiviz.policies.reserve.ReserveValues`; values decide how many slots an adaptive reserve gets.
    """

    policy: Policy = field(default_factory=lambda: Sample(SnapKV()))

    def _composition(self) -> str:
        return f"random-{super()._composition()}"

    def rank(self, slots: Slots, state, draws) -> Ranking:
        lot = average(draws.uniform(slots.positions, purpose=LOT), self.scope)
        lot = torch.where(slots.candidates, lot, -torch.inf)
        return self.reserve(self.policy.rank(slots, state, draws), slots, self.size(slots), order=lot)


@register("evict-largest")
@dataclass(frozen=True)
class EvictLargest(Policy):
    """The adversary of VaSE's pilot (section 3): keep the *smallest* value ranges of each head, or its matched control.

    Parameters
    ----------
    matched : bool
        The control: drop only what a reserve of this share would keep, and fill the room at random. Without it, every
        candidate of larger range goes, which confounds losing the large ones with keeping the smallest.
    share, allocation
        Of that reserve, see :class:`~epiviz.policies.reserve.ReserveValues`.
    score_dtype : {"float32", "bfloat16"}
        Precision of the ranges.
    """

    matched: bool = False
    share: float = 0.25
    allocation: str = "uniform"
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        self.opposite()  # checks the others

    def opposite(self) -> ReserveValues:
        """The reserve that keeps what the control drops."""
        return ReserveValues(Random(), self.share, allocation=self.allocation, score_dtype=self.score_dtype)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        size = self.opposite().size(slots)
        if not self.matched:
            return Ranking(-size)
        group = self.opposite().chosen(slots, size, order=size)
        return Ranking(torch.where(group, -1.0, draws.uniform(slots.positions)), Reason.SAMPLED)
