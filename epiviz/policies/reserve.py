"""Slots reserved for large value states (VaSE, section 4.1), around any policy that fills the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz import signals
from epiviz.choices import check_choice
from epiviz.policies.base import BudgetError, Ranking, Slots
from epiviz.policies.compose import Wrapper, listed
from epiviz.policies.order import largest, remember_order
from epiviz.policies.scoring import SCOPES, average
from epiviz.retention import Reason

STATISTICS = {
    "range": signals.value_range,
    "variance": signals.channel_variance,
    "norm": signals.channel_norm,
}


@dataclass(frozen=True)
class ReserveValues(Wrapper):
    """Reserve slots for the largest value states of each head; the wrapped policy fills the rest (VaSE, section 4.1).

    Parameters
    ----------
    policy : Policy
    share : float
        Reserved share of the budget. ``round(share · total)`` slots are reserved, the sinks counted among them.
    statistic : {"range", "variance", "norm"}
        What makes a value state large.
    allocation : {"uniform", "adaptive"}
        Equally many slots in every head, or more where the tail of large values is heavier, as many in all; see
        :func:`adaptive_counts`.
    scope : {"head", "layer", "global"}
        Reserve by each head's values, or by the statistic averaged over a layer's heads or over all heads, which then
        reserve the same tokens, as the EpiKV harness does.
    score_dtype : {"float32", "bfloat16"}
        Precision of the statistic; ties are common in bfloat16.

    Raises
    ------
    BudgetError
        More slots are reserved than the policy may choose freely. If all of them are, nothing is left to the wrapped
        policy.
    """

    share: float = 0.25
    statistic: str = "range"
    allocation: str = "uniform"
    scope: str = "head"
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share < 1:
            raise ValueError(f"share must lie in [0, 1), got {self.share}")
        check_choice("statistic", self.statistic, STATISTICS)
        check_choice("allocation", self.allocation, ("uniform", "adaptive"))
        check_choice("scope", self.scope, SCOPES)
        check_choice("score_dtype", self.score_dtype, signals.SCORE_DTYPES)

    def _composition(self) -> str:
        return f"reserve({self.policy.label}, {self.share:g}{self._variant()})"

    def _variant(self) -> str:
        chosen = {"statistic": "range", "allocation": "uniform", "scope": "head", "score_dtype": "float32"}
        return "".join(listed(getattr(self, name), default) for name, default in chosen.items())

    def reserved(self, budget) -> int:
        """Slots reserved for value states in a head, on average if adaptive; the sinks not counted."""
        return max(0, round(self.share * budget.total) - budget.sinks)

    def check(self, budget, shape) -> None:
        self.policy.check(budget, shape)
        if self.reserved(budget) > budget.free:
            raise BudgetError(
                f"a share of {self.share:g} of {budget.total} slots reserves {self.reserved(budget)} beside "
                f"{budget.sinks} sinks, but only {budget.free} are free beside {budget.front} protected at the front "
                f"and {budget.recent} recent; lower the share or recent, or raise total"
            )

    def rank(self, slots: Slots, state, draws) -> Ranking:
        size = self.size(slots)
        return self.reserve(self.policy.rank(slots, state, draws), slots, size, order=size)

    def size(self, slots: Slots) -> torch.Tensor:
        """Return how large the candidates' value states are, ``[layers or 1, rows, kv_heads or 1, n]``, else −∞."""
        # Layer by layer: a float32 copy of a whole half-precision cache would double its memory.
        size = torch.stack([STATISTICS[self.statistic](values) for values in slots.values])
        size = signals.in_score_dtype(average(size, self.scope), self.score_dtype)
        return torch.where(slots.candidates, size, -torch.inf)

    def chosen(self, slots: Slots, size: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Mark the slots to reserve: as many per head as the sizes ask for, the largest in ``order``."""
        count = self.reserved(slots.budget)
        if self.allocation == "adaptive":
            count = adaptive_counts(size, count, slots.budget.free)
        return largest(order, count)

    def reserve(self, ranking: Ranking, slots: Slots, size: torch.Tensor, order: torch.Tensor) -> Ranking:
        """Put the slots to reserve above all others of a ranking."""
        reserved = self.chosen(slots, size, order)
        priority = ranking.priority.double().clamp(min=torch.finfo(torch.float32).min)  # no −∞: nothing else is dropped
        priority = torch.where(reserved, torch.inf, priority)
        remember_order(slots, priority, ties=order)
        reason = torch.as_tensor(ranking.reason, dtype=torch.uint8, device=priority.device)
        return Ranking(priority, torch.where(reserved, int(Reason.RESERVED), reason.expand(priority.shape)))


def adaptive_counts(size: torch.Tensor, count: int, most: int) -> torch.Tensor:
    """Give heads more reserved slots the heavier the tail of their value states is, ``count`` in each on average.

    A head gets one slot for every value state larger than c times the head's median. c is one number for all layers
    and heads of a sequence, such that the total is exactly that of a uniform allocation; so nothing has to be rounded.
    What is compared is a ratio: scaling a head's values changes nothing, and a few enormous ones claim no more slots
    than they are. Slots that a full head cannot take go to the next largest ratios elsewhere. Equal ratios are served
    by their rank within the head, so that heads that are alike share evenly, then by layer and head.

    Parameters
    ----------
    size : ``[layers, rows, kv_heads, n]``
        A statistic of the candidates' values; −∞ for slots that are no candidates.
    count : int
        Slots per head on average.
    most : int
        At most so many in one head.

    Returns
    -------
    int64 ``[layers, rows, kv_heads, 1]``
    """
    layers, rows, heads, _ = size.shape
    ordered = size.float().sort(-1, descending=True).values
    middle = (ordered > -torch.inf).sum(-1, keepdim=True) // 2
    ratio = (ordered / ordered.gather(-1, middle)).nan_to_num(1.0, torch.inf, -torch.inf)  # 0 / 0: like its median
    pool = ratio[..., :most].permute(1, 3, 0, 2).flatten(1)  # all heads' first, then all heads' second, …
    served = pool.argsort(dim=-1, descending=True, stable=True)[:, : count * layers * heads]
    counts = torch.zeros(rows, layers * heads, dtype=torch.int64, device=size.device)
    counts.scatter_add_(1, served % (layers * heads), torch.ones_like(served))
    return counts.unflatten(1, (layers, heads)).transpose(0, 1).unsqueeze(-1)
