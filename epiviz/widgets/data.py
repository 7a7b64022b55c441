"""What the views show, as plain data: columns of text, scores, and eviction histories. No widget code.

A view shows one of three things, and they are never mixed: a *static ranking* of one trace by a score, *replays* of
policies over one trace, or texts that were *generated* under eviction. All three are a :class:`ReaderData`, which
:mod:`epiviz.widgets.build` makes and :mod:`epiviz.widgets.pack` sends to a browser.

A selection evicts nothing, so no token of its texts is ever struck: its method says *attended*, and tokens can be
coloured by how often they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from epiviz.retention import Retention
from epiviz.text import Spans

THRESHOLDS = (10, 25, 50, 75, 90)  # percent of heads that must have lost a token before it counts as evicted
SHIP_LIMIT = 4 * 2**20  # bytes of per-head deaths that travel with the widget; beyond it slices are fetched
MAX_COLUMNS = 3
LEVELS = 254  # of a quantised layer score: 0 … 254, and NO_BUCKET
STATIC = "static ranking"
ALL = "side by side"
NO_SCORE = "none"

BUCKETS = {"signed": 9, "magnitude": 6}
NO_BUCKET = 255
CLIP = (1, 99)  # percentiles at which the colour scale ends

Kind = Literal["static", "replay", "generated"]
BADGES: dict[Kind, str] = {
    "static": "static ranking · a thought experiment",
    "replay": "replay",
    "generated": "generated",
}


class NotComputedError(LookupError):
    """A history that was asked for and is not computed yet."""


@dataclass(frozen=True)
class _Scaled:
    """Numbers with a colour scale."""

    name: str
    values: np.ndarray
    kind: Literal["signed", "magnitude"]
    unit: str = ""

    def __post_init__(self) -> None:
        if self.kind not in BUCKETS:
            raise ValueError(f"score {self.name!r}: kind must be one of {sorted(BUCKETS)}, got {self.kind!r}")

    @cached_property
    def clip(self) -> tuple[float, float]:
        """The two ends of the colour scale: the outer percentiles, for signed values centred on 0."""
        values = self._pooled()
        finite = values[np.isfinite(values)]
        low, high = np.percentile(finite, CLIP) if len(finite) else (0.0, 0.0)
        if self.kind == "signed":
            high = max(abs(low), abs(high))
            low = -high
        return float(low), float(high)

    def _pooled(self) -> np.ndarray:
        return self.values


@dataclass(frozen=True)
class Score(_Scaled):
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

    pool: np.ndarray | None = None

    def _pooled(self) -> np.ndarray:
        return self.values if self.pool is None else self.pool

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
class LayerScore(_Scaled):
    """One number per layer and token, for the layer map.

    Attributes
    ----------
    name, unit : str
    values : float32 ``[layers, tokens]``
        NaN where there is no score.
    kind : "signed" or "magnitude"
    """

    @cached_property
    def levels(self) -> np.ndarray:
        """The values in even steps between the ends of the scale, uint8 ``[layers, tokens]``; NO_BUCKET: no score."""
        low, high = self.clip
        share = (self.values - low) / (high - low) if high > low else np.full(self.values.shape, 0.5)
        level = np.round(np.clip(np.nan_to_num(share, posinf=1, neginf=0), 0, 1) * LEVELS)
        return np.where(np.isnan(self.values), NO_BUCKET, level).astype(np.uint8)


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
    selects : bool
        Its method restricts what is attended, and evicts nothing.
    """

    method: str
    budget: int
    retention: Retention
    column: int = 0
    selects: bool = False

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that evict."""
        return tuple(self.retention.evicting)

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
        # One pass over the heads for all thresholds: a sort for each would take as many times as long.
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
    """Everything a view shows.

    Attributes
    ----------
    kind : {"static", "replay", "generated"}
    title : str
    columns : tuple of Column
    stories : tuple of Story
    on_demand : tuple of str
        Methods whose replays are computed when they are asked for.
    layer_scores : tuple of LayerScore
    bands, reference : tuple
        Layers to mark in the layer map: the first and last of each band of EpiKV, and the two of its score.
    """

    kind: Kind
    title: str
    columns: tuple[Column, ...]
    stories: tuple[Story, ...] = ()
    on_demand: tuple[str, ...] = ()
    layer_scores: tuple[LayerScore, ...] = ()
    bands: tuple[tuple[int, int], ...] = ()
    reference: tuple[int, ...] = ()

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
        names = list(dict.fromkeys([*(story.method for story in self.stories), *self.on_demand]))
        if self.kind == "static":
            return [STATIC]
        if self.kind == "generated":
            return [ALL, *names] if len(names) > 1 else names
        return [*names, STATIC]

    @property
    def layers(self) -> int:
        """The number of layers of the deepest history or layer score."""
        depths = [story.retention.death.shape[0] for story in self.stories]
        return max([*depths, *(len(score.values) for score in self.layer_scores)], default=0)

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
        computed = self.budgets(method)
        if not computed:  # generated texts side by side each have a budget of their own
            return self.stories[0].budget if self.stories else budget
        return min(computed, key=lambda total: (abs(total - budget), total))

    def text(self, column: int) -> Column:
        """Return the text of a column on screen; replays side by side share theirs."""
        return self.columns[column if self.kind == "generated" else 0]

    def story(self, method: str, budget: int, column: int = 0) -> Story | None:
        """Return the history behind a column under a method and a budget; None for a static ranking.

        Raises
        ------
        NotComputedError
            It is not there (yet).
        """
        if self.shown(method) == "static":
            return None
        if self.kind == "generated":
            return next(story for story in self.stories if story.column == column)
        for story in self.stories:
            if (story.method, story.budget) == (method, budget):
                return story
        raise NotComputedError(
            f"{method} at {budget} slots is not computed; computed are the budgets {self.budgets(method)}. "
            "If it is being computed, wait() returns when it is there"
        )

    def struck(self, method: str, budget: int, step: int, scope: Scope, color_by: str, column: int = 0) -> np.ndarray:
        """Return which tokens of a column are struck out, bool ``[tokens]``."""
        text = self.text(column)
        story = self.story(method, budget, column)
        if story is not None:
            return story.struck(step, scope, len(text))
        score = text.score(color_by)
        return score.ranks >= budget if score else np.zeros(len(text), dtype=bool)

    def ships_heads(self) -> bool:
        """Whether the deaths of all heads are small enough to travel with the widget."""
        return sum(story.retention.death.size for story in self.stories) * 2 <= SHIP_LIMIT


def encodable(text: str) -> str:
    """Return ``text`` without lone surrogates, which no JSON message can carry."""
    return text.encode("utf-8", "replace").decode()


def event_indices(death: np.ndarray, events: int) -> np.ndarray:
    """Return deaths in the narrowest unsigned type; its largest value means "never"."""
    dtype = np.uint16 if events < np.iinfo(np.uint16).max else np.uint32
    return np.where(death < events, death, np.iinfo(dtype).max).astype(dtype)
