"""Statistics of problems solved: accuracies, paired differences and what chance adds to them.

The problems are the sample: samples and seeds of one problem are more alike than those of two, so that they are a
cluster and never count as independent (Miller, arXiv 2411.00640). Methods are compared on the same problems, pair by
pair, because the intervals of two accuracies overlap long before their difference is doubtful.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special
from scipy import stats as scipy_stats

from epiviz.stats.series import DRAWS, LEVEL, Estimate, bootstrap

FLIPS = 9_999  # random signs behind a p value


def wilson(successes: int, n: int, level: float = LEVEL) -> Estimate:
    """Return a share of independent trials and Wilson's interval, which stays in [0, 1] and never shrinks to a point.

    Raises
    ------
    ValueError
        There are more successes than trials, or fewer than none.

    Examples
    --------
    >>> print(wilson(0, 30))
    +0.00 [+0.00, +0.11]
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials are no share")
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan)
    low, high = scipy_stats.binomtest(successes, n).proportion_ci(level, method="wilson")
    return Estimate(successes / n, float(low), float(high))


def clustered_mean(values: np.ndarray, clusters: np.ndarray, level: float = LEVEL) -> Estimate:
    """Return a mean over all values with an interval from cluster-robust standard errors.

    Parameters
    ----------
    values : ``[n]``
    clusters : ``[n]``
        Which values belong together: the problem of each.
    level : float
        Coverage; Student's t with as many degrees of freedom as there are clusters, less one.

    Returns
    -------
    Estimate
        Without an interval where there is one cluster only.

    Examples
    --------
    >>> print(clustered_mean([1, 1, 0, 0, 1, 0], ["a", "a", "b", "b", "c", "c"]))
    +0.50 [−0.74, +1.74]
    """
    values = np.asarray(values, dtype=np.float64)
    groups = np.unique(np.asarray(clusters), return_inverse=True)[1]
    if values.shape != groups.shape or values.ndim != 1:
        raise ValueError(f"values {values.shape} and clusters {groups.shape} must be two series of equal length")
    if not len(values):
        return Estimate(np.nan, np.nan, np.nan)
    if groups.max() == 0:
        return Estimate(float(values.mean()), np.nan, np.nan)
    mean = float(values.mean())
    half = float(scipy_stats.t.ppf((1 + level) / 2, groups.max()) * _clustered_error(values, groups))
    return Estimate(mean, mean - half, mean + half)


def accuracy(correct: np.ndarray, problems: np.ndarray, level: float = LEVEL) -> Estimate:
    """Return the share of correct texts with an interval that takes the problems as the sample.

    Wilson's. Where problems have several texts, it is that of as many independent texts as would give the clustered
    standard error: it stays in [0, 1] and covers the truth near 0 and 1 too, where a symmetric one is too short. Where
    no two problems differ there is no such error to tell it from, and every problem counts as one text.

    Parameters
    ----------
    correct : bool ``[texts]``
    problems : ``[texts]``
        The problem of each text.

    Examples
    --------
    >>> print(accuracy([1, 0, 1, 0], ["a", "a", "b", "b"]))
    +0.50 [+0.09, +0.91]
    """
    correct = np.asarray(correct, dtype=np.float64)
    groups = np.unique(np.asarray(problems), return_inverse=True)[1]
    n = int(groups.max()) + 1 if len(groups) else 0
    if n == len(correct):
        return wilson(int(correct.sum()), n, level)
    share, error = float(correct.mean()), _clustered_error(correct, groups)
    means = np.bincount(groups, correct) / np.bincount(groups)
    if np.ptp(means) < 1e-12:
        size, quantile = n, scipy_stats.norm.ppf((1 + level) / 2)
    else:
        size = min(share * (1 - share) / error**2, len(correct))
        quantile = scipy_stats.t.ppf((1 + level) / 2, n - 1)
    shrunk = 1 / (1 + quantile**2 / size)
    middle = (share + quantile**2 / (2 * size)) * shrunk
    half = quantile * np.sqrt(share * (1 - share) / size + quantile**2 / (4 * size**2)) * shrunk
    return Estimate(share, max(0.0, float(middle - half)), min(1.0, float(middle + half)))


def _clustered_error(values: np.ndarray, groups: np.ndarray) -> float:
    """Return the standard error of the mean of values in clusters 0, 1, …; NaN where there is one cluster only."""
    many = int(groups.max()) + 1
    if many == 1:
        return np.nan
    sums = np.bincount(groups, values - values.mean())  # values of a cluster err together: their sum is what varies
    return float(np.sqrt(many / (many - 1) * (sums**2).sum()) / len(values))


@dataclass(frozen=True)
class PairedDifference:
    """A mean difference over problems, its interval, and how likely one so large would be if signs were chance.

    Attributes
    ----------
    estimate : Estimate
    p : float
    n : int
        Problems.
    """

    estimate: Estimate
    p: float
    n: int


