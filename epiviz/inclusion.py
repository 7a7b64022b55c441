"""What sampling without replacement promises a token: VaSE's bound, the exact probability, and how often it happened.

VaSE (arXiv 2606.03928, section 4.1) argues that sampling keeps a token of attention a among a total of Z with a
probability of at least 1 − (1 − a/Z)^m in m draws. That is exact for draws with replacement; without replacement every
later draw competes against less, so that the probability can only be larger. Here all three are computed for given
weights, those of a real eviction for instance (:func:`weights_at_first_event`): the bound, the exact inclusion
probability, and the frequency over seeds of the project's own :class:`~epiviz.policies.compose.Sample`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from statsmodels.stats.proportion import proportion_confint

from epiviz.cache import choose
from epiviz.draws import Draws
from epiviz.policies.base import Budget, Policy, Ranking, Slots, get
from epiviz.policies.compose import Sample, Wrapper
from epiviz.replays import replay

if TYPE_CHECKING:
    from epiviz.models import Model
    from epiviz.trace import Trace

NODES = 160  # of the quadrature: the probabilities add up to the number of draws within 1e-9
NEGLIGIBLE = 1e-13


@dataclass(frozen=True)
class Inclusion:
    """How likely each token is to be drawn, by three accounts.

    Attributes
    ----------
    share : float64 ``[n]``
        a/Z of each token.
    draws, seeds : int
    bound, exact : float64 ``[n]``
        :func:`with_replacement` and :func:`without_replacement`.
    kept : int64 ``[n]``
        In how many of the seeds the token was drawn.
    """

    share: np.ndarray
    draws: int
    seeds: int
    bound: np.ndarray
    exact: np.ndarray
    kept: np.ndarray

    @property
    def frequency(self) -> np.ndarray:
        """Share of the seeds in which each token was drawn."""
        return self.kept / self.seeds

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return both ends of the exact (Clopper–Pearson) interval of each token's probability."""
        low, high = proportion_confint(self.kept, self.seeds, alpha=1 - level, method="beta")
        return np.asarray(low), np.asarray(high)

    def differs(self, expected: np.ndarray, level: float = 0.95) -> np.ndarray:
        """Return which tokens were drawn clearly less (−1) or more (1) often than ``expected``, int64 ``[n]``.

        All tokens together err with probability 1 − ``level`` (Bonferroni).
        """
        low, high = self.interval(1 - (1 - level) / len(self.kept))
        return np.where(high < expected, -1, np.where(low > expected, 1, 0))


def inclusion(weights: np.ndarray, draws: int, seeds: int = 1000, temperature: float = 1.0) -> Inclusion:
    """Return bound, exact probability and measured frequency of being drawn.

    Parameters
    ----------
    weights : ``[n]``
        Attention of the slots that are drawn from; in VaSE-AttnV those that no value reserve holds.
    draws : int
        Slots that are kept of these.
    seeds : int
        Independent evictions to count.
    temperature : float
        Weights compete as w^(1/T).

    Raises
    ------
    ValueError
        Negative or infinite weights, none above 0, or more draws than weights.
    """
    weights = _check(weights, draws)
    hot = weights if temperature == 1 else (weights / weights.max()) ** (1 / temperature)
    return Inclusion(
        share=hot / hot.sum(),
        draws=draws,
        seeds=seeds,
        bound=with_replacement(hot, draws),
        exact=without_replacement(hot, draws),
        kept=count_kept(weights, draws, seeds, temperature),
    )


def weights_at_first_event(
    model: Model, trace: Trace, budget: Budget | int, policy: str | Policy = "snapkv"
) -> tuple[np.ndarray, int] | None:
    """Return the weights by which a policy ranks at the first eviction of a replay, and how many slots it may keep.

    None if nothing is evicted.

    Parameters
    ----------
    model : Model
    trace : Trace
    budget : Budget or int
    policy : str or Policy
        One whose scores are weights, as attention is.

    Returns
    -------
    weights : float64 ``[evicting layers, kv_heads, candidates]``
        Of the slots that may go, oldest first.
    draws : int
        Slots that stay of these, in every head.

    Raises
    ------
    ValueError
        The policy's scores are no weights.
    """
    watched = _Watched(get(policy))
    if not watched.policy.weights:
        raise ValueError(f"scores of {watched.policy.label!r} are no weights to draw by; use snapkv, for instance")
    budget = budget if isinstance(budget, Budget) else Budget(budget)
    replay(model, trace, watched, budget, compare=False, progress=False)
    return watched.seen[0] if watched.seen else None


def with_replacement(weights: np.ndarray, draws: int) -> np.ndarray:
    """Return 1 − (1 − a/Z)^m, float64 ``[n]``: the probability to be drawn at least once with replacement.

    Examples
    --------
    >>> with_replacement([3, 1], 2).round(9).tolist()
    [0.9375, 0.4375]
    """
    weights = _check(weights, draws)
    with np.errstate(divide="ignore"):  # a single token takes everything: log 0
        return -np.expm1(draws * np.log1p(-weights / weights.sum())) if draws else np.zeros(len(weights))


