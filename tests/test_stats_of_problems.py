"""Accuracies, paired differences and chance, each against statsmodels, a count by hand or a simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import statsmodels.api as sm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from epiviz import stats


@pytest.mark.parametrize(("successes", "n"), [(0, 30), (30, 30), (7, 200), (1, 2)])
def test_wilson_agrees_with_statsmodels(successes, n):
    found = stats.wilson(successes, n)
    low, high = proportion_confint(successes, n, method="wilson")
    assert (found.value, found.low, found.high) == pytest.approx((successes / n, low, high), abs=1e-12)
    assert 0 <= found.low < found.high <= 1


def test_wilson_refuses_what_is_no_share():
    with pytest.raises(ValueError, match="5 successes in 4 trials"):
        stats.wilson(5, 4)
    assert np.isnan(stats.wilson(0, 0).value)


def test_clustered_errors_are_those_of_statsmodels():
    generator = np.random.default_rng(1)
    groups = generator.integers(0, 12, 70)  # clusters of different sizes
    values = generator.integers(0, 2, 70) + generator.normal(size=12)[groups]
    fit = sm.OLS(values, np.ones(70)).fit(cov_type="cluster", cov_kwds={"groups": groups}, use_t=True)
    found = stats.clustered_mean(values, groups)
    assert found.value == pytest.approx(fit.params[0])
    assert (found.low, found.high) == pytest.approx(tuple(fit.conf_int(0.05)[0]))


def test_copies_of_a_text_add_no_certainty():
    generator = np.random.default_rng(2)
    once = generator.integers(0, 2, 40)
    problems = np.arange(40)
    four = stats.accuracy(np.repeat(once, 4), np.repeat(problems, 4))
    alone = stats.accuracy(once, problems)
    assert (four.value, four.low, four.high) == pytest.approx((alone.value, alone.low, alone.high), abs=0.01)
    naive = stats.wilson(int(4 * once.sum()), 160)
    assert four.high - four.low > 1.8 * (naive.high - naive.low)


def test_accuracy_of_single_texts_is_wilsons_and_never_a_point():
    correct = np.array([True] * 9 + [False])
    assert stats.accuracy(correct, np.arange(10)) == stats.wilson(9, 10)
    none_right = stats.accuracy(np.zeros(20), np.repeat(np.arange(10), 2))
    assert none_right.high == pytest.approx(stats.wilson(0, 10).high) and none_right.high > 0.2


def test_problems_that_do_not_differ_leave_no_point():
    half = stats.accuracy([1, 0, 1, 0], [0, 0, 1, 1])
    assert (half.low, half.high) == pytest.approx(proportion_confint(1, 2, method="wilson"))
    third = stats.accuracy(np.tile([1, 0, 0], 20), np.repeat(np.arange(20), 3))
    assert third.value == pytest.approx(1 / 3)
    assert (third.low, third.high) == pytest.approx(proportion_confint(20 / 3, 20, method="wilson"))
    one = stats.accuracy([1, 0, 1], [0, 0, 0])
    assert one.low < 0.2 and one.high > 0.9, "one problem says next to nothing"


@pytest.mark.parametrize(("mean", "problems"), [(0.5, 60), (0.01, 100)])
def test_intervals_cover_the_truth_as_often_as_they_say(mean, problems):
    """Problems of random difficulty, three samples each; the truth is the mean difficulty."""
    generator = np.random.default_rng(3)
    covered, groups = 0, np.repeat(np.arange(problems), 3)
    for _ in range(400):
        difficulty = generator.beta(1.2 * mean, 1.2 * (1 - mean), problems)
        found = stats.accuracy((generator.random((problems, 3)) < difficulty[:, None]).ravel(), groups)
        covered += found.low <= mean <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_paired_differences_are_tighter_than_two_intervals():
    generator = np.random.default_rng(4)
    hard = generator.random(100)
    first = (hard < 0.7).astype(float)
    second = (hard < 0.6).astype(float)  # wrong wherever the first is, and a little more often
    found = stats.paired_difference(first, second)
    assert found.estimate.value == pytest.approx((first - second).mean()) and found.n == 100
    assert found.estimate.low > 0 and found.p < 0.01
    one, other = stats.accuracy(first, np.arange(100)), stats.accuracy(second, np.arange(100))
    assert one.low < other.high, "the two intervals overlap"


def test_p_values_are_mcnemars_for_single_texts():
    first = np.array([1] * 9 + [0] * 3 + [1] * 20, dtype=float)
    second = np.array([0] * 9 + [1] * 3 + [1] * 20, dtype=float)
    exact = mcnemar([[20, 9], [3, 0]], exact=True).pvalue
    assert stats.paired_difference(first, second).p == pytest.approx(exact)


def test_random_flips_find_the_exact_p_value():
    difference = np.array([0.5, 1.0, 0.25, -0.25, 0.75, 1.0, 0.5, -0.5])
    flips = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1).T
    exact = (np.abs(flips @ difference) >= abs(difference.sum()) - 1e-12).mean()
    assert stats.sign_flip_p(difference) == pytest.approx(exact, abs=0.01)
    assert stats.sign_flip_p(np.zeros(5)) == 1


def test_p_values_are_uniform_where_there_is_no_difference():
    generator = np.random.default_rng(5)
    small = 0
    for _ in range(300):
        first, second = generator.integers(0, 4, (2, 40)) / 3
        small += stats.sign_flip_p(first - second) < 0.1
    assert 0.05 <= small / 300 <= 0.15


def test_holm_leaves_out_comparisons_that_were_not_made():
    p = np.array([0.01, np.nan, 0.04, 0.03])
    adjusted = stats.holm(p)
    assert np.isnan(adjusted[1])
    assert adjusted[[0, 2, 3]] == pytest.approx(multipletests([0.01, 0.04, 0.03], method="holm")[1])
    assert np.isnan(stats.holm([np.nan, np.nan])).all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_counts_every_choice_of_k_samples(k):
    samples = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    by_hand = [np.mean([max(row[list(chosen)]) for chosen in combinations(range(5), k)]) for row in samples]
    assert stats.pass_at_k(samples.sum(1), np.full(4, 5), k) == pytest.approx(by_hand)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="pass@8 needs at least 8 samples of each problem, got 5"):
        stats.pass_at_k([1, 2], [5, 9], 8)
    with pytest.raises(ValueError, match="more correct samples than samples"):
        stats.pass_at_k([6], [5], 1)


def test_seed_spread_finds_the_variance_of_draws():
    """Half of the problems hang on the draw; the truth is known."""
    generator = np.random.default_rng(6)
    chance = np.repeat([0.0, 0.5, 1.0], [50, 100, 50])
    accuracies = (generator.random((4000, 200)) < chance).mean(1)
    found = stats.seed_spread(generator.random((5, 200)) < chance)
    assert found.seed_sd == pytest.approx(accuracies.std(), rel=0.2)
    assert found.problem_sd == pytest.approx(chance.std() / np.sqrt(200), rel=0.2)
    assert found.accuracies.shape == (5,)
    with pytest.raises(ValueError, match="two seeds"):
        stats.seed_spread(np.ones((1, 5)))


def test_a_policy_that_draws_nothing_has_no_spread_over_seeds():
    same = np.tile([1, 0, 1, 1, 0], (3, 1))
    assert stats.seed_spread(same).seed_sd == 0
