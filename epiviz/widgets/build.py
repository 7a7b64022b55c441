"""Building: a trace, its replays or generated runs become what the views show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from epiviz.text import first_divergence
from epiviz.widgets.data import MAX_COLUMNS, NO_SCORE, Column, LayerScore, ReaderData, Score, Story

ENDINGS = {"length": "cut at the length limit", "loop": "ends in a loop"}
ATTENDED_UNIT = "share of queries and heads"


def build(
    source,
    runs=(),
    scores: Mapping | None = None,
    title: str | None = None,
    *,
    layer_scores: Mapping | bool = False,
    on_demand: Sequence[str] = (),
) -> ReaderData:
    """Turn a trace, replays or generated runs into what a view shows.

    Parameters
    ----------
    source : Trace, Run, Replay, or a list of Runs or of Replays
    runs : Replay, list of Replays or ReplayGrid
        Replays of the trace.
    scores : mapping of name to (array, kind, unit), optional
        What to colour by, in place of :func:`default_scores`. For several runs the array is a list, one per run.
    title : str, optional
    layer_scores : mapping of name to (array ``[layers, tokens]``, kind, unit), or bool
        What the layer map shows; True: :func:`default_layer_scores`.
    on_demand : sequence of str
        Methods that can be computed.

    Raises
    ------
    TypeError, ValueError
        The parts do not fit together; the message says which.
    """
    sources = list(source) if isinstance(source, (list, tuple)) else [source]
    runs = replays_of(runs, source)
    if not sources:
        raise ValueError("nothing to read: the list of runs is empty")
    if all(_is_replay(item) for item in sources):
        sources, runs = [sources[0].trace], [*sources, *runs]
    if all(_is_run(item) for item in sources):
        if runs:
            raise TypeError("replays belong to a trace; put all generated runs into one list: TraceReader([run, …])")
        return _from_runs(sources, scores, title)
    if len(sources) > 1 or not is_trace(sources[0]):
        names = ", ".join(type(item).__name__ for item in sources)
        raise TypeError(f"a view reads one Trace, one Run, or a list of Runs or Replays, got {names}")
    data = _from_trace(sources[0], runs, scores, title)
    if on_demand:
        data = replace(data, kind="replay", on_demand=tuple(on_demand))
    return _with_layers(data, sources[0], layer_scores) if layer_scores else data


def replays_of(runs, trace) -> list:
    """Return replays as a list; of a grid those of ``trace``."""
    if not hasattr(runs, "cells"):
        return list(runs) if isinstance(runs, (list, tuple)) else [runs]
    mine = [replay for replay in runs.select() if np.array_equal(replay.trace.tokens, trace.tokens)]
    if not mine:
        raise ValueError(f"the grid holds no replay of the trace {trace.name!r}")
    return mine


def _with_layers(data: ReaderData, trace, scores: Mapping | bool) -> ReaderData:
    from epiviz import signals

    depth = trace.displacement.shape[0]
    made = []
    for name, spec in (default_layer_scores(trace) if scores is True else scores).items():
        values, kind, unit = (*spec, "")[:3]
        values = np.asarray(values, dtype=np.float32)
        if values.shape != (depth, len(data.columns[0])):
            raise ValueError(
                f"layer score {name!r} has shape {values.shape}, the trace has {depth} layers and "
                f"{len(data.columns[0])} tokens"
            )
        made.append(LayerScore(str(name), values, kind, str(unit)))
    bands, reference = signals.reference_marks(depth)
    return replace(data, layer_scores=tuple(made), bands=bands, reference=reference)


def default_layer_scores(trace) -> dict[str, tuple[np.ndarray, str, str]]:
    """Return what the layer map of a trace shows if nothing else is asked for."""
    from epiviz import signals

    moves = np.stack([signals.trace_zscore(trace, layer) for layer in range(trace.displacement.shape[0])])
    return {
        "displacement": (moves, "signed", "z"),
        "value range": (trace.value_range.mean(axis=1), "magnitude", "mean over heads"),
    }


def default_scores(trace) -> dict[str, tuple[np.ndarray, str, str]]:
    """Return what a trace is coloured by if nothing else is asked for.

    A model too shallow for two reference layers has no epiphany score; the list then starts with surprisal.
    """
    from epiviz import signals

    scores: dict[str, tuple[np.ndarray, str, str]] = {}
    _, reference = signals.reference_marks(trace.displacement.shape[0])
    if reference:
        scores["epiphany score"] = (signals.epiphany(trace), "signed", "z₁₀ − z₂₁")
    scores["surprisal"] = (trace.surprisal, "magnitude", "nats")
    scores["value range"] = (trace.value_range.mean(axis=(0, 1)), "magnitude", "mean over layers and heads")
    return scores


def is_trace(item) -> bool:
    """Tell a Trace from runs and replays by what it holds: a reader without a model need not wait for torch."""
    return hasattr(item, "displacement")


def _is_replay(item) -> bool:
    return hasattr(item, "trace") and hasattr(item, "retention")


def _is_run(item) -> bool:
    return hasattr(item, "prompt_tokens") and hasattr(item, "retention")


def _from_trace(trace, replays: Sequence, scores: Mapping | None, title: str | None) -> ReaderData:
    ids = np.asarray(trace.tokens, dtype=np.int64)
    for replay in replays:
        if not _is_replay(replay):
            raise TypeError(
                f"beside a trace only its replays can be shown, got {type(replay).__name__}; "
                "to read generated texts pass the runs as a list: TraceReader([run, …])"
            )
        if not np.array_equal(np.asarray(replay.trace.tokens), ids):
            raise ValueError(f"the replay of {replay.policy} belongs to another trace")
    stories = _distinct(
        [Story(_method(r), _total(r.budget, len(ids)), r.retention, selects=_selects(r)) for r in replays]
    )
    if scores is None:
        scores = default_scores(trace) | {
            f"{story.method}, {story.budget} slots": (_attended_share(replay, len(ids)), "magnitude", ATTENDED_UNIT)
            for story, replay in zip(stories, replays, strict=True)
            if _selects(replay)
        }
    column = Column(
        label=str(trace.name) or "trace",
        note="",
        spans=trace.spans,
        ids=ids,
        prompt_length=int(trace.prompt_length),
        scores=_make_scores(scores, 0, 1),
    )
    return ReaderData(
        kind="replay" if replays else "static",
        title=column.label if title is None else title,
        columns=(column,),
        stories=stories,
    )


def _from_runs(runs: Sequence, scores: Mapping | None, title: str | None) -> ReaderData:
    if len(runs) > MAX_COLUMNS:
        raise ValueError(f"at most {MAX_COLUMNS} texts fit side by side, got {len(runs)}: pass the ones to compare")
    for run in runs:
        if run.spans is None:
            raise ValueError(f"the run of {run.policy} has no text: its model has no tokenizer")
    ids = [_all_tokens(run) for run in runs]
    splits = [first_divergence(ids[0], other) for other in ids[1:]]
    marks = [tuple(sorted({split for split in splits if split is not None}))]
    marks += [() if split is None else (split,) for split in splits]
    budgets = [_total(run.budget, len(tokens)) for run, tokens in zip(runs, ids, strict=True)]
    stories = [
        Story(_method(run), budget, run.retention, column, _selects(run))
        for column, (run, budget) in enumerate(zip(runs, budgets, strict=True))
    ]
    stories = _distinct(stories, by_budget=False)
    if scores is None and any(map(_selects, runs)):
        shares = [_attended_share(run, len(tokens)) for run, tokens in zip(runs, ids, strict=True)]
        scores = {"attended": (shares if len(runs) > 1 else shares[0], "magnitude", ATTENDED_UNIT)}
    columns = [
        Column(
            label=story.method,
            note=_run_note(run),
            spans=run.spans,
            ids=tokens,
            prompt_length=int(run.prompt_length),
            scores=_make_scores(scores or {}, i, len(runs)),
            divergence=mark,
        )
        for i, (story, run, tokens, mark) in enumerate(zip(stories, runs, ids, marks, strict=True))
    ]
    names = " · ".join(story.method for story in stories)
    return ReaderData("generated", names if title is None else title, tuple(columns), stories)


def _all_tokens(run) -> np.ndarray:
    return np.concatenate([np.asarray(run.prompt_tokens, dtype=np.int64), np.asarray(run.tokens, dtype=np.int64)])


def _total(budget, tokens: int) -> int:
    return tokens if budget is None else int(budget.total)


def _selects(run) -> bool:
    return run.attended is not None


def _method(run) -> str:
    """The printed name of a policy; of a selection it says what its budget limits."""
    return f"{run.policy} (attended)" if _selects(run) else str(run.policy)


def _attended_share(run, tokens: int) -> np.ndarray:
    """How often each token was attended, float32 ``[tokens]``; NaN where nothing was selected."""
    share = np.full(tokens, np.nan, dtype=np.float32)
    if _selects(run):
        share[: run.attended.tokens] = run.attended.share()
    return share


def _run_note(run) -> str:
    budget = run.budget
    if _selects(run):
        parts = [f"budget {int(budget.total)} attended, nothing evicted"]
    else:
        parts = ["full cache" if budget is None else f"budget {int(budget.total)}, buffer {int(budget.buffer)}"]
    parts += [ENDINGS.get(run.status, run.status)] if run.status else []
    if run.meter is not None:  # a text that is about to be written has no status and no meter
        parts += [f"mean {run.meter.attended_slots:.0f} attended"] if _selects(run) else []
        parts += [f"mean {run.meter.mean_slots:.0f} {'held' if _selects(run) else 'slots'}"]
    return " · ".join(parts)


def _distinct(stories: list[Story], by_budget: bool = True) -> tuple[Story, ...]:
    """Number the stories that would otherwise have the same name (the same policy with other seeds or parameters)."""
    seen: dict[tuple, int] = {}
    named = []
    for story in stories:
        key = (story.method, story.budget if by_budget else None)
        seen[key] = seen.get(key, 0) + 1
        name = story.method if seen[key] == 1 else f"{story.method} #{seen[key]}"
        named.append(replace(story, method=name))
    return tuple(named)


def _make_scores(scores: Mapping, column: int, columns: int) -> tuple[Score, ...]:
    made = []
    for name, spec in scores.items():
        if name == NO_SCORE or not isinstance(spec, tuple) or len(spec) not in (2, 3):
            raise ValueError(f"score {name!r} must be (array, 'signed' | 'magnitude', unit), and not be called 'none'")
        values, kind, unit = (*spec, "")[:3]
        pool = None
        if columns > 1:
            if len(values) != columns:
                raise ValueError(f"score {name!r} needs one array per run: {columns}, got {len(values)}")
            pool = np.concatenate([np.asarray(part, dtype=np.float32) for part in values])
            values = values[column]
        made.append(Score(str(name), np.asarray(values, dtype=np.float32), kind, str(unit), pool))
    return tuple(made)
