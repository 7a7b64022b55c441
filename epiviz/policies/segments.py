"""Policies that keep a quota of each segment of the cache: EpiKV-Seg, Segment-HS, and ThinKV as EpiKV runs it.

At an eviction the slots before the recent ones are cut, from the oldest on, into segments of ``segment`` slots. A
statistic sorts the segments into three classes by its tertiles, each class has a quota, and inside a segment the
highest scores stay. Quotas need not add up to the budget: these methods underfill it, and the meter shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from epiviz import signals
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register
from epiviz.policies.epikv import EpiKV
from epiviz.policies.order import rank_from_top
from epiviz.policies.scoring import current_row


@dataclass(frozen=True)
class SegmentPolicy(Policy):
    """Base of the policies that keep a quota of each segment.

    Parameters
    ----------
    quotas : (int, int, int)
        Slots kept of a reasoning, an execution and a transition segment (R, E, T).
    segment : int
        Slots per segment, in their present order.
    merge_tail : bool
        Let a last segment of a single slot join the one before. In the public code the trigger leaves exactly one
        such slot every time, which takes a place of its own among the tertiles.
    """

    underfills: ClassVar[bool] = True
    ascending: ClassVar[bool] = True  # the lowest statistics are class R

    quotas: tuple[int, int, int] = (64, 32, 8)
    segment: int = 128
    merge_tail: bool = True

    def __post_init__(self) -> None:
        if self.segment < 1 or len(self.quotas) != 3 or min(self.quotas) < 0:
            raise ValueError(f"segment must be positive and quotas three counts, got {self.segment}, {self.quotas}")

    def statistic(self, slots: Slots) -> torch.Tensor:
        """Return what a segment's statistic is made of, per slot, ``[rows, n]``."""
        raise NotImplementedError

    def summarise(self, segment: torch.Tensor) -> torch.Tensor:
        """Return a segment's statistic ``[rows]`` from its slots' ``[rows, slots]``."""
        return segment.mean(-1)

    def scores(self, slots: Slots) -> torch.Tensor:
        """Return what ranks the slots inside a segment, ``[rows, n]``."""
        raise NotImplementedError

    def rank(self, slots: Slots, state, draws) -> Ranking:
        scores, statistic = self.scores(slots), self.statistic(slots)
        edges = self.edges(slots.n - slots.budget.recent)
        segments = list(pairwise(edges))
        summaries = torch.stack([self.summarise(statistic[:, a:b]) for a, b in segments], dim=-1)
        quotas = torch.tensor(self.quotas, device=scores.device)[tertiles(summaries, self.ascending)]
        room = torch.full_like(quotas[:, 0], slots.budget.free)
        priority = torch.full_like(scores, -torch.inf, dtype=torch.float32)
        for number, (a, b) in enumerate(segments):
            free = slots.candidates[0, 0, 0, a:b]  # a protected prompt costs the quota nothing
            take = torch.minimum(torch.minimum(quotas[:, number], room), free.sum())
            place = rank_from_top(torch.where(free, scores[:, a:b].float(), -torch.inf))
            priority[:, a:b] = torch.where((place < take[:, None]) & free, scores[:, a:b].float(), -torch.inf)
            room = room - take
        return Ranking(priority[None, :, None])

    def edges(self, n: int) -> list[int]:
        """Return the borders of the segments of ``n`` slots."""
        edges = [*range(0, n, self.segment), n]
        if self.merge_tail and len(edges) > 2 and edges[-1] - edges[-2] == 1:
            del edges[-2]
        return edges


def tertiles(statistic: torch.Tensor, ascending: bool) -> torch.Tensor:
    """Return the class (0 R, 1 E, 2 T) of each segment from its statistic ``[rows, segments]``.

    With N segments sorted, the thresholds are the statistics at N // 3 and 2N // 3. Ascending (an entropy): up to the
    lower is R, up to the upper is E, above is T. Descending (a variance): from the upper on is R, from the lower on E,
    below T. A single segment is R, and so are equal ones.

    Examples
    --------
    >>> ["".join("RET"[c] for c in tertiles(torch.arange(n)[None], True)[0]) for n in (1, 4, 7)]
    ['R', 'RRET', 'RRREETT']
    >>> ["".join("RET"[c] for c in tertiles(torch.arange(n)[None], False)[0]) for n in (1, 4, 7)]
    ['R', 'TERR', 'TTEERRR']
    """
    count = statistic.shape[-1]
    ordered = statistic.sort(-1).values
    low, high = ordered[:, count // 3, None], ordered[:, 2 * count // 3, None]
    if ascending:
        return (statistic > low).long() + (statistic > high).long()
    return (statistic < high).long() + (statistic < low).long()


def segment_entropy(attention: torch.Tensor) -> torch.Tensor:
    """Return the entropy of the attention inside a segment ``[rows, slots]``, normalised there first."""
    share = attention / (attention.sum(-1, keepdim=True) + 1e-9)
    return -(share * (share + 1e-12).log()).sum(-1)


def mean_row(slots: Slots, layers: int) -> torch.Tensor:
    """Return the current query's attention averaged over the heads of the last ``layers`` layers, ``[rows, n]``."""
    rows = [current_row(slots, layer).mean(1) for layer in range(max(0, slots.layers - layers), slots.layers)]
    return torch.stack(rows).mean(0)


@dataclass(frozen=True)
class EpiphanySegments(SegmentPolicy):
    """Segments ranked inside by the epiphany score."""

    epiphany: EpiKV = field(default_factory=EpiKV)

    def needs(self, shape) -> Needs:
        return self.epiphany.needs(shape)

    def observe(self, new: New, state: State) -> None:
        self.epiphany.observe(new, state)

    def scores(self, slots):
        return slots.tracks["score"][0, :, 0]


@register("epikv-seg")
@dataclass(frozen=True)
class EpiKVSeg(EpiphanySegments):
    """Segments by mean key variance, tokens by epiphany score ("kv_seg_hs", EpiKV, section 3)."""

    ascending: ClassVar[bool] = False

    def statistic(self, slots):
        return torch.stack([signals.channel_variance(keys).mean(1) for keys in slots.keys]).mean(0)


@register("segment-hs")
@dataclass(frozen=True)
class SegmentHS(EpiphanySegments):
    """Segments by attention entropy in the last four layers, tokens by epiphany score ("hybrid_seg_hs")."""

    def needs(self, shape) -> Needs:
        return self.epiphany.needs(shape) | Needs(queries=1)

    def statistic(self, slots):
        return mean_row(slots, layers=4)

    def summarise(self, segment):
        return segment_entropy(segment)


@register("thinkv-tertiles")
@dataclass(frozen=True)
class ThinKVTertiles(SegmentPolicy):
    """ThinKV (arXiv 2510.01290) as the EpiKV harness runs it: tertiles of entropy, ranked by the last layer's row.

    An approximation on the fly: no calibrated thresholds, no quantisation, no k-means, segments classified anew at
    each eviction. The harness does not protect the prompt.
    """

    def needs(self, shape) -> Needs:
        return Needs(queries=1)

    def statistic(self, slots):
        return mean_row(slots, layers=4)

    def summarise(self, segment):
        return segment_entropy(segment)

    def scores(self, slots):
        return mean_row(slots, layers=1)
