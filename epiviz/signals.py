"""Signals of a trace: pure functions of hidden states and values.

The conventions are EpiKV's (arXiv 2606.26472): layer ``l`` is the output of decoder block ``l`` (0-based), the
displacement of a token is the jump from its predecessor to itself, and every statistic is causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from epiviz.trace import Trace

WINDOW = 64  # trailing values of the rolling statistics, the current one included (EpiKV, section 3)
EPSILON = 1e-6  # added to the standard deviation (EpiKV, section 3)
REFERENCE_DEPTH = 32  # the depth for which the papers name layers
REFERENCE_LAYERS = (10, 21)
REFERENCE_BANDS = ((7, 13), (18, 25))


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32, or unchanged if it is float64: scores are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


SCORE_DTYPES = ("float32", "bfloat16")


def in_score_dtype(x: torch.Tensor, score_dtype: str = "float32") -> torch.Tensor:
    """Return ``x`` in the precision of a score: at least float32, or bfloat16 as in public code."""
    return x.bfloat16() if score_dtype == "bfloat16" else at_least_float32(x)


def reference_layers(layers: int, reference: tuple[int, int] = REFERENCE_LAYERS) -> tuple[int, int]:
    """Scale two layer numbers of a 32-layer model to a model of ``layers`` blocks.

    Raises
    ------
    ValueError
        The two fall on the same layer (the model is too shallow to subtract one from the other).

    Examples
    --------
    >>> reference_layers(32), reference_layers(30), reference_layers(36)
    ((10, 21), (9, 20), (11, 24))
    """
    low, high = (int(np.floor(layers * layer / REFERENCE_DEPTH + 0.5)) for layer in reference)
    high = min(high, layers - 1)
    if low == high:
        raise ValueError(
            f"layers {reference[0]} and {reference[1]} of {REFERENCE_DEPTH} both fall on layer {low} of a model with "
            f"{layers} layers; name two different layers explicitly"
        )
    return low, high


def reference_bands(layers: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Scale the bands 7–13 and 18–25 of 32 layers (EpiKV, section 4) to ``layers`` blocks, both ends included."""
    return tuple(reference_layers(layers, band) for band in REFERENCE_BANDS)  # type: ignore[return-value]


def reference_marks(layers: int) -> tuple[tuple, tuple]:
    """Return the reference bands and the reference layers for a view to mark, each empty if the model is too shallow.

    Examples
    --------
    >>> reference_marks(32), reference_marks(2)
    ((((7, 13), (18, 25)), (10, 21)), ((), ()))
    """
    marks = []
    for reference in (reference_bands, reference_layers):
        try:
            marks.append(reference(layers))
        except ValueError:
            marks.append(())
    return tuple(marks)


def displacement(
    hidden: torch.Tensor, previous: torch.Tensor | None = None, score_dtype: str = "float32"
) -> torch.Tensor:
    """Return how far the residual stream moves at each token, ``‖h(t) − h(t−1)‖₂`` (EpiKV, section 3).

    Parameters
    ----------
    hidden : ``[..., tokens, channels]``
        Residual stream after one block.
    previous : ``[..., channels]``, optional
        The state before the first token. Without it the first displacement is 0.
    score_dtype : {"float32", "bfloat16"}
        Precision of differences and norms; bfloat16 norms near 10 move in steps of 0.0625.

    Returns
    -------
    ``[..., tokens]``, at least float32.
    """
    hidden = in_score_dtype(hidden, score_dtype)
    first = hidden[..., :1, :] if previous is None else in_score_dtype(previous, score_dtype).unsqueeze(-2)
    steps = torch.diff(hidden, dim=-2, prepend=first)
    return at_least_float32(torch.linalg.vector_norm(steps, dim=-1))


