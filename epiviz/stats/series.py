"""Statistics of token series: rank correlation, tails and shares, with intervals that allow for dependence.

Neighbouring tokens are not independent: a number has several digits, a sentence one subject, a rolling statistic one
window. All intervals here come from a moving-block bootstrap: whole stretches of neighbouring tokens are drawn
together, so that what depends on its neighbours keeps them. An interval is only as honest as its blocks are long;
the default of 16 tokens is about a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

BLOCK = 16  # tokens
DRAWS = 1000
LEVEL = 0.95
AT_ONCE = 2**20  # indices that a bootstrap holds at a time: all draws of a long text would take gigabytes


@dataclass(frozen=True)
class Estimate:
    """A number and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{signed(self.value)} [{signed(self.low)}, {signed(self.high)}]"


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation along the last axis; ties get their mean rank.

    Parameters
    ----------
    x, y : ``[..., n]``, broadcast against each other

    Returns
    -------
    float64 ``[...]``; NaN where fewer than three values or a constant leave nothing to rank.

    Examples
    --------
    >>> round(float(spearman([1, 2, 3, 4], [10, 20, 40, 30])), 6)
    0.8
    """
    x, y = (rankdata(np.asarray(each, dtype=np.float64), axis=-1) for each in (x, y))
    if x.shape[-1] < 3:
        return np.full(np.broadcast_shapes(x.shape[:-1], y.shape[:-1]), np.nan)
    x, y = (each - each.mean(axis=-1, keepdims=True) for each in (x, y))
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(scale > 0, (x * y).sum(-1) / scale, np.nan)


def _block_starts(n: int, block: int, draws: int, seed: int) -> tuple[np.ndarray, int]:
    """Draw where each stretch begins, int64 ``[draws, stretches]``; also return how long stretches are."""
    if n < 1 or block < 1 or draws < 1:
        raise ValueError(f"a bootstrap needs n, block and draws of at least 1, got {n}, {block}, {draws}")
    block = max(1, min(block, n // 3))
    return np.random.default_rng(seed).integers(0, n - block + 1, size=(draws, -(-n // block))), block


def _indices(starts: np.ndarray, block: int, n: int) -> np.ndarray:
    """Return int64 ``[draws, n]``, each row a sequence of stretches of ``block`` neighbouring indices."""
    return (starts[..., None] + np.arange(block)).reshape(len(starts), -1)[:, :n]


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray],
    n: int,
    block: int = BLOCK,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """Return a statistic of a token series and its percentile interval from a moving-block bootstrap.

    Parameters
    ----------
    statistic : callable
        Takes int64 indices ``[draws, n]`` and returns one number for each row; NaN results are left out.
    n : int
        Length of the series.
    block : int
        Neighbours drawn together; at most a third of the series is taken, so that there is something to draw from.
    draws, seed : int
    level : float
        Coverage that the interval aims at.

    Examples
    --------
    >>> x = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    >>> bootstrap(lambda i: x[i].mean(-1), len(x), block=2).value
    3.5
    """
    value = float(statistic(np.arange(n)[None])[0])
    starts, block = _block_starts(n, block, draws, seed)
    parts = np.array_split(starts, min(draws, -(-draws * n // AT_ONCE)))
    sampled = np.concatenate([np.asarray(statistic(_indices(part, block, n)), dtype=np.float64) for part in parts])
    sampled = sampled[np.isfinite(sampled)]
    if not len(sampled) or not np.isfinite(value):
        return Estimate(value, np.nan, np.nan)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(sampled, [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


def spearman_interval(x, y, block: int = BLOCK, draws: int = DRAWS, seed: int = 0, level: float = LEVEL) -> Estimate:
    """Return Spearman's correlation of two token series with a moving-block bootstrap interval.

    Pairs are drawn, so a trend against position keeps its positions. Use blocks at least as long as the window of a
    rolling statistic.

    Examples
    --------
    >>> position = np.arange(60)
    >>> spearman_interval(position, position**2).value
    1.0
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"two series of equal length are needed, got shapes {x.shape} and {y.shape}")
    return bootstrap(lambda index: spearman(x[index], y[index]), len(x), block, draws, seed, level)


