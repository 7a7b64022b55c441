"""What a reader shows, as plain data: columns of text, scores, and eviction histories. No widget code.

A reader shows one of three things, and they are never mixed: a *static ranking* of one trace by a score, *replays* of
policies over one trace, or texts that were *generated* under eviction. All three are a :class:`ReaderData`; a browser
gets it as one block of bytes and a small index (:meth:`ReaderData.pack`).

A selection evicts nothing, so no token of its texts is ever struck: its method says *attended*, and tokens can be
coloured by how often they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from epiviz.retention import Retention
from epiviz.text import Spans

THRESHOLDS = (10, 25, 50, 75, 90)  # percent of heads that must have lost a token before it counts as evicted
SHIP_LIMIT = 4 * 2**20  # bytes of per-head deaths that travel with the widget; beyond it slices are fetched
MAX_COLUMNS = 3
STATIC = "static ranking"
ALL = "side by side"
NO_SCORE = "none"
ATTENDED_UNIT = "share of queries and heads"

BUCKETS = {"signed": 9, "magnitude": 6}
NO_BUCKET = 255
CLIP = (1, 99)  # percentiles at which the colour scale ends

ENDINGS = {"length": "cut at the length limit", "loop": "ends in a loop"}

Kind = Literal["static", "replay", "generated"]
BADGES: dict[Kind, str] = {
    "static": "static ranking · a thought experiment",
    "replay": "replay",
    "generated": "generated",
}


@dataclass(frozen=True)
class Score:
    """One number per token to colour and rank by.

    Attributes
    ----------
    name, unit : str
    values : float32 ``[tokens]``
        NaN where a token has no score: it is not coloured and ranks last.
    kind : "signed" or "magnitude"
        Signed scores are centred on 0.
    pool : float32 ``[values]``, optional
        The values that set the ends of the colour scale, if texts side by side share one.
    """

    name: str
    values: np.ndarray
    kind: Literal["signed", "magnitude"]
    unit: str = ""
    pool: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.kind not in BUCKETS:
            raise ValueError(f"score {self.name!r}: kind must be one of {sorted(BUCKETS)}, got {self.kind!r}")

    @cached_property
    def clip(self) -> tuple[float, float]:
        """The two ends of the colour scale."""
        pool = self.values if self.pool is None else self.pool
        finite = pool[np.isfinite(pool)]
        low, high = np.percentile(finite, CLIP) if len(finite) else (0.0, 0.0)
        if self.kind == "signed":
            high = max(abs(low), abs(high))
            low = -high
        return float(low), float(high)

    @cached_property
    def buckets(self) -> np.ndarray:
        """The colour of each token, uint8 ``[tokens]``; ``NO_BUCKET`` where there is no score."""
        low, high = self.clip
        n = BUCKETS[self.kind]
        width = (high - low) / n
        place = (self.values.astype(np.float64) - low) / width if width > 0 else np.full(len(self.values), (n - 1) / 2)
        place = np.clip(np.floor(np.nan_to_num(place, posinf=n - 1, neginf=0)), 0, n - 1)
        return np.where(np.isnan(self.values), NO_BUCKET, place).astype(np.uint8)

    @cached_property
    def ranks(self) -> np.ndarray:
        """The rank of each token, int64 ``[tokens]``: 0 is the highest score, ties go to the newer token."""
        index = np.arange(len(self.values))
        missing = np.isnan(self.values)
        order = np.lexsort((-index, -np.where(missing, 0, self.values), missing))
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = index
        return ranks


@dataclass(frozen=True)
class Scope:
    """Whose cache is meant: all heads with a threshold in percent (``layer`` −1), or one head of one layer."""

    layer: int = -1
    head: int = 0
    threshold: int = 50


@dataclass(frozen=True)
class Story:
    """One eviction history of one column.

    Attributes
    ----------
    method : str
        The printed name of the policy, distinct among the stories of a budget.
    budget : int
        Slots per layer and head right after an eviction; the number of tokens for a cache without a limit.
    retention : Retention
    column : int
        The column it belongs to.
    """

    method: str
    budget: int
    retention: Retention
    column: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that evict."""
        return tuple(self.retention.evicts) or tuple(range(self.retention.death.shape[0]))

    @cached_property
    def uniform(self) -> bool:
        """Whether all heads lose the same tokens at the same events."""
        death = self.retention.death[list(self.layers)]
        return bool((death == death[:1, :1]).all())

    @cached_property
    def majority(self) -> np.ndarray:
        """The event by which each threshold of the heads had lost a token, int32 ``[thresholds, tokens]``."""
        if self.uniform:
            return np.repeat(self.retention.death[self.layers[0], :1], len(THRESHOLDS), axis=0)
        # Retention.death_quantile for all thresholds, with one pass over the heads instead of a sort for each.
        heads = self.retention.death[list(self.layers)].reshape(-1, self.retention.tokens)
        rows = [int(np.ceil(threshold / 100 * len(heads))) - 1 for threshold in THRESHOLDS]
        return np.partition(heads, rows, axis=0)[rows]

    @cached_property
    def main_reason(self) -> np.ndarray:
        """The most frequent reason over the evicting heads, uint8 ``[tokens]``; 0 if no head kept the token."""
        reason = self.retention.reason[list(self.layers)]
        counts = np.stack([(reason == code).sum(axis=(0, 1)) for code in range(1, 7)])
        return np.where(counts.any(axis=0), counts.argmax(axis=0) + 1, 0).astype(np.uint8)

    def death(self, scope: Scope) -> np.ndarray:
        """Return the event at which each fed token left in a scope, int32 ``[tokens]``."""
        if scope.layer >= 0:
            return self.retention.death[scope.layer, scope.head]
        return self.majority[THRESHOLDS.index(scope.threshold)]

    def struck(self, step: int, scope: Scope, tokens: int) -> np.ndarray:
        """Return which of the ``tokens`` of the column are gone once ``step`` tokens were seen, bool ``[tokens]``."""
        death = self.death(scope)
        fired = np.searchsorted(self.retention.event_steps, step, side="right")
        struck = np.zeros(tokens, dtype=bool)
        struck[: len(death)] = (death < fired) & (np.arange(len(death)) < step)
        return struck


