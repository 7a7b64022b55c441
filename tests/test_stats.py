import numpy as np
import pytest
from scipy.stats import spearmanr

from epiviz import stats


def smoothed_noise(n, width, seed):
    """A series whose neighbours share ``width`` − 1 of their terms."""
    noise = np.random.default_rng(seed).normal(size=n + width - 1)
    return np.convolve(noise, np.ones(width), mode="valid")


def test_spearman_agrees_with_scipy_also_with_ties():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 5, (2, 40)).astype(float)
    assert stats.spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)


def test_spearman_works_on_rows():
    x = np.arange(5.0)
    assert stats.spearman(x, np.stack([x, -x, x**3])).tolist() == pytest.approx([1, -1, 1])


@pytest.mark.parametrize("y", [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0]], ids=["constant", "two values"])
def test_spearman_is_unknown_where_nothing_can_be_ranked(y):
    assert np.isnan(stats.spearman(np.arange(len(y)), np.array(y)))


def block_indices(n: int, block: int, draws: int, seed: int = 0) -> np.ndarray:
    starts, block = stats.series._block_starts(n, block, draws, seed)
    return stats.series._indices(starts, block, n)


def test_blocks_are_stretches_of_neighbours():
    index = block_indices(100, block=10, draws=50, seed=1)
    assert index.shape == (50, 100)
    assert index.min() >= 0
    assert index.max() <= 99
    assert (np.diff(index.reshape(50, 10, 10), axis=-1) == 1).all()


def test_a_short_series_gets_shorter_blocks():
    steps = np.diff(block_indices(9, block=16, draws=20), axis=-1)
    assert (steps != 1).any()


def test_the_bootstrap_repeats_with_its_seed():
    position, x = np.arange(80), smoothed_noise(80, 5, 2)
    first, again, other = (stats.spearman_interval(position, x, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert first.low <= first.value <= first.high


def test_blocks_widen_the_interval_of_a_dependent_series():
    x = smoothed_noise(400, 20, 5)
    single, blocks = (stats.bootstrap(lambda index: x[index].mean(-1), len(x), block=block) for block in (1, 40))
    assert blocks.high - blocks.low > 2 * (single.high - single.low)


def test_block_intervals_cover_a_trend_that_is_not_there():
    position = np.arange(300)
    covered = {1: 0, 30: 0}
    for seed in range(60):
        x = smoothed_noise(300, 10, 100 + seed)
        for block in covered:
            interval = stats.spearman_interval(position, x, block=block, draws=200, seed=seed)
            covered[block] += interval.low <= 0 <= interval.high
    assert covered[30] > covered[1]
    assert covered[30] >= 0.75 * 60


def test_an_unknown_statistic_has_no_interval():
    estimate = stats.spearman_interval(np.arange(30), np.ones(30))
    assert np.isnan([estimate.value, estimate.low, estimate.high]).all()


def test_series_must_be_equally_long():
    with pytest.raises(ValueError, match="equal length"):
        stats.spearman_interval(np.arange(4), np.arange(5))


def test_a_group_that_is_hit_like_all_others_has_ratio_one():
    hits = np.ones(60)
    estimate = stats.share_ratio_interval(hits, np.arange(60) % 3 == 0)
    assert (estimate.value, estimate.low, estimate.high) == (1, 1, 1)


def test_a_group_without_members_has_no_ratio():
    assert np.isnan(stats.share_ratio_interval(np.ones(10), np.zeros(10, bool)).value)


def test_percentile_ranks_share_ties():
    assert stats.percentile_ranks(np.array([[1.0, 1.0, 3.0], [3.0, 2.0, 1.0]])).tolist() == [
        [0.25, 0.25, 1],
        [1, 0.5, 0],
    ]


def test_an_estimate_reads_well():
    assert str(stats.Estimate(-0.214, -0.3, 0.0)) == "−0.21 [−0.30, +0.00]"
