"""What a trace tells token by token: scores, displacements and their trends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import signals, stats
from epiviz.text import in_context
from epiviz.token_classes import SINKS, classify

if TYPE_CHECKING:
    from epiviz.trace import Trace


def token_classes(trace: Trace, sinks: int = SINKS) -> np.ndarray:
    """Return the class of every token of a trace: see :func:`epiviz.token_classes.classify`."""
    return classify(trace.spans, trace.prompt_length, sinks)


def scores(trace: Trace, layers: tuple[int, int] | None = None, window: int = signals.WINDOW) -> pd.DataFrame:
    """Return the epiphany score of every token.

    Returns
    -------
    pandas.DataFrame
        ``position``, ``token`` (text), ``part`` ("prompt" or "generated"), ``class``, ``score``, ``surprisal`` (nats).
    """
    return _tokens(trace).assign(
        **{
            "class": token_classes(trace),
            "score": signals.epiphany(trace, layers, window),
            "surprisal": trace.surprisal,
        }
    )


def displacements(trace: Trace, layers: Sequence[int] | None = None, window: int = signals.WINDOW) -> pd.DataFrame:
    """Return displacement, causal rolling mean and causal z-score of every token, one row for each layer.

    Parameters
    ----------
    trace : Trace
    layers : sequence of int, optional
        The two layers of the epiphany score if not given.
    window : int

    Returns
    -------
    pandas.DataFrame
        ``position``, ``token``, ``part``, ``layer``, ``displacement``, ``rolling_mean``, ``zscore``.
    """
    layers = signals.reference_layers(trace.displacement.shape[0]) if layers is None else layers
    return pd.concat(
        [
            _tokens(trace).assign(
                layer=int(layer),
                displacement=trace.displacement[layer],
                rolling_mean=signals.trace_rolling_mean(trace, layer, window),
                zscore=signals.trace_zscore(trace, layer, window),
            )
            for layer in layers
        ],
        ignore_index=True,
    )


def top_tokens(trace: Trace, score: np.ndarray, n: int = 5, around: int = 8, generated: bool = True) -> pd.DataFrame:
    """Return the ``n`` tokens with the highest score, highest first, each in its context.

    Parameters
    ----------
    trace : Trace
    score : ``[tokens]``
    n, around : int
    generated : bool
        Leave the prompt out.

    Returns
    -------
    pandas.DataFrame
        ``position``, ``class``, ``score``, ``context``.
    """
    score = np.array(score, dtype=np.float64)
    if generated:
        score[: trace.prompt_length] = np.nan
    order = np.argsort(np.where(np.isnan(score), -np.inf, score), kind="stable")[::-1][:n]
    order = order[~np.isnan(score[order])]
    return pd.DataFrame(
        {
            "position": order,
            "class": token_classes(trace)[order],
            "score": score[order],
            "context": [in_context(trace.spans, int(index), around) for index in order],
        }
    )


def positional_trend(
    trace: Trace,
    layers: Sequence[int] | None = None,
    window: int = signals.WINDOW,
    block: int = stats.BLOCK,
    draws: int = 300,
    seed: int = 0,
) -> pd.DataFrame:
    """Return how strongly each layer's signal follows the position, before and after the z-score.

    Spearman's correlation over the generated part, with moving-block bootstrap intervals (see :mod:`epiviz.stats`).

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``signal`` ("displacement" or "z-score"), ``rho``, ``low``, ``high``, ``tokens``.
    """
    start, n = trace.prompt_length, len(trace) - trace.prompt_length
    position = np.arange(n)
    rows = []
    for layer in range(trace.displacement.shape[0]) if layers is None else layers:
        before, after = trace.displacement[layer, start:], signals.trace_zscore(trace, layer, window)[start:]
        for name, x in (("displacement", before), ("z-score", after)):
            rho = stats.spearman_interval(position, x, block, draws, seed)
            rows.append((int(layer), name, rho.value, rho.low, rho.high, n))
    return pd.DataFrame(rows, columns=["layer", "signal", "rho", "low", "high", "tokens"])


def _tokens(trace: Trace) -> pd.DataFrame:
    position = np.arange(len(trace))
    return pd.DataFrame(
        {
            "position": position,
            "token": trace.spans.pieces,
            "part": np.where(position < trace.prompt_length, "prompt", "generated"),
        }
    )
