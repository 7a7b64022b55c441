"""ThinKV (arXiv 2510.01290), its evicting half: segments of one thought each, thinned out as the reasoning moves on.

At every refresh the sparsity of attention tells what kind of thought begins: an execution (dense), reasoning, or a
transition (sparse). Once a transition is complete, all segments before it go one rung down a ladder of retention; so
do, while the budget is exceeded, the least important and oldest ones. What stays of a segment are the medoids of its
keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import one_hot

from epiviz.models import ModelShape, cache_directory
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register
from epiviz.policies.medoids import medoids

TRANSITION, EXECUTION, REASONING = range(3)  # the less important, the sooner it shrinks
BINS = 1000  # of the histogram that the tertiles are read from
FILE = "thinkv_thresholds.json"
SHIPPED = Path(__file__).with_name(FILE)
LAYERS = 4  # layers whose attention is looked at


class UncalibratedError(ValueError):
    """Calibrated thresholds were asked for, and there are none for this model."""


@dataclass(frozen=True)
class Thresholds:
    """What tells thoughts apart on one model; ``epiviz calibrate thinkv`` finds them.

    Attributes
    ----------
    model : str
        The model's name, as it was loaded.
    depth : int
        Layers of the model that evict.
    layers : tuple of int
        Those whose sparsity is averaged, counted among the layers that evict.
    low, high : float
        A sparsity below ``low`` is an execution, from ``high`` on a transition, in between reasoning.
    shipped : bool
        They belong to the package.
    """

    model: str
    depth: int
    layers: tuple[int, ...]
    low: float
    high: float
    shipped: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or not all(0 <= layer < self.depth for layer in self.layers):
            raise ValueError(f"layers must be some of the {self.depth} that evict, got {self.layers}")
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"thresholds must ascend within 0 … 1, got {self.low} and {self.high}")

    def __str__(self) -> str:
        return f"{self.model}:{self.low:.3f}/{self.high:.3f}"

    def check(self, shape: ModelShape) -> Thresholds:
        """Return the thresholds; raise ValueError if they were found on a model of another depth."""
        if self.depth != len(shape.evicts):
            raise ValueError(
                f"the thresholds {self} were found on a model with {self.depth} evicting layers, and "
                f"{shape.name or 'this one'} has {len(shape.evicts)}; calibrate it: {command(shape.name)}"
            )
        return self


def calibrated(model: str) -> Thresholds | None:
    """Return the thresholds found for a model: those in the user's cache directory, else the shipped ones."""
    for file in (cache_directory() / FILE, SHIPPED):
        try:
            entry = json.loads(file.read_text(encoding="utf-8")).get(model) if file.is_file() else None
            if entry is not None:
                names = ("depth", "layers", "low", "high")
                return Thresholds(model, **{name: entry[name] for name in names}, shipped=file == SHIPPED)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} holds no thresholds ({error!r}); remove it and run {command(model)}") from error
    return None


def command(model: str) -> str:
    """Return the command that finds a model's thresholds."""
    return f"epiviz calibrate thinkv TRACES --model {model or 'MODEL'}"


class Segment(NamedTuple):
    """Consecutive slots of one thought: ``start … stop − 1``, of which the last ``fixed`` are protected."""

    start: int
    stop: int
    fixed: int
    thought: int


