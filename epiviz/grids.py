"""Grids: many policies, budgets and seeds over traces, computed once, kept on disk, resumable.

A cell is one replay. It is stored under a hash of everything it depends on (the model's weights, the trace, the policy
and its parameters, the budget, the seed, this package's own code), so that a second call reads it back; see
:mod:`epiviz.cells`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import pandas as pd

from epiviz import cells as kept
from epiviz import frames
from epiviz.decode import progress_bar
from epiviz.engine import Session, make_rows
from epiviz.models import Model, cache_directory
from epiviz.policies.base import Budget, BudgetError, Policy
from epiviz.replays import Job, Replay, ReplayFileError, replay_together
from epiviz.trace import Trace

TOGETHER = 6  # cells that share one pass of the full cache; a kill loses at most so many
SUBJECT = (
    "attended",
    "attention",
    "cache",
    "draws",
    "engine",
    "models",
    "positions",
    "replays",
    "retention",
    "selector",
    "signals",
    "policies",
)  # fmt: skip  the modules that decide what a cell says


@dataclass(frozen=True)
class Cell:
    """One replay of a grid, and the file that holds it."""

    trace: Trace
    job: Job
    path: Path

    @property
    def name(self) -> str:
        budget = "" if self.job.budget is None else f", budget {self.job.budget.total:g}"
        return f"{self.job.policy.label} on {self.trace.name!r}{budget}, seed {self.job.seed}"


@dataclass(frozen=True, eq=False)
class ReplayGrid:
    """What a grid found: one tidy frame, and every replay on request.

    Attributes
    ----------
    cells : tuple of Cell
    frame : pandas.DataFrame
        One row per cell, see :func:`epiviz.frames.replays`.
    """

    cells: tuple[Cell, ...]

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def frame(self) -> pd.DataFrame:
        return frames.replays(self._load(cell) for cell in self.cells)

    def select(self, **wanted) -> list[Replay]:
        """Return the replays whose columns of ``frame`` have these values, in the frame's order.

        Raises
        ------
        KeyError
            There is no such column, or no such cell; the message lists what there is.
        """
        chosen = pd.Series(True, index=self.frame.index)
        for column, value in wanted.items():
            if column not in self.frame:
                raise KeyError(f"a grid has no column {column!r}; it has {', '.join(self.frame.columns)}")
            chosen &= self.frame[column] == value
        if not chosen.any():
            there = {column: sorted(self.frame[column].unique().tolist(), key=str) for column in wanted}
            raise KeyError(f"no cell with {wanted}; there are {there}")
        return [self._load(self.cells[index]) for index in self.frame.index[chosen]]

    def _load(self, cell: Cell) -> Replay:
        return Replay.load(cell.path, cell.trace)


def replay_grid(
    model: Model,
    trace: Trace | Sequence[Trace],
    policies: Iterable[str | Policy],
    budgets: Iterable[int | Budget],
    seeds: Iterable[int] = (0,),
    *,
    positions: str = "absolute",
    cache: str | Path | None = None,
    progress: bool = True,
) -> ReplayGrid:
    """Replay every policy under every budget with every seed on every trace.

    Parameters
    ----------
    model : Model
    trace : Trace or sequence of Trace
        Each once; different ones of the same name get the beginning of their fingerprint behind it.
    policies : iterable of str or Policy
        ``full`` needs no budget and is one cell per trace and seed.
    budgets : iterable of int or Budget
        A number is ``Budget(total=number)``.
    seeds : iterable of int
        Policies that draw nothing give the same cell for each.
    positions : str
        As in :func:`epiviz.generate`.
    cache : str or Path, optional
        Folder of the finished cells; by default ``replays`` in the user's cache directory. Several processes may
        share it.
    progress : bool

    Returns
    -------
    ReplayGrid

    Raises
    ------
    BudgetError
        A budget that cannot hold what it must on one of the traces; raised before anything is computed.
    ForeignTraceError, UnknownPolicyError, ValueError
        As in :func:`epiviz.replay`.
    """
    folder = Path(cache) if cache is not None else cache_directory() / "replays"
    traces = _apart([trace] if isinstance(trace, Trace) else trace)
    weights, cells = model.fingerprint(), []
    for each, (policy, budget, seed) in product(traces, kept.combinations(policies, budgets, seeds)):
        each.check_model(model)
        job = Job(policy, budget, seed, positions)
        _check(model, each, job)
        cells.append(Cell(each, job, folder / f"{cell_key(model, weights, each, job)}.safetensors"))
    if not cells:
        raise ValueError("an empty grid: give at least one trace, policy, budget and seed")
    _compute(model, cells, progress)
    return ReplayGrid(tuple(cells))


def _apart(traces: Iterable[Trace]) -> list[Trace]:
    """Return the traces, each once; different ones of one name get a part of their fingerprint into it."""
    once = list({trace.fingerprint: trace for trace in traces}.values())
    names = Counter(trace.name for trace in once)
    return [
        trace if names[trace.name] == 1 else replace(trace, name=f"{trace.name} · {trace.fingerprint[:6]}")
        for trace in once
    ]


def _check(model: Model, trace: Trace, job: Job) -> None:
    """Raise what a replay would raise before its first token, about a budget with the cell's name."""
    prompt, rest = trace.tokens[: trace.prompt_length].tolist(), len(trace) - trace.prompt_length
    try:
        rows = make_rows([prompt], job.policy, job.budget, rest)
        Session(model, job.policy, rows, rest, job.seed, job.positions)
    except BudgetError as error:
        raise BudgetError(f"{job.policy.label} on {trace.name!r}: {error}") from error


