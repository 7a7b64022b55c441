"""Policies that look at nothing: the full cache and the controls that every claim is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epiviz.choices import check_choice
from epiviz.policies.base import BudgetError, Policy, Ranking, Slots, register
from epiviz.retention import Reason


@register("full")
@dataclass(frozen=True)
class Full(Policy):
    """Keep everything; the reference. Its budget is None and its memory grows with the text."""

    evicts: ClassVar[bool] = False
    bounded: ClassVar[bool] = False


@register("recency")
@dataclass(frozen=True)
class Recency(Policy):
    """Keep the newest tokens."""

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.positions.double())


@register("streaming")
@dataclass(frozen=True)
class Streaming(Recency):
    """Keep the sinks and the newest tokens (StreamingLLM, arXiv 2309.17453, section 3), positions absolute.

    The rule is recency; what makes it work are the sinks, so a budget without any is an error.
    """

    def check(self, budget, shape) -> None:
        if not budget.sinks:
            raise BudgetError(
                "streaming keeps attention sinks, but the budget has sinks=0; set sinks=4 or use 'recency'"
            )


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
        check_choice("scope", self.scope, ("head", "global"))

    def rank(self, slots: Slots, state, draws) -> Ranking:
        # With the global scope the kept sets of all heads are equal, so one head's positions stand for all.
        positions = slots.positions if self.scope == "head" else slots.positions[:1, :, :1]
        return Ranking(draws.uniform(positions, per_head=self.scope == "head"), Reason.SAMPLED)
