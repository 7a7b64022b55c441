"""Evaluation: problems × samples × policies × budgets × seeds, each text with an outcome, computed once and resumable.

A cell is a policy under a budget with a seed. Its texts are kept under a hash of everything that decides them (see
:mod:`epiviz.cells`), one small file for every few texts: a second call reads them back, more problems or samples add to
them, and a call that was killed goes on where it was. What a text is worth is told anew when the grader has changed.
"""

from __future__ import annotations

import operator
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path

import numpy as np
import pandas as pd

from epiviz import cells as kept
from epiviz import frames
from epiviz.attempts import Attempt, Cell, Settings, make_attempts
from epiviz.continuous import Continuous
from epiviz.decode import Sampler, progress_bar
from epiviz.engine import Meter, Row, Session, uninterrupted
from epiviz.models import Model, cache_directory
from epiviz.policies.base import Budget, BudgetError, Policy, get
from epiviz.positions import check_mode
from epiviz.results import write_atomically
from epiviz.tasks.answers import thinks_first
from epiviz.tasks.outcomes import OUTCOMES, UNGRADED, Judgement
from epiviz.tasks.problems import Problem

WRITE_SECONDS = 10.0  # a kill loses the texts of at most so long, and those being written
MIB = 2**20


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What an evaluation found.

    Attributes
    ----------
    frame : pandas.DataFrame
        One row per problem, sample, policy, budget and seed; see :func:`evaluate`.
    texts : tuple of str
        What was written, row by row.
    """

    frame: pd.DataFrame
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.frame)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per policy and budget, see :func:`epiviz.frames.accuracy`."""
        return frames.accuracy(self.frame)

    @property
    def accuracy(self) -> float:
        """Correct ÷ (all − errors), of the only policy and budget."""
        return float(self._only["accuracy"])

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of ``accuracy``, which takes the problems as the sample; see :func:`epiviz.stats.accuracy`."""
        return float(self._only["low"]), float(self._only["high"])

    @property
    def outcomes(self) -> dict[str, int]:
        """How many texts had which outcome, of the only policy and budget."""
        self._only  # noqa: B018  counts over several policies would say nothing
        counts = Counter(self.frame["outcome"])
        return {outcome: counts[outcome] for outcome in (*OUTCOMES, UNGRADED) if counts[outcome]}

    @property
    def _only(self) -> pd.Series:
        if len(self.table) != 1:
            raise ValueError(
                f"this evaluation has {len(self.table)} pairs of policy and budget, so it has no one accuracy; read "
                "them in .table"
            )
        return self.table.iloc[0]

    def __repr__(self) -> str:
        told = [f"<{len(self)} texts"]
        for row in self.table.head(8).itertuples():
            under = "" if np.isnan(row.budget) else f" at {row.budget:g}"
            errors = f", {row.errors} errors" if row.errors else ""
            told.append(f"{row.policy}{under}: {row.accuracy:.1%} [{row.low:.1%}, {row.high:.1%}]{errors}")
        return "; ".join(told) + (" …>" if len(self.table) > 8 else ">")


def evaluate(
    model: Model,
    problems: Sequence[Problem],
    policy: str | Policy | Iterable[str | Policy] = "full",
    budget: Budget | int | Iterable[Budget | int] | None = None,
    *,
    samples: int = 1,
    seed: int | Iterable[int] = 0,
    max_new_tokens: int = 512,
    positions: str = "absolute",
    sampling: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    raw: bool = False,
    thinks: bool | None = None,
    batch_size: int = 64,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Evaluation:
    """Let a model solve problems while its cache is being evicted, and say what became of each.

    Parameters
    ----------
    model : Model
        With a tokenizer.
    problems : sequence of Problem
    policy : str or Policy, or several
        ``full`` needs no budget and is one cell per seed.
    budget : Budget or int, or several
        A number is ``Budget(total=number)``.
    samples : int
        Texts per problem. Greedy texts differ only where the policy draws.
    seed : int or several
        Keys every draw of the policy and of the sampling, together with the sample.
    max_new_tokens : int
    positions, sampling, temperature, top_p, top_k, raw
        As in :func:`epiviz.generate`.
    thinks : bool, optional
        The model thinks before it answers, so that only what follows ``</think>`` counts. By default as its chat
        template says; say False where it is told not to think, or where a raw prompt does not ask for it.
    batch_size : int
        Texts written at a time; one that ends leaves its place to the next. A text does not depend on it, but for
        rounding: in single precision a batch of another size may decide between nearly equal tokens otherwise.
    cache : str or Path, optional
        Folder of the finished texts; by default ``evaluations`` in the user's cache directory. Several processes may
        share it.
    progress : bool

    Returns
    -------
    Evaluation
        Its ``frame`` has a row per problem, sample, policy, budget and seed: ``problem``, ``sample``, ``policy``,
        ``budget`` (as asked: slots, or a share below 1; NaN for the full cache) and ``slots`` (the same resolved),
        ``sinks``, ``recent``, ``buffer``, ``protect_prompt``, ``seed``, ``positions``; ``outcome`` (one of
        :data:`epiviz.tasks.outcomes.OUTCOMES`), ``correct``, ``answer``, ``unfinished_answer``, ``unfinished_right``,
        ``status``, ``error`` (its message); ``prompt_tokens``, ``tokens`` (generated), ``evicted`` (something left, or
        was not attended, before the text ended), ``evictions``, ``mean_slots``, ``peak_slots``, ``prefill_peak_slots``,
        ``attended_slots``, ``kv_mib``, ``state_mib``, ``bounded``, ``seconds`` (the text's share of its batch's time);
        and what the task knows of the problem (``kind``, …).

    Raises
    ------
    BudgetError, UnknownPolicyError, TypeError, ValueError
        Bad input; nothing has been computed then. What is raised later, inside a policy or the model, is the outcome
        ``error`` of the texts that raise it alone; the others go on. A later call tries them again.
    KeyboardInterrupt
        Ctrl-C was pressed: what had ended is kept, and the same call goes on from there.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.name!r} has no tokenizer; answers are read in a text")
    for name, number in (("samples", samples), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if operator.index(number) < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    sampler, positions = Sampler.of(model, sampling, temperature, top_p, top_k), check_mode(positions)
    thinks = thinks_first(model.tokenizer) if thinks is None else thinks
    settings = Settings(model, sampler, max_new_tokens, positions, thinks)
    attempts = make_attempts(model, problems, samples, raw)
    home = Path(cache) if cache is not None else cache_directory() / "evaluations"
    named = [get(each) for each in _several(policy, (str, Policy))]
    limits = _several(budget, (Real, Budget))
    seeds = _several(seed, Integral)
    for one in named:
        if (one.evicts or one.selects) and not limits:
            raise BudgetError(f"policy {one.label!r} needs a budget; pass epiviz.Budget(total=…), or policy='full'")
    cells = [Cell(*chosen, home / settings.key(*chosen)) for chosen in kept.combinations(named, limits, seeds)]
    if not cells:
        raise ValueError("nothing to evaluate: give at least one policy and one seed")
    for cell in cells:
        settings.check(cell, attempts)
    _compute(settings, cells, attempts, batch_size, progress)
    return _read(settings, cells, attempts)


def _several(given, kinds) -> list:
    """Return one or several values as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, kinds) else list(given)


# -- computing ---------------------------------------------------------------------------------------------------------


def _compute(
    settings: Settings, cells: Sequence[Cell], attempts: Sequence[Attempt], batch_size: int, progress: bool
) -> None:
    """Write what is missing, cell by cell; cells that another process is at come last."""
    unfinished = [cell for cell in cells if _missing(cell, attempts)]
    missing = sum(len(_missing(cell, attempts)) for cell in unfinished)
    with progress_bar(missing, "evaluation", progress, unit="text") as bar:
        for wait in (False, True):
            taken_by_others = []
            for cell in unfinished:
                with ExitStack() as locks:
                    if not kept.take(cell.folder, locks, wait):
                        taken_by_others.append(cell)
                        continue
                    bar.set_postfix_str(cell.name, refresh=False)
                    writer = _Writer(settings, cell, bar)
                    try:  # another process may have written some meanwhile
                        _run(settings, cell, _missing(cell, attempts), batch_size, writer)
                    finally:
                        writer.flush()
                    writer.join_parts()
            unfinished = taken_by_others


def _missing(cell: Cell, attempts: Sequence[Attempt]) -> list[Attempt]:
    there = {name for name, record in _records(cell.folder).items() if not record["error"]}
    return [attempt for attempt in attempts if attempt.id not in there]


def _run(settings: Settings, cell: Cell, attempts: Sequence[Attempt], places: int, writer: _Writer) -> None:
    """Let all attempts be written; what raises is split until it is clear which attempt raises alone."""
    rows = settings.rows(cell, attempts)
    attempt_of = {id(row): attempt for row, attempt in zip(rows, attempts, strict=True)}

    def begin(some: Sequence[Row]) -> Session:
        writer.stop_if_interrupted()
        return Session(settings.model, cell.policy, some, settings.max_new_tokens, cell.seed, settings.positions)

    batch = Continuous(
        begin, rows, places, settings.sampler, lambda row, seconds: writer.add(attempt_of[id(row)], row, seconds)
    )
    while batch.waiting:
        try:
            batch.run()
        except Exception as error:
            if writer.busy:  # the grader or the disk failed, not the policy
                raise
            hit = [attempt_of[id(row)] for row in batch.running]
            batch.running = []
            if len(hit) == 1:
                writer.fail(hit[0], error)
                continue
            for half in (hit[: len(hit) // 2], hit[len(hit) // 2 :]):
                _run(settings, cell, half, len(half), writer)
    writer.stop_if_interrupted()


class _Writer:
    """Collects the texts of a cell and writes them down every few seconds."""

    def __init__(self, settings: Settings, cell: Cell, bar):
        self.settings, self.cell, self.bar = settings, cell, bar
        self.records: list[dict] = []
        self.busy = self._interrupted = False
        self._at = time.perf_counter()

    def add(self, attempt: Attempt, row: Row, seconds: float) -> None:
        record = {"status": row.status, "error": "", "tokens": row.tokens, "seconds": seconds}
        self._put(attempt, record | asdict(row.meter))

    def fail(self, attempt: Attempt, error: Exception) -> None:
        told = f"{type(error).__name__}: {error}"
        nothing = dict.fromkeys((field.name for field in fields(Meter)), None)
        self._put(attempt, {"status": "", "error": told, "tokens": [], "seconds": np.nan, **nothing})

    def stop_if_interrupted(self) -> None:
        """Raise for a Ctrl-C that came while a text was graded: the decode loop has no row left to tell of it."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _put(self, attempt: Attempt, record: dict) -> None:
        self.busy = True
        try:
            with uninterrupted():
                self.records.append({"id": attempt.id, **record, **self.settings.judge(attempt, record)})
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        self.bar.update()
        if time.perf_counter() - self._at > WRITE_SECONDS:
            self.flush()
        self.busy = False

    def flush(self) -> None:
        if self.records:
            _write(self.cell.folder, self.records)
        self.records, self._at = [], time.perf_counter()

    def join_parts(self) -> None:
        """Make one file of all, so that reading stays fast; the parts go once it is there."""
        parts = list(self.cell.folder.glob("*.parquet"))
        if len(parts) > 1:
            _write(self.cell.folder, list(_records(self.cell.folder).values()))
            for part in parts:
                part.unlink()


def _write(folder: Path, records: list[dict]) -> None:
    frame = pd.DataFrame(records)
    path = folder / f"{uuid.uuid4().hex}.parquet"
    write_atomically(path, lambda temporary: frame.to_parquet(temporary, index=False, compression="zstd"))


def _records(folder: Path) -> dict[str, dict]:
    """Return the records of a cell by attempt; of several, one without an error."""
    while True:
        try:
            return _read_parts(folder)
        except FileNotFoundError:  # another process has joined the parts meanwhile: one file of all is there by now
            continue


def _read_parts(folder: Path) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for path in sorted(folder.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns):
        for record in pd.read_parquet(path).to_dict("records"):
            if record["id"] not in found or found[record["id"]]["error"]:
                found[record["id"]] = record | {"tokens": [int(token) for token in record["tokens"]]}
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(settings: Settings, cells: Sequence[Cell], attempts: Sequence[Attempt]) -> Evaluation:
    rows, texts = [], []
    for cell in cells:
        records = _records(cell.folder)
        for attempt in attempts:
            record = records[attempt.id]
            if record["grader"] != settings.grader:
                record |= settings.judge(attempt, record)
            rows.append(_row(settings, cell, attempt, record))
            texts.append(settings.text(record["status"], record["tokens"]))
    frame = pd.DataFrame(rows)
    whole = ["slots", "sinks", "recent", "buffer", "tokens", "evictions", "peak_slots", "prefill_peak_slots"]
    frame = frame.astype(dict.fromkeys(whole, "Int64") | dict.fromkeys(["protect_prompt", "evicted"], "boolean"))
    if len(errors := frame[frame["outcome"] == "error"]):
        where = errors.iloc[0]
        warnings.warn(
            f"{len(errors)} of {len(frame)} texts ended in an error, the first on {where['problem']} under "
            f"{where['policy']}: {where['error']}",
            stacklevel=3,
        )
    return Evaluation(frame, tuple(texts))


def _row(settings: Settings, cell: Cell, attempt: Attempt, record: dict) -> dict:
    budget, failed = cell.budget, bool(record["error"])
    judged = Judgement(**{field.name: record[field.name] for field in fields(Judgement)})
    slots = None if budget is None else budget.resolve(len(attempt.prompt), settings.max_new_tokens).total
    parts = ("sinks", "recent", "buffer", "protect_prompt")
    row = {
        "model": settings.model.name,
        "problem": attempt.problem.id,
        "sample": attempt.sample,
        "policy": cell.policy.label,
        "budget": np.nan if budget is None else float(budget.total),
        "slots": slots,
        **{name: None if budget is None else getattr(budget, name) for name in parts},
        "seed": cell.seed,
        "positions": settings.positions,
        "outcome": judged.outcome,
        "correct": judged.correct,
        "answer": judged.answer,
        "unfinished_answer": judged.unfinished_answer,
        "unfinished_right": judged.unfinished_right,
        "status": record["status"],
        "error": record["error"],
        "prompt_tokens": len(attempt.prompt),
        "tokens": None if failed else len(record["tokens"]),
        "evicted": None if failed else record["evictions"] > 0 or record["attended_slots"] < record["mean_slots"],
        **{name: record[name] for name in ("evictions", "mean_slots", "peak_slots", "prefill_peak_slots")},
        "attended_slots": record["attended_slots"],
        "kv_mib": np.nan if failed else record["kv_bytes"] / MIB,
        "state_mib": np.nan if failed else record["state_bytes"] / MIB,
        "bounded": cell.policy.bounded,
        "seconds": record["seconds"],
    }
    known = {name: value for name, value in attempt.problem.meta.items() if isinstance(value, bool | int | float | str)}
    return row | {name: value for name, value in known.items() if name not in row}
