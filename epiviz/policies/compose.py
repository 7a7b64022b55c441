"""Wrappers that turn one policy into another: sample from its scores, or reserve slots for large values first."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch

from epiviz import signals
from epiviz.policies.base import BudgetError, Policy, Ranking, Slots, reject_unknown
from epiviz.retention import Reason

STATISTICS = {
    "range": signals.value_range,
    "variance": signals.channel_variance,
    "norm": signals.channel_norm,
}


@dataclass(frozen=True)
class Wrapper(Policy):
    """A policy around another one; what the inner one needs and observes passes through.

    ``title`` is printed instead of the composition, for compositions that have a name of their own. A wrapped method
    that underfills its budget fills it: slots that it would drop come last.
    """

    policy: Policy
    title: str | None = field(default=None, kw_only=True)

    @property
    def label(self) -> str:
        return self.title or self._composition()

    def _composition(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} must say how it prints")

    @property
    def evicts(self) -> bool:
        return self.policy.evicts

    @property
    def bounded(self) -> bool:
        return self.policy.bounded

    @property
    def underfills(self) -> bool:
        return False

    def __post_init__(self) -> None:
        inner = self.policy
        if not inner.evicts or (inner.underfills and not inner.bounded):
            why = "never evicts" if not inner.evicts else "decides how much it keeps itself"
            raise ValueError(f"{inner.label!r} cannot be wrapped: it {why}")

    @property
    def weights(self) -> bool:
        return False

    def needs(self, shape):
        return self.policy.needs(shape)

    def check(self, budget, shape) -> None:
        self.policy.check(budget, shape)

    def observe(self, new, state) -> None:
        self.policy.observe(new, state)

    def due(self, seen, held, budget) -> bool:
        return self.policy.due(seen, held, budget)

    def due_after_prompt(self, seen, held, budget) -> bool:
        return self.policy.due_after_prompt(seen, held, budget)

    def with_parameters(self, **parameters) -> Policy:
        known = [f.name for f in fields(self) if f.name not in ("policy", "title")]
        reject_unknown(self.label, parameters, known)
        return replace(self, title=None, **parameters)


@dataclass(frozen=True)
class Sample(Wrapper):
    """Draw the kept slots without replacement instead of taking the top (VaSE, section 4.1).

    An exponential race: non-negative weights w compete as w^(1/T) / Exp(1); signed scores as exp(z / T) / Exp(1), z
    standardised over the head's candidates. Slots of weight zero lose to every positive one and are taken newest
    first, where ``torch.multinomial`` would return them at random.

    Parameters
    ----------
    policy : Policy
    temperature : float
        T; small values approach the top, large ones uniform sampling.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def _composition(self) -> str:
        hot = "" if self.temperature == 1 else f", T={self.temperature:g}"
        return f"sample({self.policy.label}{hot})"

    def rank(self, slots: Slots, state, draws) -> Ranking:
        inner = self.policy.rank(slots, state, draws).priority.double()
        log_weight = inner.log() if self.policy.weights else standardise(inner, slots.candidates)
        race = log_weight / self.temperature + draws.gumbel(slots.positions)
        lowest = torch.finfo(torch.float32).min
        return Ranking(torch.where(log_weight == -torch.inf, lowest, race), Reason.SAMPLED)


def standardise(scores: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return scores minus mean, over sd, of each head's candidates; constant scores give 0, infinite ones stay."""
    finite = candidates & scores.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    clean = torch.where(finite, scores, 0.0)
    mean = clean.sum(-1, keepdim=True) / count
    variance = torch.where(finite, (clean - mean).square(), 0.0).sum(-1, keepdim=True) / count
    z = (scores - mean) / variance.sqrt().clamp(min=1e-12)
    return torch.where(scores.isfinite(), z, scores)


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

    Raises
    ------
    BudgetError
        More slots are reserved than the policy may choose freely.
    """

    share: float = field(default=0.25)
    statistic: str = field(default="range")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share < 1:
            raise ValueError(f"share must lie in [0, 1), got {self.share}")
        if self.statistic not in STATISTICS:
            raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {self.statistic!r}")

    def _composition(self) -> str:
        suffix = "" if self.statistic == "range" else f", {self.statistic}"
        return f"reserve({self.policy.label}, {self.share:g}{suffix})"

    def reserved(self, budget) -> int:
        """Slots reserved for value states, the sinks not counted."""
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
        ranking = self.policy.rank(slots, state, draws)
        size = torch.stack([STATISTICS[self.statistic](values) for values in slots.values])
        size = torch.where(slots.candidates, size, -torch.inf)
        return reserve(ranking, largest(size, self.reserved(slots.budget)))


def reserve(ranking: Ranking, reserved: torch.Tensor) -> Ranking:
    """Put the slots marked in ``reserved`` above all others of a ranking."""
    priority = ranking.priority.double().clamp(min=torch.finfo(torch.float32).min)  # no −∞: nothing else is dropped
    priority = torch.where(reserved, torch.inf, priority)
    reason = torch.as_tensor(ranking.reason, dtype=torch.uint8, device=priority.device)
    return Ranking(priority, torch.where(reserved, int(Reason.RESERVED), reason.expand(priority.shape)))


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the ``count`` largest along the last axis, bool like ``x``; of equal ones (in float32) the newer win."""
    order = newest_first_order(x.float())[..., :count]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)


def newest_first_order(priority: torch.Tensor) -> torch.Tensor:
    """Return the indices of the last axis by descending priority, later indices first among equals."""
    n = priority.shape[-1]
    return n - 1 - priority.flip(-1).argsort(dim=-1, descending=True, stable=True)


def rank_from_top(scores: torch.Tensor) -> torch.Tensor:
    """Return each entry's place in descending order along the last axis, the later first among equals."""
    order = newest_first_order(scores)
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)