def rolling_windows(x: torch.Tensor, window: int = WINDOW, history: torch.Tensor | None = None) -> torch.Tensor:
    """Return each value's trailing window, ``[..., tokens, window]``, in float64; slots before the start are NaN.

    ``history`` ``[..., window − 1]`` holds the values before the first one, NaN where there were none.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    x = x.double()
    if history is None:
        history = x.new_full((*x.shape[:-1], window - 1), float("nan"))
    if x.shape[-1] == 0:
        return x.new_empty(*x.shape, window)
    return torch.cat([history.double(), x], dim=-1).unfold(-1, window, 1)


def rolling_mean(x: torch.Tensor, window: int = WINDOW, history: torch.Tensor | None = None) -> torch.Tensor:
    """Return the causal rolling mean of ``x`` ``[..., tokens]`` over the last ``window`` values, the current included.

    Examples
    --------
    >>> rolling_mean(torch.tensor([1.0, 2.0, 3.0, 4.0]), window=2).tolist()
    [1.0, 1.5, 2.5, 3.5]
    """
    return torch.nanmean(rolling_windows(x, window, history), dim=-1).to(at_least_float32(x).dtype)


def causal_zscore(x: torch.Tensor, window: int = WINDOW, history: torch.Tensor | None = None) -> torch.Tensor:
    """Return the causal z-score of ``x`` ``[..., tokens]`` (EpiKV, section 3).

    Mean and *population* standard deviation run over the last ``window`` values, the current one included;
    ``z = (x − mean) / (sd + 10⁻⁶)``, and 0 where the window holds fewer than two values.

    Examples
    --------
    >>> [round(z, 6) for z in causal_zscore(torch.tensor([3.0, 5.0, 4.0, 8.0])).tolist()]
    [0.0, 0.999999, 0.0, 1.603567]
    """
    windows = rolling_windows(x, window, history)
    known = ~windows.isnan()
    mean = torch.nanmean(windows, dim=-1)
    squares = torch.where(known, (windows - mean.unsqueeze(-1)).square(), 0.0)
    count = known.sum(-1)
    deviation = (squares.sum(-1) / count).sqrt()
    z = (x.double() - mean) / (deviation + EPSILON)
    return torch.where(count < 2, 0.0, z).to(at_least_float32(x).dtype)


def exponential_mean(x: torch.Tensor, decay: float = 0.9) -> torch.Tensor:
    """Return ``s_t = decay · s_{t−1} + (1 − decay) · x_t``, ``s_{−1} = 0``, no bias correction (EpiKV, section 4).

    Examples
    --------
    >>> [round(s, 4) for s in exponential_mean(torch.tensor([1.0, 1.0, 1.0, 10.0])).tolist()]
    [0.1, 0.19, 0.271, 1.2439]
    """
    out, state = [], torch.zeros_like(at_least_float32(x)[..., 0])
    for value in at_least_float32(x).unbind(-1):
        state = decay * state + (1 - decay) * value
        out.append(state)
    return torch.stack(out, dim=-1)


def value_range(values: torch.Tensor) -> torch.Tensor:
    """Return max − min over the channels of value states ``[..., channels]`` (VaSE, section 3), at least float32."""
    low, high = torch.aminmax(at_least_float32(values), dim=-1)
    return high - low


def channel_variance(x: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance over the channels of ``[..., channels]``, at least float32."""
    return at_least_float32(x).var(dim=-1, correction=1)


def channel_norm(x: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm over the channels of ``[..., channels]``, at least float32."""
    return torch.linalg.vector_norm(at_least_float32(x), dim=-1)


def per_part(x: np.ndarray, prompt_length: int, function) -> np.ndarray:
    """Apply a causal function of ``[..., tokens]`` to prompt and generated part apart, each on a window of its own."""
    x = torch.from_numpy(np.ascontiguousarray(x))
    parts = [function(part) for part in (x[..., :prompt_length], x[..., prompt_length:]) if part.shape[-1]]
    return torch.cat(parts, dim=-1).numpy()


def trace_zscore(trace: Trace, layer: int, window: int = WINDOW) -> np.ndarray:
    """Return the causal z-score of one layer's displacement along a trace, float32 ``[tokens]``.

    The generated part's window starts empty at its first token; the prompt has a window of its own.
    """
    return per_part(trace.displacement[layer], trace.prompt_length, lambda x: causal_zscore(x, window))


def trace_rolling_mean(trace: Trace, layer: int, window: int = WINDOW) -> np.ndarray:
    """Return the causal rolling mean of one layer's displacement along a trace, float32 ``[tokens]``."""
    return per_part(trace.displacement[layer], trace.prompt_length, lambda x: rolling_mean(x, window))


def epiphany(trace: Trace, layers: tuple[int, int] | None = None, window: int = WINDOW) -> np.ndarray:
    """Return the epiphany score ``z_low(t) − z_high(t)`` of every token, float32 ``[tokens]`` (EpiKV, section 3).

    Parameters
    ----------
    trace : Trace
    layers : (int, int), optional
        The middle and the upper-middle layer; 10 and 21 of 32, scaled to the model's depth, if not given.
    window : int
        Length of the causal window.
    """
    low, high = layers or reference_layers(trace.displacement.shape[0])
    return trace_zscore(trace, low, window) - trace_zscore(trace, high, window)