@register("thinkv")
@dataclass(frozen=True)
class ThinKV(Policy):
    """Keep the medoids of each segment's keys, fewer with every transition that follows it (ThinKV, "TBE").

    A segment is what comes between two refreshes. Its first token's sparsity, averaged over heads and the calibrated
    layers, decides what thought it is, for all layers alike; which of its tokens stay is decided per layer and KV head.
    If the budget is exceeded, transitions shrink before executions before reasoning, the oldest first, each as far as
    the ladder goes.

    Parameters
    ----------
    interval : int
        Tokens between two refreshes (τ).
    ladder : tuple of int
        How many slots a segment may keep, rung by rung. Shrinking takes the next rung below what it holds.
    thresholds : {"auto", "calibrated", "tertiles"} or Thresholds
        What tells thoughts apart. "calibrated": thresholds found for the model beforehand; raises
        :class:`UncalibratedError` if there are none. "tertiles", an approximation on the fly and printed as such: the
        token's place among the sparsities of its own sequence so far, in the last four layers. "auto" takes the first
        if it can, else the second.

    Notes
    -----
    The paper never shrinks the prompt: set ``protect_prompt=True``. A prompt that the budget does not protect is cut
    into segments like the rest, and counts as reasoning. The running segment does not shrink before the others.

    The paper fails when the minimum of every segment does not fit. Here whole segments go then, in the same order, and
    at last the running one shrinks to what is left.

    Refreshes fall on multiples of ``interval`` of the position, and on the first token after the prompt, so that
    the first segment may be shorter. Segments end there, and a transition is acted on at once, before the cache is
    full. The thresholds are those of a full cache; under eviction rows are shorter and look denser.
    """

    underfills: ClassVar[bool] = True

    interval: int = 128
    ladder: tuple[int, ...] = (64, 32, 16, 8, 4)
    thresholds: str | Thresholds = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ladder", tuple(self.ladder))
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1, got {self.interval}")
        if not self.ladder or any(b >= a for a, b in pairwise((*self.ladder, 0))):
            raise ValueError(f"ladder must descend to at least 1, got {self.ladder}")
        if not isinstance(self.thresholds, Thresholds) and self.thresholds not in ("auto", "calibrated", "tertiles"):
            raise ValueError(
                f"thresholds must be 'auto', 'calibrated', 'tertiles' or found ones, got {self.thresholds!r}"
            )

    @property
    def label(self) -> str:
        """The printed name; thresholds that belong to the package go unmentioned, anything else does not."""
        shipped = isinstance(self.thresholds, Thresholds) and self.thresholds.shipped
        return replace(self, thresholds="auto").label if shipped else super().label

    def for_model(self, shape) -> ThinKV:
        if isinstance(self.thresholds, Thresholds):
            self.thresholds.check(shape)
            return self
        found = None if self.thresholds == "tertiles" else calibrated(shape.name)
        if found is None and self.thresholds == "calibrated":
            raise UncalibratedError(
                f"ThinKV has no calibrated thresholds for {shape.name or 'a model without a name'!r}; find them with "
                f"`{command(shape.name)}`, or pass thresholds='tertiles' for an approximation on the fly"
            )
        return replace(self, thresholds=found.check(shape) if found else "tertiles")

    def needs(self, shape) -> Needs:
        return Needs(rows=True, tracks={"segment": torch.int32, "thought": torch.uint8})

    def due(self, seen, held, budget) -> bool:
        complete = seen % self.interval == 0 and held > budget.front + budget.recent
        return complete or super().due(seen, held, budget)

    def observe(self, new: New, state: State) -> None:
        positions = new.positions
        refresh = positions % self.interval == 0
        if new.first:
            refresh[:, 0] = True
        if new.first and new.prompt:
            state["segment"] = torch.full_like(positions[:, 0], -1)
            state["thought"] = torch.full_like(positions[:, 0], REASONING)
            if self.thresholds == "tertiles":
                state["sparsities"] = positions.new_zeros(len(positions), BINS + 1)
        thought = torch.full_like(positions, REASONING) if new.prompt else self.thoughts(new, state)
        index = torch.arange(positions.shape[1], device=positions.device)
        latest = torch.where(refresh, index, -1).cummax(1).values
        thought = torch.where(latest < 0, state["thought"][:, None], thought.gather(1, latest.clamp(min=0)))
        segment = state["segment"][:, None] + refresh.cumsum(1)
        new.write("segment", segment[None, :, None])
        new.write("thought", thought[None, :, None])
        state["segment"], state["thought"] = segment[:, -1], thought[:, -1]

    def thoughts(self, new: New, state: State) -> torch.Tensor:
        """Return the thought that each new token would begin, int64 ``[rows, q]``."""
        found = self.thresholds
        if found == "tertiles":
            depth = len(new.track("thought"))
            sparsity = mean_sparsity(new, range(max(0, depth - LAYERS), depth))
            return tertile_thoughts(sparsity, state)
        if isinstance(found, Thresholds):
            return classify(mean_sparsity(new, found.layers), found.low, found.high)
        raise RuntimeError(f"{self.label!r} does not know its model yet; call for_model(model.shape) first")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        priority = torch.full(slots.positions.shape, -torch.inf, device=slots.keys.device)
        tracks = (slots.tracks[name].cpu() for name in ("segment", "thought"))
        segments, thoughts = (track.transpose(0, 1) for track in tracks)
        for row, (segment, thought) in enumerate(zip(segments, thoughts, strict=True)):
            # All heads hold equally many slots of a segment, unless a wrapper chose for each.
            layouts, layout = segment.flatten(0, 1).unique(dim=0, return_inverse=True)
            layout = layout.view(segment.shape[:2])
            complete = int(slots.seen[0, row]) % self.interval == 0
            for number in range(len(layouts)):
                heads = layout == number
                pieces = cut(layouts[number], thought[heads][0], slots.budget)
                kept = shrink(pieces, slots.budget.total - slots.budget.front, self.ladder, complete)
                heads = heads.to(slots.keys.device)
                for piece, count in zip(pieces, kept, strict=True):
                    part = slice(piece.start, piece.stop - piece.fixed)
                    stays = medoids(slots.keys[:, row, :, part][heads], count - piece.fixed)
                    # By thought, for wrappers that keep other slots as well.
                    priority[:, row, :, part][heads] = torch.where(stays, float(piece.thought), -torch.inf)
        return Ranking(priority)


