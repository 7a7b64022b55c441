"""Tidy frames of traces and runs: what figures draw and notebooks record.

Every function here takes a trace or runs and returns a pandas frame; none of them needs a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import signals, stats

if TYPE_CHECKING:
    from epiviz.decode import Run
    from epiviz.engine import Meter
    from epiviz.replays import Replay
    from epiviz.text import Spans
    from epiviz.trace import Trace

SINKS = 4
LARGE_SHARE = 0.05  # of the tokens of each head: what counts as a large value state
TAIL_FACTOR = 3.0  # times the head's median: what counts as far out in the tail
PER_LAYER = 20_000  # value ranges drawn for a layer's distribution

CLASSES = ("sink", "prompt", "newline", "number", "operator", "marker", "punctuation", "other")
# fmt: off
MARKERS = frozenset({
    "actually", "again", "alternatively", "because", "but", "check", "finally", "first", "hence", "hmm", "however",
    "if", "let", "maybe", "next", "now", "second", "since", "so", "step", "then", "therefore", "third", "thus",
    "verify", "wait",
})
# fmt: on
_NUMBER = re.compile(r"\d[\d.,]*")
_OPERATOR = re.compile(r"[-+*/=<>^%×÷−±≤≥≠≈√·]+")
_PUNCTUATION = re.compile(r"[^\w\s]+")


def token_class(piece: str) -> str:
    """Tell what a token is by its text alone.

    Returns
    -------
    str
        "newline", "number", "operator" (arithmetic and comparison), "marker" (a word that steers a reasoning, such as
        wait, so, therefore, step), "punctuation" or "other".

    Examples
    --------
    >>> [token_class(piece) for piece in [".\\n", "42", " =", " So", ",", " marbles"]]
    ['newline', 'number', 'operator', 'marker', 'punctuation', 'other']
    """
    word = piece.strip()
    if "\n" in piece:
        return "newline"
    if _NUMBER.fullmatch(word):
        return "number"
    if _OPERATOR.fullmatch(word):
        return "operator"
    if word.lower() in MARKERS:
        return "marker"
    return "punctuation" if _PUNCTUATION.fullmatch(word) else "other"


def token_classes(trace: Trace, sinks: int = SINKS) -> np.ndarray:
    """Return the class of every token of a trace, one of :data:`CLASSES`, str ``[tokens]``.

    The first ``sinks`` tokens are "sink" and the rest of the prompt is "prompt", whatever they say.
    """
    classes = np.array([token_class(piece) for piece in trace.spans.pieces], dtype=object)
    classes[: trace.prompt_length] = "prompt"
    classes[:sinks] = "sink"
    return classes


def printable(piece: str) -> str:
    """Return a token's text with line ends and outer blanks made visible.

    Examples
    --------
    >>> printable(" so\\n")
    '␣so↵'
    """
    text = piece.replace("\n", "↵").replace("\t", "⇥")
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    return "␣" * left + inner + "␣" * (len(text) - len(inner) - left)


def in_context(spans: Spans, index: int, around: int = 8) -> str:
    """Return a token between ⟦ and ⟧ with ``around`` tokens on both sides, on one line."""
    start, stop = max(0, index - around), min(len(spans), index + 1 + around)
    before, after = spans.slice(start, index), spans.slice(index + 1, stop)
    text = f"{'…' if start else ''}{before}⟦{printable(spans.piece(index))}⟧{after}{'…' if stop < len(spans) else ''}"
    return text.replace("\n", "↵")


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


def value_ranges(trace: Trace, sinks: int = SINKS, per_layer: int = PER_LAYER, seed: int = 0) -> pd.DataFrame:
    """Return value ranges, one row for each token and head.

    Parameters
    ----------
    trace : Trace
    sinks : int
        The first tokens; marked, and never left out.
    per_layer : int
        A longer trace is sampled down to about so many rows for each layer.
    seed : int

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``position``, ``sink``, ``value_range``.
    """
    _, heads, tokens = trace.value_range.shape
    share = min(1.0, per_layer / (heads * tokens))
    drawn = np.random.default_rng(seed).random(trace.value_range.shape) < share
    drawn[:, :, :sinks] = True
    layer, head, position = np.nonzero(drawn)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "position": position,
            "sink": position < sinks,
            "value_range": trace.value_range[layer, head, position],
        }
    )


def value_heads(trace: Trace, sinks: int = SINKS, factor: float = TAIL_FACTOR) -> pd.DataFrame:
    """Return each head's value ranges in a few numbers.

    Returns
    -------
    pandas.DataFrame
        One row for each head: ``layer``, ``head``, ``median`` and ``maximum`` (of the tokens that are no sinks),
        ``tail_share`` (of these tokens, those above ``factor`` times the median), ``tail_index`` (99th percentile ÷
        median) and ``sink_rank`` (mean percentile rank of the sinks: 0 the smallest range of the head, 1 the largest).
    """
    x = trace.value_range.astype(np.float64)
    rest = x[:, :, sinks:] if x.shape[-1] > sinks else x
    median = np.median(rest, axis=-1)
    layer, head = np.indices(median.shape)
    columns = {
        "layer": layer,
        "head": head,
        "median": median,
        "maximum": rest.max(axis=-1),
        "tail_share": (rest > factor * median[..., None]).mean(axis=-1),
        "tail_index": np.percentile(rest, 99, axis=-1) / median,
        "sink_rank": stats.percentile_ranks(x)[:, :, :sinks].mean(axis=-1),
    }
    return pd.DataFrame({name: column.ravel() for name, column in columns.items()})


def sink_ranks(trace: Trace, sinks: int = SINKS) -> pd.DataFrame:
    """Return where each sink's value range stands in its head: 0 the smallest of all tokens, 1 the largest.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``position``, ``token``, ``rank``.
    """
    ranks = stats.percentile_ranks(trace.value_range)[:, :, :sinks]
    layer, head, position = np.indices(ranks.shape)
    pieces = np.array([printable(piece) for piece in trace.spans.pieces[:sinks]], dtype=object)
    return pd.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            "position": position.ravel(),
            "token": pieces[position.ravel()],
            "rank": ranks.ravel(),
        }
    )


def value_tail(trace: Trace, sinks: int = SINKS, thresholds: np.ndarray | None = None) -> pd.DataFrame:
    """Return, for every head, the share of tokens whose value range exceeds a multiple of the head's median.

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``head``, ``multiple``, ``share``; sinks are left out.
    """
    multiples = np.union1d(np.geomspace(0.5, 20, 120), TAIL_FACTOR) if thresholds is None else np.asarray(thresholds)
    layers, heads, tokens = trace.value_range.shape
    rest = trace.value_range[:, :, sinks if tokens > sinks else 0 :].astype(np.float64)
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
        ``low``, ``high`` (moving-block bootstrap over tokens).
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
    return pd.DataFrame(rows, columns=columns).sort_values("ratio", ascending=False, ignore_index=True)


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return how many generated tokens agree before the first that differs; None if all are equal.

    Examples
    --------
    >>> first_divergence([5, 6, 7], [5, 6, 8]), first_divergence([5, 6], [5, 6]), first_divergence([5], [5, 6])
    (2, None, 1)
    """
    shared = min(len(tokens), len(reference))
    for index in range(shared):
        if tokens[index] != reference[index]:
            return index
    return None if len(tokens) == len(reference) else shared


