"""Wrappers that turn one policy into another: their base, and :class:`Sample`, which draws from its scores.

:class:`~epiviz.policies.reserve.ReserveValues` is the other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch

from epiviz import signals
from epiviz.choices import check_choice
from epiviz.policies.base import Policy, Ranking, Slots, reject_unknown
from epiviz.policies.order import remember_order
from epiviz.policies.scoring import standardise
from epiviz.retention import Reason


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
    def selects(self) -> bool:
        return self.policy.selects

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

    def for_model(self, shape) -> Policy:
        return replace(self, policy=self.policy.for_model(shape))

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


def listed(value: str, default: str) -> str:
    """Return a parameter for a printed composition, nothing if it is the default."""
    return "" if value == default else f", {value}"


@dataclass(frozen=True)
class Sample(Wrapper):
    """Draw the kept slots without replacement instead of taking the top (VaSE, section 4.1).

    An exponential race: non-negative weights w compete as w^(1/T) / Exp(1); signed scores as exp(z / T) / Exp(1), z
    standardised over the head's candidates. Slots of weight zero lose to every positive one and are taken newest
    first, where ``torch.multinomial`` would return them at random. Of a selection, blocks are drawn by their weights,
    anew for every query.

    Parameters
    ----------
    policy : Policy
    temperature : float
        T; small values approach the top, large ones uniform sampling.
    score_dtype : {"float32", "bfloat16"}
        Precision of the race: at least float32, or bfloat16 weights, noise and ratios, as ``torch.multinomial`` draws
        from bfloat16 weights.
    """

    temperature: float = 1.0
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.policy.selects:
            super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        check_choice("score_dtype", self.score_dtype, signals.SCORE_DTYPES)

    def _composition(self) -> str:
        hot = "" if self.temperature == 1 else f", T={self.temperature:g}"
        return f"sample({self.policy.label}{hot}{listed(self.score_dtype, 'float32')})"

    def rank(self, slots: Slots, state, draws) -> Ranking:
        inner = self.policy.rank(slots, state, draws).priority.double()
        log_weight = inner.log() if self.policy.weights else standardise(inner, slots.candidates)
        race = self._race(log_weight, draws.gumbel(slots.positions))
        remember_order(slots, race)
        return Ranking(race, Reason.SAMPLED)

    def _race(self, log_weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the places of a race: the highest come in first."""
        log_weight = log_weight / self.temperature
        if self.score_dtype == "bfloat16":
            return log_weight.exp().bfloat16() / (-noise).exp().bfloat16()
        return torch.where(log_weight == -torch.inf, torch.finfo(torch.float32).min, log_weight + noise)

    # What a selection needs is the wrapped one's, but for the race.

    @property
    def block(self) -> int:
        return self.policy.block

    def sparse_layers(self, shape) -> tuple[int, ...]:
        return self.policy.sparse_layers(shape)

    def summarise(self, layer, keys, positions) -> dict[str, torch.Tensor]:
        return self.policy.summarise(layer, keys, positions)

    def weigh(self, query, blocks, draws) -> torch.Tensor:
        log_weight = self.policy.weigh(query, blocks, draws).double()
        race = self._race(log_weight, draws.gumbel(log_weight.shape[1], blocks.count))
        return race.masked_fill(log_weight == -torch.inf, -torch.inf)

    def select(self, query, blocks, draws) -> torch.Tensor:
        return blocks.take(self.weigh(query, blocks, draws))
