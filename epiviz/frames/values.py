"""Value ranges: their distribution, their tail, and who carries the large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import stats
from epiviz.frames.traces import token_classes
from epiviz.text import printable
from epiviz.token_classes import CLASSES, SINKS

if TYPE_CHECKING:
    from epiviz.trace import Trace

LARGE_SHARE = 0.05  # of the tokens of each head: what counts as a large value state
TAIL_FACTOR = 3.0  # times the head's median: what counts as far out in the tail
PER_LAYER = 20_000  # value ranges drawn for a layer's distribution


def value_ranges(trace: Trace, per_layer: int = PER_LAYER, seed: int = 0) -> pd.DataFrame:
    """Return value ranges, one row for each token and head.

    Parameters
    ----------
    trace : Trace
    per_layer : int
        A longer trace is sampled down to about so many rows for each layer; sinks are never left out.
    seed : int

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``position``, ``sink``, ``value_range``.
    """
    _, heads, tokens = trace.value_range.shape
    share = min(1.0, per_layer / (heads * tokens))
    drawn = np.random.default_rng(seed).random(trace.value_range.shape) < share
    drawn[:, :, :SINKS] = True
    layer, head, position = np.nonzero(drawn)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "position": position,
            "sink": position < SINKS,
            "value_range": trace.value_range[layer, head, position],
        }
    )


def value_heads(trace: Trace) -> pd.DataFrame:
    """Return each head's value ranges in a few numbers.

    Returns
    -------
    pandas.DataFrame
        One row for each head: ``layer``, ``head``, ``median`` and ``maximum`` (of the tokens that are no sinks),
        ``tail_share`` (of these tokens, those above :data:`TAIL_FACTOR` times the median), ``tail_index`` (99th
        percentile ÷ median) and ``sink_rank`` (mean percentile rank of the sinks: 0 the smallest range of the head, 1
        the largest).
    """
    x = trace.value_range.astype(np.float64)
    rest = _without_sinks(x)
    median = np.median(rest, axis=-1)
    layer, head = np.indices(median.shape)
    columns = {
        "layer": layer,
        "head": head,
        "median": median,
        "maximum": rest.max(axis=-1),
        "tail_share": (rest > TAIL_FACTOR * median[..., None]).mean(axis=-1),
        "tail_index": np.percentile(rest, 99, axis=-1) / median,
        "sink_rank": stats.percentile_ranks(x)[:, :, :SINKS].mean(axis=-1),
    }
    return pd.DataFrame({name: column.ravel() for name, column in columns.items()})


def sink_ranks(trace: Trace) -> pd.DataFrame:
    """Return where each sink's value range stands in its head: 0 the smallest of all tokens, 1 the largest.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``position``, ``token``, ``rank``.
    """
    ranks = stats.percentile_ranks(trace.value_range)[:, :, :SINKS]
    layer, head, position = np.indices(ranks.shape)
    pieces = np.array([printable(piece) for piece in trace.spans.pieces[:SINKS]], dtype=object)
    return pd.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            "position": position.ravel(),
            "token": pieces[position.ravel()],
            "rank": ranks.ravel(),
        }
    )


def value_tail(trace: Trace, thresholds: np.ndarray | None = None) -> pd.DataFrame:
    """Return, for every head, the share of tokens whose value range exceeds a multiple of the head's median.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``multiple``, ``share``; sinks are left out.
    """
    multiples = np.union1d(np.geomspace(0.5, 20, 120), TAIL_FACTOR) if thresholds is None else np.asarray(thresholds)
    layers, heads, _ = trace.value_range.shape
    rest = _without_sinks(trace.value_range.astype(np.float64))
    relative = rest / np.median(rest, axis=-1, keepdims=True)
    share = [stats.exceedance(row, multiples) for row in relative.reshape(layers * heads, -1)]
    layer, head = np.divmod(np.arange(layers * heads), heads)
    return pd.DataFrame(
        {
            "layer": np.repeat(layer, len(multiples)),
            "head": np.repeat(head, len(multiples)),
            "multiple": np.tile(multiples, layers * heads),
            "share": np.concatenate(share),
        }
    )


def _without_sinks(x: np.ndarray) -> np.ndarray:
    """The tokens after the sinks; all of them where a text has no more."""
    return x[:, :, SINKS:] if x.shape[-1] > SINKS else x


def large_values(trace: Trace, share: float = LARGE_SHARE) -> np.ndarray:
    """Return in how many heads each token is among the ``share`` of tokens with the largest value range.

    Returns
    -------
    int64 ``[tokens]``, at most layers × kv_heads. Every head marks the same number of tokens, at least one.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    tokens = trace.value_range.shape[-1]
    count = max(1, round(share * tokens))
    ranges = trace.value_range.reshape(-1, tokens)
    top = np.argpartition(ranges, tokens - count, axis=-1)[:, tokens - count :]
    return np.bincount(top.ravel(), minlength=tokens)


def carriers(
    trace: Trace,
    share: float = LARGE_SHARE,
    block: int = stats.BLOCK,
    draws: int = stats.DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Return which classes of tokens carry the large value states.

    Returns
    -------
    pandas.DataFrame
        One row for each class that occurs, most over-represented first: ``class``, ``tokens``, ``token_share``,
        ``large_share`` (of all large value states, :func:`large_values`) and ``ratio`` of the two with its interval
        ``low``, ``high`` (moving-block bootstrap over tokens); ``share``, that of the values that count as large.
    """
    hits, classes = large_values(trace, share), token_classes(trace)
    rows = []
    for name in CLASSES:
        member = classes == name
        if member.any():
            ratio = stats.share_ratio_interval(hits, member, block, draws, seed)
            large = hits[member].sum() / hits.sum()
            rows.append((name, int(member.sum()), member.mean(), large, ratio.value, ratio.low, ratio.high))
    columns = ["class", "tokens", "token_share", "large_share", "ratio", "low", "high"]
    table = pd.DataFrame(rows, columns=columns).sort_values("ratio", ascending=False, ignore_index=True)
    return table.assign(share=share)
