"""Counter-based draws: reproducible, independent of company, and distributed as they should be."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from epiviz import draws

CPU = torch.device("cpu")


def positions(layers=3, rows=2, heads=2, n=500):
    return torch.arange(n).expand(layers, rows, heads, n)


def test_the_mixing_function_is_splitmix64():
    assert draws._mix_int(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output for seed 0
    assert draws._mix(torch.tensor([draws._signed(0x9E3779B97F4A7C15)])).item() & (2**64 - 1) == 0xE220A8397B1DCDAF


def test_a_draw_depends_on_its_key_alone():
    together = draws.Draws(1, [11, 22], [0, 3], CPU).uniform(positions())
    alone = draws.Draws(1, [22], [3], CPU).uniform(positions(rows=1)[..., 100:200])
    assert torch.equal(together[:, 1:, :, 100:200], alone)


@pytest.mark.parametrize("change", ["seed", "sample", "event", "layer", "head", "position"])
def test_every_part_of_the_key_matters(change):
    base = draws.Draws(1, [11], [0], CPU).uniform(positions(rows=1))
    if change == "layer":
        other = base.roll(1, 0)
    elif change == "head":
        other = base.roll(1, 2)
    elif change == "position":
        other = base.roll(1, 3)
    else:
        key = {"seed": 1, "sample": 11, "event": 0} | {change: 5}
        other = draws.Draws(key["seed"], [key["sample"]], [key["event"]], CPU).uniform(positions(rows=1))
    assert (base != other).all()
    assert abs(torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]) < 0.1


def test_distributions():
    source = draws.Draws(7, [1, 2], [0, 0], CPU)
    assert stats.kstest(source.uniform(positions()).flatten().numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(source.gumbel(positions()).flatten().numpy(), "gumbel_r").pvalue > 1e-3
    assert stats.kstest(source.normal(3, 64, 20).flatten().numpy(), "norm").pvalue > 1e-3
    step = draws.token_uniform(0, range(5000), range(5000), CPU)
    assert stats.kstest(step.numpy(), "uniform").pvalue > 1e-3 and step.min() > 0 and step.max() < 1


def test_projections_are_one_per_sample_layer_and_event():
    first = draws.Draws(0, [1, 2], [0, 0], CPU).normal(3, 8, 4)
    later = draws.Draws(0, [1, 2], [1, 1], CPU)
    assert first.shape == (3, 2, 8, 4)
    assert (first != later.normal(3, 8, 4)).all()
    assert torch.equal(first, later.normal(3, 8, 4, fixed=True))


def test_sample_keys_number_equal_prompts():
    keys = draws.sample_keys([[1, 2], [3], [1, 2]])
    assert len(set(keys)) == 3
    assert draws.sample_keys([[3], [1, 2], [1, 2]]) == [keys[1], keys[0], keys[2]]