def runs(runs: Sequence[Run], reference: Run | None = None) -> pd.DataFrame:
    """Return one row for each run: how it ended, what it used, and where it left the reference's text.

    Parameters
    ----------
    runs : sequence of Run
    reference : Run, optional
        Usually the full cache's run; without one there is no divergence to tell.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``status``, ``tokens`` (generated), ``evictions``, ``mean_slots``, ``peak_slots``,
        ``prefill_peak_slots``, ``kv_mib``, ``state_mib``, ``same_tokens`` (generated tokens that agree with the
        reference before the first that differs; all of them if none does).
    """
    rows = []
    for run in runs:
        split = None if reference is None else first_divergence(run.tokens, reference.tokens)
        rows.append(
            {
                "policy": run.policy,
                "status": run.status,
                "tokens": len(run.tokens),
                **_used(run.meter),
                "same_tokens": (len(run.tokens) if split is None else split) if reference is not None else None,
            }
        )
    return pd.DataFrame(rows)


def replays(replays: Sequence[Replay], seed: int = 0) -> pd.DataFrame:
    """Return one row for each replay: what it used and what it did to the predictions of the trace.

    Parameters
    ----------
    replays : sequence of Replay
        Of one trace.
    seed : int
        Of the moving-block bootstrap over tokens behind the interval.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``evictions``, ``mean_slots``, ``peak_slots``, ``prefill_peak_slots``, ``kv_mib``, ``state_mib``;
        ``nll_increase`` over the full cache with ``low`` and ``high`` (nats per token), ``kl`` (mean), ``top1`` (share
        of tokens at which both put the same token first), ``n`` (tokens).
    """
    rows = []
    for replay in replays:
        difference = (replay.nll - replay.full_nll)[replay.predicted].astype(np.float64)
        increase = stats.bootstrap(lambda i, x=difference: x[i].mean(-1), len(difference), seed=seed)
        rows.append(
            {
                "policy": replay.policy,
                **_used(replay.meter),
                "nll_increase": increase.value,
                "low": increase.low,
                "high": increase.high,
                "kl": float(replay.kl[replay.predicted].mean()),
                "top1": replay.top1_agreement,
                "n": len(difference),
            }
        )
    return pd.DataFrame(rows)