@dataclass(frozen=True)
class Column:
    """One text.

    Attributes
    ----------
    label : str
        What the column is called.
    note : str
        A line about it: its budget, how it ended, what it cost.
    spans : Spans
    ids : int64 ``[tokens]``
    prompt_length : int
    scores : tuple of Score
        The same names in every column.
    divergence : tuple of int
        Where this text parts from the first column (in the first column: where the others part from it).
    """

    label: str
    note: str
    spans: Spans
    ids: np.ndarray
    prompt_length: int
    scores: tuple[Score, ...] = ()
    divergence: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.spans) != len(self.ids):
            raise ValueError(f"{self.label}: {len(self.spans)} spans for {len(self.ids)} token ids")
        for score in self.scores:
            if score.values.shape != (len(self),):
                raise ValueError(
                    f"score {score.name!r} has shape {score.values.shape}, {self.label} has {len(self)} tokens"
                )

    def __len__(self) -> int:
        return len(self.ids)

    def score(self, name: str) -> Score | None:
        """Return the score called ``name``, None for ``"none"``."""
        return next((score for score in self.scores if score.name == name), None)


@dataclass(frozen=True)
class ReaderData:
    """Everything a reader shows."""

    kind: Kind
    title: str
    columns: tuple[Column, ...]
    stories: tuple[Story, ...] = ()

    @property
    def tokens(self) -> int:
        """The length of the longest column."""
        return max(len(column) for column in self.columns)

    @property
    def score_names(self) -> list[str]:
        """What can be coloured by; the last is always ``"none"``."""
        return [*(score.name for score in self.columns[0].scores), NO_SCORE]

    @property
    def methods(self) -> list[str]:
        """What can be chosen as method."""
        names = list(dict.fromkeys(story.method for story in self.stories))
        if self.kind == "static":
            return [STATIC]
        if self.kind == "generated":
            return [ALL, *names] if len(names) > 1 else names
        return [*names, STATIC]

    @property
    def layers(self) -> int:
        """The number of layers of the deepest history."""
        return max((story.retention.death.shape[0] for story in self.stories), default=0)

    @property
    def heads(self) -> int:
        """The number of KV heads."""
        return max((story.retention.death.shape[1] for story in self.stories), default=0)

    def shown(self, method: str) -> Kind:
        """Return which of the three things is on screen under a method."""
        return "static" if method == STATIC else self.kind

    def budgets(self, method: str) -> list[int]:
        """Return the computed budgets of a method; empty where any number of tokens will do."""
        return sorted(story.budget for story in self.stories if story.method == method)

    def nearest_budget(self, method: str, budget: int) -> int:
        """Return the budget closest to ``budget`` that can be shown."""
        if self.shown(method) == "static":
            return min(max(1, budget), self.tokens)
        computed = self.budgets(method) or [self.stories[0].budget]
        return min(computed, key=lambda total: (abs(total - budget), total))

    def story(self, method: str, budget: int, column: int = 0) -> Story | None:
        """Return the history behind a column under a method and a budget; None for a static ranking."""
        if self.shown(method) == "static":
            return None
        if self.kind == "generated":
            return next(story for story in self.stories if story.column == column)
        return next(story for story in self.stories if (story.method, story.budget) == (method, budget))

    def struck(self, method: str, budget: int, step: int, scope: Scope, color_by: str, column: int = 0) -> np.ndarray:
        """Return which tokens of a column are struck out, bool ``[tokens]``."""
        text = self.columns[column]
        story = self.story(method, budget, column)
        if story is not None:
            return story.struck(step, scope, len(text))
        score = text.score(color_by)
        return score.ranks >= budget if score else np.zeros(len(text), dtype=bool)

    def ships_heads(self) -> bool:
        """Whether the deaths of all heads are small enough to travel with the widget."""
        return sum(story.retention.death.size for story in self.stories) * 2 <= SHIP_LIMIT

    def pack(self) -> tuple[dict, bytes]:
        """Return a JSON-ready index and one block of bytes that hold everything."""
        packer = _Packer()
        heads = self.ships_heads()
        meta = {
            "kind": self.kind,
            "title": printable(self.title),
            "badges": BADGES,
            "methods": [printable(name) for name in self.methods],
            "thresholds": list(THRESHOLDS),
            "clip": list(CLIP),
            "columns": [_pack_column(packer, f"c{i}", column) for i, column in enumerate(self.columns)],
            "stories": [_pack_story(packer, f"s{i}", story, heads) for i, story in enumerate(self.stories)],
        }
        return meta | {"arrays": packer.index}, packer.bytes()