def cell_key(model: Model, weights: str, trace: Trace, job: Job) -> str:
    """Return the hash under which a cell is stored; ``weights`` is the model's fingerprint, which takes a moment."""
    return kept.key(
        kept.code_hash(SUBJECT),
        weights,
        trace.fingerprint,
        repr(job.policy.for_model(model.shape)),
        kept.foreign_source(job.policy),
        repr(job.budget),
        job.seed,
        job.positions,
    )


# -- computing ---------------------------------------------------------------------------------------------------------


def _compute(model: Model, cells: Sequence[Cell], progress: bool) -> None:
    """Compute what is missing, a few cells of a trace at a time; leave cells that others compute for last."""
    missing = [cell for cell in {cell.path: cell for cell in cells}.values() if not _readable(cell)]
    with progress_bar(len(missing), "replay grid", progress, unit="cell") as bar:
        for wait in (False, True):
            # Waiting with one cell at a time only: two processes that hold one each and want both would wait for ever.
            for group in _groups(missing, 1 if wait else TOGETHER):
                with ExitStack() as locks:
                    mine = [cell for cell in group if not _readable(cell) and kept.take(cell.path, locks, wait)]
                    mine = [cell for cell in mine if not _readable(cell)]  # another may have finished it meanwhile
                    if mine:
                        bar.set_postfix_str(mine[0].name, refresh=False)
                        _finish(model, mine)
                        bar.update(len(mine))


def _groups(cells: Sequence[Cell], size: int) -> Iterator[list[Cell]]:
    by_trace: dict[int, list[Cell]] = {}
    for cell in cells:
        by_trace.setdefault(id(cell.trace), []).append(cell)
    for of_trace in by_trace.values():
        for start in range(0, len(of_trace), size):
            yield of_trace[start : start + size]


def _finish(model: Model, cells: Sequence[Cell]) -> None:
    for cell, found in zip(
        cells, replay_together(model, cells[0].trace, [cell.job for cell in cells], progress=False), strict=True
    ):
        found.save(cell.path)


def _readable(cell: Cell) -> bool:
    """A cell's file is there and whole; a damaged one is computed again."""
    if not cell.path.is_file():
        return False
    try:
        Replay.load(cell.path, cell.trace)
    except ReplayFileError as error:
        print(f"computing {cell.name} again: {error}", file=sys.stderr)
        cell.path.unlink(missing_ok=True)
        return False
    return True