def attention_sparsity(rows: torch.Tensor, visible: torch.Tensor, least: float = 0.01) -> torch.Tensor:
    """Return the share of the visible slots whose weight is below ``least`` of the row's largest, mean over heads.

    Parameters
    ----------
    rows : ``[rows, heads, q, n]``
        Attention weights.
    visible : bool ``[rows, 1, q, n]``

    Returns
    -------
    float64 ``[rows, q]``
    """
    faint = (rows < least * rows.amax(-1, keepdim=True)) & visible
    # Whole numbers divided once: the result hangs neither on the batch nor on the order of a sum.
    return faint.sum((1, 3)).double() / (rows.shape[1] * visible.sum((1, 3)))


def mean_sparsity(new: New, layers: Sequence[int]) -> torch.Tensor:
    """Return the sparsity of the new tokens' attention, mean over heads and some layers, float64 ``[rows, q]``."""
    return sum(attention_sparsity(new.rows(layer), new.visible) for layer in layers) / len(layers)


def classify(x: torch.Tensor, low, high) -> torch.Tensor:
    """Return execution below ``low``, transition from ``high`` on, reasoning in between."""
    return torch.where(x < low, EXECUTION, torch.where(x < high, REASONING, TRANSITION))


def tertile_thoughts(sparsity: torch.Tensor, state: State) -> torch.Tensor:
    """Classify sparsities ``[rows, q]`` by their mid-rank among those of their row so far, themselves included.

    The state keeps a histogram of :data:`BINS` + 1 bins per row. A first or an always equal sparsity is reasoning.
    """
    bins = (sparsity * BINS).round().long()
    counts = state["sparsities"][:, None] + one_hot(bins, BINS + 1).cumsum(1)  # [rows, q, bins]
    state["sparsities"] = counts[:, -1]
    equal = counts.gather(2, bins[..., None])[..., 0]
    up_to = counts.cumsum(2).gather(2, bins[..., None])[..., 0]
    total = counts.sum(2)
    return classify(3 * (2 * up_to - equal), 2 * total, 4 * total)  # six times the mid-rank, in whole numbers


def cut(segment: torch.Tensor, thought: torch.Tensor, budget) -> list[Segment]:
    """Return the segments behind the protected front, from the tracks ``[n]`` of one head."""
    n, recent = len(segment), len(segment) - budget.recent
    front = min(budget.front, n)
    borders = (segment[front:].diff().nonzero()[:, 0] + front + 1).tolist()
    return [
        Segment(start, stop, min(max(stop - recent, 0), stop - start), int(thought[start]))
        for start, stop in pairwise([front, *borders, n])
    ]


def shrink(segments: Sequence[Segment], room: int, ladder: Sequence[int], complete: bool) -> list[int]:
    """Return how many slots each segment keeps, its protected ones included (ThinKV, "TBE").

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the text; the last one is running, or has just been completed.
    room : int
        Slots for all of them.
    ladder : sequence of int
    complete : bool
        The last segment has just been completed.
    """
    kept = [segment.stop - segment.start for segment in segments]
    order = sorted(range(len(segments) - 1), key=lambda i: (segments[i].thought, i))

    def step_down(i: int, rungs: Sequence[int]) -> bool:
        rung = max(next((rung for rung in rungs if rung < kept[i]), kept[i]), segments[i].fixed)
        shrinks, kept[i] = rung < kept[i], rung
        return shrinks

    if complete and segments[-1].thought == TRANSITION:
        for i in order:
            step_down(i, ladder)
    for rungs in (ladder, (0,)):
        while sum(kept) > room and any(step_down(i, rungs) for i in order):
            pass
    kept[-1] -= max(0, sum(kept) - room)
    return kept