def printable(text: str) -> str:
    """Return ``text`` without lone surrogates, which no JSON message can carry."""
    return text.encode("utf-8", "replace").decode()


def event_indices(death: np.ndarray, events: int) -> np.ndarray:
    """Return deaths in the narrowest unsigned type; its largest value means "never"."""
    dtype = np.uint16 if events < np.iinfo(np.uint16).max else np.uint32
    return np.where(death < events, death, np.iinfo(dtype).max).astype(dtype)


def build(source, runs=(), scores: Mapping | None = None, title: str | None = None) -> ReaderData:
    """Turn a trace, replays or generated runs into the data of a reader.

    Parameters
    ----------
    source : Trace, Run, Replay, or a list of Runs or of Replays
    runs : Replay or list of Replays
        Replays of the trace.
    scores : mapping of name to (array, kind, unit), optional
        What to colour by, in place of :func:`default_scores`. For several runs the array is a list, one per run.
    title : str, optional

    Raises
    ------
    TypeError, ValueError
        The parts do not fit together; the message says which.
    """
    sources = list(source) if isinstance(source, (list, tuple)) else [source]
    runs = list(runs) if isinstance(runs, (list, tuple)) else [runs]
    if not sources:
        raise ValueError("nothing to read: the list of runs is empty")
    if all(_is_replay(item) for item in sources):
        sources, runs = [sources[0].trace], [*sources, *runs]
    if all(_is_run(item) for item in sources):
        if runs:
            raise TypeError("replays belong to a trace; put all generated runs into one list: TraceReader([run, …])")
        return _from_runs(sources, scores, title)
    if len(sources) > 1 or not _is_trace(sources[0]):
        names = ", ".join(type(item).__name__ for item in sources)
        raise TypeError(f"TraceReader reads one Trace, one Run, or a list of Runs or Replays, got {names}")
    return _from_trace(sources[0], runs, scores, title)


def default_scores(trace) -> dict[str, tuple[np.ndarray, str, str]]:
    """Return what a trace is coloured by if nothing else is asked for.

    A model too shallow for two reference layers has no epiphany score; the list then starts with surprisal.
    """
    from epiviz import signals

    scores: dict[str, tuple[np.ndarray, str, str]] = {}
    if _has_reference_layers(trace.displacement.shape[0]):
        scores["epiphany score"] = (signals.epiphany(trace), "signed", "z₁₀ − z₂₁")
    scores["surprisal"] = (trace.surprisal, "magnitude", "nats")
    scores["value range"] = (trace.value_range.mean(axis=(0, 1)), "magnitude", "mean over layers and heads")
    return scores


