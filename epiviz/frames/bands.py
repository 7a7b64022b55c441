"""Which tokens make which layers move: what the two bands of the epiphany score answer to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import signals, stats
from epiviz.frames.traces import token_classes
from epiviz.token_classes import CLASSES

if TYPE_CHECKING:
    from epiviz.trace import Trace

DRAWS = 300


def band_anatomy(
    trace: Trace, window: int = signals.WINDOW, block: int = stats.BLOCK, draws: int = DRAWS, seed: int = 0
) -> pd.DataFrame:
    """Return the mean z-score of the displacement of every layer in every class of generated tokens.

    Parameters
    ----------
    trace : Trace
    window : int
        Of the causal z-score.
    block, draws, seed : int
        Of the moving-block bootstrap over tokens behind the intervals.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``class``, ``tokens``, ``zscore`` (standard deviations) with ``low`` and ``high``. By its
        construction a layer's z-scores are near 0 over all tokens together: classes differ, or nothing does.
    """
    moves = {layer: signals.trace_zscore(trace, layer, window) for layer in range(trace.displacement.shape[0])}
    found = _by_class(trace, moves, block, draws, seed)
    return found.rename(columns={"part": "layer", "mean": "zscore"})


def score_anatomy(
    trace: Trace,
    layers: tuple[int, int] | None = None,
    window: int = signals.WINDOW,
    block: int = stats.BLOCK,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Return what the epiphany score of each class of generated tokens is made of (EpiKV, section 3).

    Parameters
    ----------
    trace : Trace
    layers : (int, int), optional
        Of the score; 10 and 21 of 32, scaled to the model's depth, if not given.
    window, block, draws, seed : int
        As in :func:`band_anatomy`.

    Returns
    -------
    pandas.DataFrame
        ``part`` ("layer …", twice, and "score", their difference), ``class``, ``tokens``, ``mean`` (standard
        deviations) with ``low`` and ``high``. Classes with the highest mean score come first.
    """
    low, high = layers or signals.reference_layers(trace.displacement.shape[0])
    parts = {f"layer {layer}": signals.trace_zscore(trace, layer, window) for layer in (low, high)}
    parts["score"] = signals.epiphany(trace, (low, high), window)
    found = _by_class(trace, parts, block, draws, seed)
    order = found[found["part"] == "score"].sort_values("mean", ascending=False)["class"].tolist()
    return found.sort_values("class", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)


def _by_class(trace: Trace, series: dict[object, np.ndarray], block: int, draws: int, seed: int) -> pd.DataFrame:
    """The mean of each series over each class of generated tokens, with intervals."""
    classes = token_classes(trace)[trace.prompt_length :]
    rows = []
    for part, values in series.items():
        for name in CLASSES:
            member = classes == name
            if member.any():
                mean = stats.mean_interval(values[trace.prompt_length :], member, block, draws, seed)
                rows.append((part, name, int(member.sum()), mean.value, mean.low, mean.high))
    if not rows:
        raise ValueError(f"the trace {trace.name!r} has no token after its prompt of {trace.prompt_length}")
    return pd.DataFrame(rows, columns=["part", "class", "tokens", "mean", "low", "high"])