def without_replacement(weights: np.ndarray, draws: int) -> np.ndarray:
    """Return the exact probability to be among ``draws`` successive draws without replacement, float64 ``[n]``.

    Draws without replacement are a race: token i arrives after an exponential time of rate w_i and is drawn if fewer
    than m others came before it. Its probability is an integral over its arrival time of the chance that a sum of n − 1
    independent arrivals stays below m, by Gauss–Legendre quadrature in log-time. Costs O(n²) steps of :data:`NODES`
    numbers: some seconds for 1,000 tokens. Tokens of weight 0 come after all others, newest first, as in the engine.

    Examples
    --------
    >>> without_replacement([3, 1], 1).round(9).tolist(), without_replacement([3, 1], 2).tolist()
    ([0.75, 0.25], [1.0, 1.0])
    """
    weights = _check(weights, draws)
    drawable = np.flatnonzero(weights)
    found = np.zeros(len(weights))
    if draws >= len(drawable):
        found[drawable] = 1
        found[np.flatnonzero(weights == 0)[::-1][: draws - len(drawable)]] = 1
    elif draws:
        found[drawable] = _race(weights[drawable] / weights.sum(), draws)
    return found


def _race(rates: np.ndarray, draws: int) -> np.ndarray:
    """Inclusion probabilities of 0 < draws < n tokens of positive rates that add up to 1."""
    slowest = np.sort(rates)[-draws - 1]  # the race is over once so many have arrived
    low, high = np.log(NEGLIGIBLE), np.log((40 + np.log(len(rates))) / slowest)
    for _ in range(2):  # narrow down when the race is decided
        grid = np.linspace(low, high, NODES // 4)
        below = _arrived(rates, np.exp(grid))
        before = np.flatnonzero(1 - below[:, draws - 1] < NEGLIGIBLE)
        after = np.flatnonzero(below[:, draws] < NEGLIGIBLE)
        low, high = grid[before.max(initial=0)], grid[after.min(initial=len(grid) - 1)]
    node, weight = np.polynomial.legendre.leggauss(NODES)
    log_time, weight = (high + low) / 2 + (high - low) / 2 * node, (high - low) / 2 * weight
    time = np.exp(log_time)[:, None]
    density = rates * time * np.exp(-rates * time)
    open_for = _without_each(_arrived(rates, time[:, 0]), rates, time, draws)
    return np.clip(-np.expm1(-rates * np.exp(low)) + weight @ (density * open_for), 0, 1)


def _arrived(rates: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return the probability that at most k tokens arrived by each time, ``[times, n + 1]``."""
    n = len(rates)
    stays = np.exp(-np.outer(rates, time))
    count = np.zeros((n + 1, len(time)))
    count[0] = 1
    for index, stay in enumerate(stays):
        count[1 : index + 2] = count[1 : index + 2] * stay + count[: index + 1] * (1 - stay)
        count[0] *= stay
    return count.cumsum(0).T


def _without_each(arrived: np.ndarray, rates: np.ndarray, time: np.ndarray, draws: int) -> np.ndarray:
    """Return the probability that fewer than ``draws`` of the *other* tokens arrived, ``[times, n]``.

    Takes one token out of the count: F(k) = (1 − p) G(k) + p G(k − 1), solved for G upwards where p ≤ 1/2 and downwards
    where p > 1/2, so that errors shrink.
    """
    p = -np.expm1(-rates * time)
    n = len(rates)
    up, down = np.zeros_like(p), np.ones_like(p)
    rare, often = np.minimum(p, 0.5), np.maximum(p, 0.5)
    for k in range(draws):
        up = (arrived[:, k, None] - rare * up) / (1 - rare)
    for k in range(n - 1, draws - 1, -1):
        down = (arrived[:, k, None] - (1 - often) * down) / often
    return np.clip(np.where(p <= 0.5, up, down), 0, 1)


def count_kept(weights: np.ndarray, draws: int, seeds: int, temperature: float = 1.0) -> np.ndarray:
    """Return how often the project's ``Sample`` keeps each slot in ``seeds`` independent evictions, int64 ``[n]``."""
    weights = _check(weights, draws)
    n = len(weights)
    slots = Slots(
        keys=torch.empty(1, 1, 1, n, 0),
        values=torch.empty(1, 1, 1, n, 0),
        positions=torch.arange(n).reshape(1, 1, 1, n),
        candidates=torch.ones(1, 1, 1, n, dtype=torch.bool),
        budget=None,
        tracks={"weight": torch.from_numpy(weights).reshape(1, 1, 1, n)},
    )
    policy, kept = Sample(_Given(), temperature), torch.zeros(n, dtype=torch.int64)
    for seed in range(seeds):
        priority = policy.rank(slots, {}, Draws(seed, [0], [0], torch.device("cpu"))).priority.float()
        keep, _ = choose(priority, 0, 0, draws)
        kept[keep.flatten()] += 1
    return kept.numpy()


@dataclass(frozen=True)
class _Watched(Wrapper):
    """Remembers by what the first eviction was decided."""

    seen: list[tuple[np.ndarray, int]] = field(default_factory=list, repr=False, compare=False)

    def _composition(self) -> str:
        return self.policy.label

    def rank(self, slots: Slots, state, draws) -> Ranking:
        ranking = self.policy.rank(slots, state, draws)
        if not self.seen:
            may_go = slots.candidates.flatten()
            weights = ranking.priority.double().expand(slots.positions.shape)[:, 0, :, may_go]
            self.seen.append((weights.cpu().numpy(), slots.budget.total - int((~may_go).sum())))
        return ranking


class _Given(Policy):
    """Weights that are given with the slots."""

    weights: ClassVar[bool] = True

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.tracks["weight"])


def _check(weights: np.ndarray, draws: int) -> np.ndarray:
    weights = np.array(weights, dtype=np.float64)
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise ValueError(
            f"weights must be one row of finite numbers of at least 0, one of them above, got shape {weights.shape}, "
            f"smallest {weights.min(initial=np.inf):g}, largest {weights.max(initial=-np.inf):g}"
        )
    if not 0 <= draws <= len(weights):
        raise ValueError(f"{draws} slots cannot be drawn from {len(weights)} without replacement")
    return weights