def _has_reference_layers(layers: int) -> bool:
    from epiviz import signals

    try:
        signals.reference_layers(layers)
    except ValueError:
        return False
    return True


def _is_trace(item) -> bool:
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
    stories = _distinct([Story(_method(r), _total(r.budget, len(ids)), r.retention) for r in replays])
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
    splits = [_divergence(ids[0], other) for other in ids[1:]]
    marks = [tuple(sorted({split for split in splits if split is not None}))]
    marks += [() if split is None else (split,) for split in splits]
    budgets = [_total(run.budget, len(tokens)) for run, tokens in zip(runs, ids, strict=True)]
    stories = [
        Story(_method(run), budget, run.retention, column)
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


def _divergence(first: np.ndarray, other: np.ndarray) -> int | None:
    """Return the first index at which two token sequences differ, None if they are equal."""
    shared = min(len(first), len(other))
    differ = np.flatnonzero(first[:shared] != other[:shared])
    if len(differ):
        return int(differ[0])
    return None if len(first) == len(other) else shared


def _total(budget, tokens: int) -> int:
    return tokens if budget is None else int(budget.total)


def _selects(run) -> bool:
    return getattr(run, "attended", None) is not None


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
    parts += [ENDINGS.get(run.status, str(run.status))] if getattr(run, "status", None) else []
    meter, held = getattr(run, "meter", None), "held" if _selects(run) else "slots"
    parts += [f"mean {meter.attended_slots:.0f} attended"] if _selects(run) else []
    mean = getattr(meter, "mean_slots", None)
    parts += [f"mean {mean:.0f} {held}"] if mean is not None and np.isfinite(mean) else []
    return " · ".join(parts)


def _distinct(stories: list[Story], by_budget: bool = True) -> tuple[Story, ...]:
    """Number the stories that would otherwise have the same name (the same policy with other seeds or parameters)."""
    seen: dict[tuple, int] = {}
    named = []
    for story in stories:
        key = (story.method, story.budget if by_budget else None)
        seen[key] = seen.get(key, 0) + 1
        name = story.method if seen[key] == 1 else f"{story.method} #{seen[key]}"
        named.append(Story(name, story.budget, story.retention, story.column))
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


class _Packer:
    """Collects arrays into one aligned block of bytes and an index of (dtype, shape, offset)."""

    def __init__(self) -> None:
        self.index: dict[str, tuple[str, list[int], int]] = {}
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, name: str, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        chunk = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        chunk += bytes(-len(chunk) % 8)  # typed arrays in the browser must start at multiples of their item size
        self.index[name] = (array.dtype.name, list(array.shape), self._size)
        self._chunks.append(chunk)
        self._size += len(chunk)

    def bytes(self) -> bytes:
        return b"".join(self._chunks)


def _pack_column(packer: _Packer, key: str, column: Column) -> dict:
    spans = column.spans
    # UTF-16 units instead of a JSON string: lone surrogates survive, and the offsets index it directly.
    packer.add(f"{key}.text", np.frombuffer(spans.text.encode("utf-16-le", "surrogatepass"), dtype="<u2"))
    packer.add(f"{key}.offsets", spans.utf16_offsets.astype(np.uint32))
    packer.add(f"{key}.ids", column.ids.astype(np.uint32))
    for i, score in enumerate(column.scores):
        packer.add(f"{key}.values{i}", score.values)
        packer.add(f"{key}.buckets{i}", score.buckets)
    return {
        "label": printable(column.label),
        "note": printable(column.note),
        "tokens": len(column),
        "prompt": column.prompt_length,
        "divergence": list(column.divergence),
        "scores": [
            {"name": printable(score.name), "kind": score.kind, "unit": printable(score.unit), "clip": score.clip}
            for score in column.scores
        ],
    }


def _pack_story(packer: _Packer, key: str, story: Story, heads: bool) -> dict:
    retention = story.retention
    events = retention.events
    majority = story.majority[:1] if story.uniform else story.majority
    packer.add(f"{key}.events", retention.event_steps.astype(np.uint32))
    packer.add(f"{key}.majority", event_indices(majority, events))
    packer.add(f"{key}.reason", story.main_reason)
    if heads:
        packer.add(f"{key}.deaths", event_indices(retention.death, events))
        packer.add(f"{key}.reasons", retention.reason)
    return {
        "method": printable(story.method),
        "budget": story.budget,
        "column": story.column,
        "layers": retention.death.shape[0],
        "heads": retention.death.shape[1],
        "evicts": list(story.layers),
        "uniform": story.uniform,
        "fed": retention.tokens,
    }