def paired_difference(
    first: np.ndarray, second: np.ndarray, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> PairedDifference:
    """Return the mean of first − second over problems, with a bootstrap interval over problems and a p value.

    The p value flips the sign of each problem's difference: exactly, as McNemar's test, where each problem has one
    text; by random flips otherwise.

    Parameters
    ----------
    first, second : ``[problems]``
        Share correct of each problem; means over its samples and seeds.
    draws, seed, level
        As in :func:`~epiviz.stats.series.bootstrap`.

    Examples
    --------
    >>> found = paired_difference([1, 1, 1, 0], [0, 0, 0, 0])
    >>> found.estimate.value, found.p
    (0.75, 0.25)
    """
    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"two series over the same problems are needed, got shapes {first.shape} and {second.shape}")
    difference = first - second
    if not len(difference):
        return PairedDifference(Estimate(np.nan, np.nan, np.nan), np.nan, 0)
    estimate = bootstrap(lambda index: difference[index].mean(-1), len(difference), 1, draws, seed, level)
    return PairedDifference(estimate, sign_flip_p(difference, seed), len(difference))


def sign_flip_p(difference: np.ndarray, seed: int = 0) -> float:
    """Return the two-sided p value of a mean difference when the sign of each may be flipped.

    Examples
    --------
    >>> sign_flip_p(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    0.0625
    """
    changed = difference[difference != 0]
    if not len(changed):
        return 1.0
    if len(np.unique(np.abs(changed))) == 1:  # equal sizes: the number of positive ones decides, and is binomial
        return float(scipy_stats.binomtest(int((changed > 0).sum()), len(changed)).pvalue)
    signs = np.random.default_rng(seed).integers(0, 2, (FLIPS, len(changed))) * 2 - 1
    as_far = np.abs(signs @ changed) >= abs(changed.sum()) - 1e-12
    return float((as_far.sum() + 1) / (FLIPS + 1))


def holm(p: np.ndarray) -> np.ndarray:
    """Return p values that allow for having made all of these comparisons (Holm); NaN, no comparison, stays NaN.

    Examples
    --------
    >>> holm([0.01, float("nan"), 0.04]).tolist()
    [0.02, nan, 0.04]
    """
    # By hand: statsmodels' multipletests collects garbage at each call, which takes half a second in a notebook.
    p = np.asarray(p, dtype=np.float64)
    adjusted, order = np.full(p.shape, np.nan), np.argsort(p)[: np.isfinite(p).sum()]  # NaN sorts last
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted


def pass_at_k(correct: np.ndarray, n: np.ndarray, k: int) -> np.ndarray:
    """Return, per problem, the chance that at least one of ``k`` samples is correct, without bias.

    1 − C(n − c, k) / C(n, k) for c correct of n samples (Chen et al., arXiv 2107.03374, section 2.1). Its mean over
    problems is pass@k. The mean of c / n is avg@n, which :func:`accuracy` gives.

    Parameters
    ----------
    correct, n : int ``[problems]``
    k : int

    Raises
    ------
    ValueError
        A problem has fewer than k samples, or more correct than samples.

    Examples
    --------
    >>> pass_at_k([0, 1, 4], [4, 4, 4], 2).tolist()
    [0.0, 0.5, 1.0]
    """
    correct, n = np.asarray(correct), np.asarray(n)
    if k < 1 or (n < k).any():
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples of each problem, got {int(n.min())}")
    if ((correct < 0) | (correct > n)).any():
        raise ValueError("a problem has more correct samples than samples, or fewer than none")
    return 1 - special.comb(n - correct, k) / special.comb(n, k)


@dataclass(frozen=True)
class SeedSpread:
    """How far the accuracy of a stochastic policy moves, and why.

    Attributes
    ----------
    seeds, problems : int
    accuracies : float ``[seeds]``
    seed_sd : float
        Standard deviation of the accuracy over seeds, on the same problems.
    problem_sd : float
        Over other sets of as many problems, if a policy could be run so often that no draw mattered.
    """

    seeds: int
    problems: int
    accuracies: np.ndarray
    seed_sd: float
    problem_sd: float


def seed_spread(correct: np.ndarray) -> SeedSpread:
    """Split the variance of an accuracy into that of the draws and that of the problems.

    The seeds' few accuracies say little about their spread. Each problem's own spread over seeds says more: draws of
    two problems are independent, so that the variance of the mean is the mean of the variances ÷ problems.

    Parameters
    ----------
    correct : ``[seeds, problems]``
        Whether, or how often, each seed solved each problem.

    Raises
    ------
    ValueError
        Fewer than two seeds or problems.

    Examples
    --------
    >>> spread = seed_spread([[1, 0, 1, 1], [1, 0, 0, 1]])
    >>> round(spread.seed_sd, 3), spread.accuracies.tolist()
    (0.177, [0.75, 0.5])
    """
    correct = np.asarray(correct, dtype=np.float64)
    if correct.ndim != 2 or min(correct.shape) < 2:
        raise ValueError(f"at least two seeds and two problems are needed, got {correct.shape}")
    seeds, problems = correct.shape
    within = correct.var(0, ddof=1).mean()
    between = max(0.0, correct.mean(0).var(ddof=1) - within / seeds)
    return SeedSpread(
        seeds, problems, correct.mean(1), float(np.sqrt(within / problems)), float(np.sqrt(between / problems))
    )
