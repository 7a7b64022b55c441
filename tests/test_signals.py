"""Signals against hand-computed values and against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epiviz import signals

G_LOW = torch.tensor([5.0, 1, 4, 2, 8, 3, 6, 7])
G_HIGH = torch.tensor([2.0, 2, 9, 1, 1, 5, 3, 4])


def test_displacement_needs_a_predecessor():
    states = torch.tensor([[3.0, 4], [3, 4], [0, 0], [6, 8]])
    assert signals.displacement(states, torch.zeros(2)).tolist() == [5, 0, 5, 10]
    assert signals.displacement(states).tolist() == [0, 0, 5, 10]


def test_displacement_differences_are_taken_in_float32():
    """bfloat16 steps are 0.0625 near 9.6: a difference computed in it would be rounded."""
    a, b = torch.tensor([[9.6, 0.3]], dtype=torch.bfloat16), torch.tensor([9.2, 0.1], dtype=torch.bfloat16)
    exact = (a[0].float() - b.float()).norm()
    assert signals.displacement(a, b).item() == exact.item()
    assert signals.displacement(a, b).dtype == torch.float32


def test_rolling_mean():
    x = torch.tensor([1.0, 2, 3, 4])
    assert signals.rolling_mean(x, 64)[-1] == 2.5
    assert signals.rolling_mean(x, 2)[-1] == 3.5
    assert signals.rolling_mean(x[:0], 2).shape == (0,)


def test_causal_zscore():
    z = signals.causal_zscore(torch.tensor([3.0, 5, 4, 8]))
    assert z.numpy() == pytest.approx([0, 0.999999, 0, 1.603567], abs=1e-6)
    assert signals.causal_zscore(torch.tensor([1.0, 2, 3, 10]), 2)[-1].item() == pytest.approx(1.0, abs=1e-5)
    assert signals.causal_zscore(torch.tensor([1.0, 1, 1]))[-1] == 0
    assert signals.causal_zscore(torch.tensor([0, 1e-7], dtype=torch.float64))[-1].item() == pytest.approx(
        0.0476190, abs=1e-7
    )


def test_zscore_is_bounded_by_the_window():
    x = torch.zeros(64, dtype=torch.float64)
    x[-1] = 1e9
    assert signals.causal_zscore(x)[-1].item() == pytest.approx(63**0.5)


def test_exponential_mean():
    s = signals.exponential_mean(torch.tensor([1.0, 1, 1, 10]))
    assert s.numpy() == pytest.approx([0.1, 0.19, 0.271, 1.2439])


def test_epiphany_scores_of_the_reference_case():
    score = signals.causal_zscore(G_LOW) - signals.causal_zscore(G_HIGH)
    expected = [0, -1, -1.0220, 0.1484, 2.2924, -0.9488, 0.9398, 0.8408]
    assert score.numpy() == pytest.approx(expected, abs=1e-4)


def test_rolling_mean_difference_of_the_reference_case():
    score = signals.rolling_mean(G_LOW) - signals.rolling_mean(G_HIGH)
    assert score.numpy() == pytest.approx([3, 1, -1, -0.5, 1, 0.5, 0.8571, 1.125], abs=1e-4)


def test_value_statistics():
    v = torch.tensor([1.0, -1, 3, 0])
    assert signals.value_range(v) == 4
    assert signals.channel_variance(v).item() == pytest.approx(2.916667)
    assert signals.channel_norm(v).item() == pytest.approx(3.316625)
    assert signals.channel_variance(torch.tensor([1.0, 2, 3, 4])).item() == pytest.approx(1.666667)


def test_rotation_changes_a_keys_variance_by_its_mean_alone():
    """Half-split pairs of (1, 2, 3, 4) turned by 90°; the variance is (‖k‖² − d · mean²) / (d − 1) either way."""
    for key, variance in (([1.0, 2, 3, 4], 1.666667), ([-3.0, -4, 1, 2], 8.666667)):
        key = torch.tensor(key)
        assert signals.channel_variance(key).item() == pytest.approx(variance)
        assert signals.channel_norm(key).square().item() == pytest.approx(30)
        assert (30 - 4 * key.mean().square()) / 3 == pytest.approx(variance)


def test_value_range_of_half_precision_is_exact():
    v = torch.tensor([300.0, -300.25], dtype=torch.float16)
    assert signals.value_range(v).item() == 300 + 300.25 and signals.value_range(v).dtype == torch.float32


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=90), st.integers(2, 20), st.data())
def test_zscore_in_pieces_equals_the_whole_and_a_plain_loop(values, window, data):
    x = torch.tensor(values, dtype=torch.float64)
    whole = signals.causal_zscore(x, window)
    for t, z in enumerate(whole.tolist()):
        w = np.array(values[max(0, t + 1 - window) : t + 1])
        expected = 0.0 if len(w) < 2 else (values[t] - w.mean()) / (w.std() + 1e-6)
        assert z == pytest.approx(expected, abs=1e-6, rel=1e-6)
    cut = data.draw(st.integers(0, len(values)))
    history = signals.rolling_windows(x[:cut], window)[-1, 1:] if cut else None
    pieces = torch.cat([signals.causal_zscore(x[:cut], window), signals.causal_zscore(x[cut:], window, history)])
    assert torch.allclose(pieces, whole, rtol=1e-9, atol=1e-9)  # sums of 64 numbers, in another order


def test_reference_layers_scale_with_depth():
    assert signals.reference_layers(32) == (10, 21)
    assert signals.reference_layers(30) == (9, 20)
    assert signals.reference_bands(32) == ((7, 13), (18, 25))
    with pytest.raises(ValueError, match="both fall on layer 1 of a model with 2 layers"):
        signals.reference_layers(2)


def test_prompt_and_continuation_have_windows_of_their_own(synthetic_trace):
    trace = synthetic_trace
    score = signals.epiphany(trace, layers=(1, 3))
    z = [
        np.concatenate(
            [
                signals.causal_zscore(torch.from_numpy(part)).numpy()
                for part in np.split(trace.displacement[layer], [20])
            ]
        )
        for layer in (1, 3)
    ]
    assert np.array_equal(score, z[0] - z[1])
    assert score[0] == 0 and score[20] == 0 and score.dtype == np.float32
