"""Policies that look at nothing: the full cache and the controls that every claim is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epiviz.policies.base import Policy, Ranking, Slots, register
from epiviz.retention import Reason


@register("full")
@dataclass(frozen=True)
class Full(Policy):
    """Keep everything; the reference. Its budget is None and its memory grows with the text."""

    bounded: ClassVar[bool] = False

    def due(self, seen, held, budget) -> bool:
        return False


@register("streaming")
@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the sinks and the newest tokens (StreamingLLM, arXiv 2309.17453, section 3), positions absolute."""

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.positions.double())


@register("random")
@dataclass(frozen=True)
class Random(Policy):
    """Keep a uniform random subset at each eviction; the control.

    Parameters
    ----------
    scope : {"head", "global"}
        Draw per layer and KV head, or once for all heads.
    """

    scope: str = "head"

    def __post_init__(self) -> None:
        if self.scope not in ("head", "global"):
            raise ValueError(f"scope must be 'head' or 'global', got {self.scope!r}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        # With the global scope the kept sets of all heads are equal, so one head's positions stand for all.
        positions = slots.positions if self.scope == "head" else slots.positions[:1, :, :1]
        return Ranking(draws.uniform(positions, per_head=self.scope == "head"), Reason.SAMPLED)