def overlap(replays: Sequence[Replay], step: int | None = None) -> pd.DataFrame:
    """Return how much of their kept sets policies share: Jaccard index of each pair, mean over heads.

    Parameters
    ----------
    replays : sequence of Replay
        Of one trace.
    step : int, optional
        Tokens seen; the last step if not given.

    Returns
    -------
    pandas.DataFrame
        Square, policies as index and columns; tokens that no policy may evict count as well.
    """
    alive = [each.retention.alive(each.retention.tokens if step is None else step) for each in replays]
    names = [each.policy for each in replays]
    table = [[((a & b).sum(-1) / (a | b).sum(-1)).mean() for b in alive] for a in alive]
    return pd.DataFrame(table, index=names, columns=names)


def kept(runs: Sequence[Run], step: int | None = None) -> pd.DataFrame:
    """Return the share of the heads that hold each token, for each run.

    Parameters
    ----------
    runs : sequence of Run
    step : int, optional
        Tokens seen; a run's last step if it is not given or the run is shorter.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``position``, ``part``, ``kept``; only tokens that exist at the step.
    """
    parts = []
    for run in runs:
        history = run.retention
        last = history.tokens if step is None else min(step, history.tokens)
        position = np.arange(last)
        part = np.where(position < history.prompt_length, "prompt", "generated")
        held = history.held(last)[:last]
        parts.append(pd.DataFrame({"policy": run.policy, "position": position, "part": part, "kept": held}))
    return pd.concat(parts, ignore_index=True)


def _used(meter: Meter) -> dict[str, float]:
    """What a run used, in the columns that every comparison shares."""
    return {
        "evictions": meter.evictions,
        "mean_slots": meter.mean_slots,
        "peak_slots": meter.peak_slots,
        "prefill_peak_slots": meter.prefill_peak_slots,
        "kv_mib": meter.kv_bytes / 2**20,
        "state_mib": meter.state_bytes / 2**20,
    }


def _tokens(trace: Trace) -> pd.DataFrame:
    position = np.arange(len(trace))
    return pd.DataFrame(
        {
            "position": position,
            "token": trace.spans.pieces,
            "part": np.where(position < trace.prompt_length, "prompt", "generated"),
        }
    )
