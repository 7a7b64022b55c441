"""VaSE (arXiv 2606.03928): keep the few value states of abnormal range, and prefer sampling to the top."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch

from epiviz import signals
from epiviz.draws import LOT
from epiviz.policies.base import Policy, Ranking, Slots, label, register
from epiviz.policies.compose import ReserveValues, Sample, Wrapper, largest, reserve
from epiviz.policies.snapkv import SnapKV
from epiviz.retention import Reason


@register("vase-attnv")
def vase_attnv(
    value_share: float = 0.25, statistic: str = "range", temperature: float = 1.0, window: int = 64, pool: int = 5
) -> ReserveValues:
    """Reserved value slots, the rest sampled by attention (VaSE-AttnV, section 4.1).

    ``round(value_share · total)`` slots, sinks included, go to the largest value ranges of each head; the others are
    drawn without replacement with SnapKV's attention as weights.
    """
    given = (value_share, statistic, temperature, window, pool)
    defaults = zip(inspect.signature(vase_attnv).parameters.items(), given, strict=True)
    title = label("vase-attnv", {name: (value, parameter.default) for (name, parameter), value in defaults})
    return ReserveValues(Sample(SnapKV(window, pool), temperature), value_share, statistic, title=title)


@register("vase-dkv")
@dataclass(frozen=True)
class VaseDKV(Policy):
    """Leverage scores of keys and values in a fresh random projection at each eviction (VaSE-DKV, section 4.2).

    ``‖k G‖² · ‖v G‖²`` with one ``G ~ N(0, 1/rank)`` of ``head_dim × rank`` per sample, layer and event, shared by the
    layer's KV heads and by keys and values.

    Parameters
    ----------
    size : int
        Columns of the projection (r = 20 in the public code).
    """

    size: int = 20

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        projection = draws.normal(slots.layers, slots.keys.shape[-1], self.size) / self.size**0.5
        # Layer by layer: a float32 copy of a whole half-precision cache would double its memory.
        layers = zip(slots.keys, slots.values, projection, strict=True)
        return Ranking(torch.stack([leverage(*layer) for layer in layers]))


def leverage(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor, local: int = 0) -> torch.Tensor:
    """Return ``‖k G‖² · ‖v G‖²``, each divided by its sum over ``local`` neighbours if that is not 0.

    Parameters
    ----------
    keys, values : ``[rows, kv_heads, n, head_dim]``
    projection : ``[rows, head_dim, size]``

    Returns
    -------
    ``[rows, kv_heads, n]``
    """
    keys, values = signals.at_least_float32(keys), signals.at_least_float32(values)
    projection = projection.to(keys.dtype).unsqueeze(1)
    norms = [(x @ projection).square().sum(-1) for x in (keys, values)]
    if local:
        norms = [norm / local_sum(norm, local) for norm in norms]
    return norms[0] * norms[1]


def local_sum(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sum over each window of ``width`` neighbours along the last axis, spread over the window."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % width))
    sums = padded.unflatten(-1, (-1, width)).sum(-1, keepdim=True)
    return sums.expand(*sums.shape[:-1], width).flatten(-2)[..., :n]


@register("curdkv")
@dataclass(frozen=True)
class CurDKV(Policy):
    """CurDKV (arXiv 2509.15038) as VaSE compares with it: leverage scores in one projection for the whole run.

    Parameters
    ----------
    size : int
        Columns of the projection; 0 uses keys and values as they are.
    local : int
        Normalise the squared norms inside windows of so many neighbours (16 in kvpress' default); 0 does not.
    """

    size: int = 20
    local: int = 0

    def __post_init__(self) -> None:
        if self.size < 0 or self.local < 0:
            raise ValueError(f"size and local must not be negative, got {self.size} and {self.local}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        width = slots.keys.shape[-1]
        if self.size:
            projection = draws.normal(slots.layers, width, self.size, fixed=True) / self.size**0.5
        else:
            projection = torch.eye(width, device=slots.keys.device).expand(slots.layers, slots.keys.shape[1], -1, -1)
        layers = zip(slots.keys, slots.values, projection, strict=True)
        return Ranking(torch.stack([leverage(*layer, local=self.local) for layer in layers]))


@register("random-reserve")
@dataclass(frozen=True)
class RandomReserve(Wrapper):
    """The control of the value reserve: as many slots reserved at random, the rest by the wrapped policy."""

    policy: Policy = field(default_factory=lambda: Sample(SnapKV()))
    share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        ReserveValues(self.policy, self.share)  # checks both

    def _composition(self) -> str:
        return f"random-reserve({self.policy.label}, {self.share:g})"

    def check(self, budget, shape) -> None:
        ReserveValues(self.policy, self.share).check(budget, shape)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        ranking = self.policy.rank(slots, state, draws)
        lot = torch.where(slots.candidates, draws.uniform(slots.positions, purpose=LOT), -torch.inf)
        return reserve(ranking, largest(lot, ReserveValues(self.policy, self.share).reserved(slots.budget)))


@register("evict-largest")
@dataclass(frozen=True)
class EvictLargest(Policy):
    """The adversary of VaSE's pilot (section 3): keep the *smallest* value ranges of each head, or its matched control.

    Parameters
    ----------
    matched : bool
        The control: drop only the ``share`` of the budget with the largest ranges and fill the room at random.
        Without it, every candidate of larger range goes, which confounds losing the large ones with keeping the
        smallest.
    share : float
        Size of the group that the control drops.
    """

    matched: bool = False
    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share must lie in [0, 1), got {self.share}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        size = torch.stack([signals.value_range(values) for values in slots.values])
        if not self.matched:
            return Ranking(-size)
        group = largest(torch.where(slots.candidates, size, -torch.inf), round(self.share * slots.budget.total))
        lot = draws.uniform(slots.positions)
        return Ranking(torch.where(group, -1.0, lot), Reason.SAMPLED)