def mean_interval(
    x: np.ndarray,
    member: np.ndarray | None = None,
    block: int = BLOCK,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """Return the mean of a token series, over the members of a group if one is given, with an interval.

    Stretches of all tokens are drawn, so that the group's size varies as it would in another text.

    Examples
    --------
    >>> mean_interval(np.array([1.0, 5.0, 3.0, 9.0]), np.array([True, False, True, False])).value
    2.0
    """
    x = np.asarray(x, dtype=np.float64)
    member = np.ones(len(x), dtype=bool) if member is None else np.asarray(member, dtype=bool)
    if x.shape != member.shape:
        raise ValueError(f"x {x.shape} and member {member.shape} must have one entry per token")

    def mean(index: np.ndarray) -> np.ndarray:
        mine = member[index]
        with np.errstate(invalid="ignore"):
            return (x[index] * mine).sum(-1) / mine.sum(-1)

    return bootstrap(mean, len(x), block, draws, seed, level)


def share_ratio_interval(
    hits: np.ndarray, member: np.ndarray, block: int = BLOCK, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Estimate:
    """Return how many times more often the members are hit than all tokens together, with an interval.

    Parameters
    ----------
    hits : ``[tokens]``
        How often each token was hit.
    member : bool ``[tokens]``
        Which tokens belong to the group.

    Returns
    -------
    Estimate
        1: as often as anybody. NaN if there are no members or no hits.

    Examples
    --------
    >>> hits = np.array([4, 0, 0, 0, 4, 0, 0, 0])
    >>> share_ratio_interval(hits, np.array([1, 0, 0, 0, 1, 0, 0, 0], bool)).value
    4.0
    """
    hits, member = np.asarray(hits, dtype=np.float64), np.asarray(member, dtype=bool)
    if hits.shape != member.shape:
        raise ValueError(f"hits {hits.shape} and member {member.shape} must have one entry per token")

    def ratio(index: np.ndarray) -> np.ndarray:
        mine = member[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            return (hits[index] * mine).sum(-1) / mine.sum(-1) / hits[index].mean(-1)

    return bootstrap(ratio, len(hits), block, draws, seed, level)


def exceedance(x: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the share of values above each threshold, float64 ``[thresholds]``.

    Examples
    --------
    >>> exceedance(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.0, 4.0])).tolist()
    [1.0, 0.5, 0.0]
    """
    x = np.sort(np.asarray(x, dtype=np.float64).ravel())
    if not len(x):
        return np.full(len(thresholds), np.nan)
    return 1 - np.searchsorted(x, thresholds, side="right") / len(x)


def percentile_ranks(x: np.ndarray) -> np.ndarray:
    """Return where each value stands among its neighbours on the last axis: 0 the smallest, 1 the largest.

    Examples
    --------
    >>> percentile_ranks(np.array([30.0, 10.0, 20.0])).tolist()
    [1.0, 0.0, 0.5]
    """
    x = np.asarray(x)
    n = x.shape[-1]
    return (rankdata(x, axis=-1) - 1) / (n - 1) if n > 1 else np.full(x.shape, 0.5)


def between(values: np.ndarray) -> str:
    """Return the smallest and the largest of some counts in words.

    Examples
    --------
    >>> between([5, 3, 4]), between([6, 6])
    ('3 to 5', '6')
    """
    low, high = int(np.min(values)), int(np.max(values))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def signed(value: float) -> str:
    """Return a number with its sign and two decimals, "unknown" for NaN.

    Examples
    --------
    >>> signed(-0.5)
    '−0.50'
    >>> signed(-0.001)
    '+0.00'
    """
    return "unknown" if np.isnan(value) else f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")  # no −0.00
