"""LagKV (arXiv 2504.04704): a token matters if its channels spread, measured on the scale of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from epiviz.policies.base import BudgetError, Policy, Ranking, Slots, register
from epiviz.policies.order import rank_from_top
from epiviz.signals import at_least_float32

EPSILON = 1e-9  # keeps a channel that is constant in the reference finite; the original divides by zero


@register("lagkv")
@dataclass(frozen=True)
class LagKV(Policy):
    """LagKV under a fixed budget: the lag scores of all partitions compete for the same slots (section 3).

    The slots behind the protected ones at the front are cut into partitions of ``lag``. Each channel of a partition is
    normalised with the minimum and maximum of the next one; a token's score is the standard deviation over channels,
    softmaxed inside the partition, keys plus values. The last partition and an unfinished tail have no next one:
    they stay as long as there is room.

    Parameters
    ----------
    lag : int
        Tokens per partition.
    """

    lag: int = 128

    def __post_init__(self) -> None:
        if self.lag < 2:
            raise ValueError(f"lag must be at least 2, got {self.lag}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        front, n = slots.budget.front, slots.n
        whole = (n - front) // self.lag
        ranked = max(0, whole - 1) * self.lag  # slots that have a next partition
        # Above every score, newest highest: a tail that does not fit loses its oldest tokens.
        score = torch.arange(n, device=slots.keys.device).double().add(10.0).expand(slots.positions.shape).clone()
        if ranked:
            for layer in range(slots.layers):
                parts = [
                    x[layer, :, :, front : front + ranked + self.lag].unflatten(2, (-1, self.lag))
                    for x in (slots.keys, slots.values)
                ]
                score[layer, :, :, front : front + ranked] = sum(lag_score(part) for part in parts).flatten(2)
        return Ranking(score)


def lag_score(parts: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """Return the lag scores ``[…, partitions − 1, lag]`` of ``[rows, kv_heads, partitions, lag, head_dim]``."""
    parts = at_least_float32(parts)
    low, high = torch.aminmax(parts[:, :, 1:], dim=3, keepdim=True)
    return lag_spread(parts[:, :, :-1], low, high, epsilon).softmax(-1)


def lag_spread(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """Return the standard deviation over the channels of ``[…, head_dim]`` on the scale of other tokens.

    ``low`` and ``high``, broadcast against ``x``, are the smallest and largest value of each channel among those.
    """
    return ((x - low) / (high - low + epsilon)).std(-1)


@register("lagkv-ratio")
@dataclass(frozen=True)
class LagKVRatio(LagKV):
    """LagKV as published: every partition is cut once to a share of itself, when the next one is complete (section 3).

    Memory grows with the text, at that share. The budget's ``total`` is not used; its sinks (16 in the paper) are
    where the partitions start.

    Parameters
    ----------
    lag : int
        Tokens per partition.
    ratio : float
        Share of a partition that stays.
    """

    bounded: ClassVar[bool] = False
    underfills: ClassVar[bool] = True

    ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1 or round(self.ratio * self.lag) < 1:
            raise ValueError(f"ratio must keep at least one of {self.lag} slots and at most all, got {self.ratio}")

    @property
    def kept(self) -> int:
        """Slots that stay of a partition."""
        return max(1, round(self.ratio * self.lag))

    def check(self, budget, shape) -> None:
        if budget.recent > self.lag:
            raise BudgetError(
                f"{budget.recent} recent tokens would protect partitions of {self.lag} that are due; lower recent to "
                f"{self.lag}"
            )

    def waiting(self, seen: int, held: int, budget) -> int:
        """Return how many complete partitions, each with a complete next one, are not cut yet."""
        if self.kept == self.lag:
            return 0
        cut = (seen - held) // (self.lag - self.kept)
        return max(0, (seen - budget.front) // self.lag - 1 - cut)

    def due(self, seen, held, budget) -> bool:
        return self.waiting(seen, held, budget) > 0

    def due_after_prompt(self, seen, held, budget) -> bool:
        return self.due(seen, held, budget)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        seen = int(slots.seen[0, 0, 0, 0])
        waiting = self.waiting(seen, slots.n, slots.budget)
        cut = (seen - slots.n) // (self.lag - self.kept)
        start = slots.budget.front + cut * self.kept
        stop = start + waiting * self.lag
        priority = torch.ones(slots.positions.shape, dtype=torch.float32, device=slots.keys.device)
        for layer in range(slots.layers):
            parts = [
                x[layer, :, :, start : stop + self.lag].unflatten(2, (-1, self.lag)) for x in (slots.keys, slots.values)
            ]
            score = sum(lag_score(part) for part in parts).float()
            place = rank_from_top(score)
            priority[layer, :, :, start:stop] = torch.where(place < self.kept, score, -torch.inf).flatten(2)
        return Ranking(priority)
