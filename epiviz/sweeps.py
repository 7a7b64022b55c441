"""Sweeps: notebooks run over a grid of parameters, in a folder that says what it holds and what is missing.

``sweep.json`` lists the cells of the grid, each run lies in ``<notebook stem>-<hash of its cell>/``. The same command
goes on where it was left, a larger grid grows the folder, and several launchers may work on it at once: see
:mod:`epiviz.jobs`. Where runs are made is the business of :mod:`epiviz.executors`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from epiviz import runs
from epiviz.executors import Executor
from epiviz.executors.local import LocalExecutor
from epiviz.failures import cannot_write
from epiviz.jobs import LOCKS, Job, is_claimed, settled
from epiviz.manifest import MANIFEST, Manifest, text_hash
from epiviz.parameters import ParameterError, check_parameters, profile_parameters
from epiviz.progress import Progress
from epiviz.results import write_text_atomically

SWEEP = "sweep.json"
ENDED = ("done", "failed", "stopped")


class SweepFolderError(OSError):
    """A folder that a sweep cannot use: it holds another sweep, or nothing can be written there."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a notebook and its place in the grid."""

    notebook: str
    place: dict[str, Any]

    @property
    def stem(self) -> str:
        return Path(self.notebook).stem

    def __str__(self) -> str:
        return " ".join([self.stem, *(f"{name}={value}" for name, value in self.place.items())])


@dataclass(frozen=True)
class Sweep:
    """What a sweep's folder is to hold.

    Attributes
    ----------
    folder : Path
        Not stored: a folder may move.
    profile : str or None
    settings : dict
        Parameters that are the same in every run; they go before the profile's.
    cells : dict of str to Cell
        By the name of the run's folder.
    """

    folder: Path
    profile: str | None
    settings: dict[str, Any]
    cells: dict[str, Cell]

    @property
    def axes(self) -> list[str]:
        """The parameters that the grid varies."""
        return list(dict.fromkeys(name for cell in self.cells.values() for name in cell.place))

    @cached_property
    def planned(self) -> dict[str, Manifest]:
        """The planned run of each cell; wrong parameters raise."""
        notebooks = {cell.notebook for cell in self.cells.values()}
        profiles = {each: profile_parameters(each, self.profile) if self.profile else {} for each in notebooks}
        return {
            name: runs.plan(cell.notebook, profiles[cell.notebook] | self.settings | cell.place, self.folder / name)
            for name, cell in self.cells.items()
        }

    def save(self) -> None:
        """Write ``sweep.json``, with the cells that the folder was to hold before.

        Raises
        ------
        SweepFolderError
            The folder holds a sweep with other settings, or nothing can be written there.
        """
        try:
            (self.folder / LOCKS).mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / LOCKS / "sweep.lock"):
                whole = replace(self, cells=self._earlier() | self.cells)
                stored = {name: value for name, value in asdict(whole).items() if name != "folder"}
                write_text_atomically(self.folder / SWEEP, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        except SweepFolderError:
            raise
        except OSError as error:
            raise SweepFolderError(cannot_write(error, self.folder)) from error

    def _earlier(self) -> dict[str, Cell]:
        if not (self.folder / SWEEP).is_file():
            return {}
        earlier = Sweep.load(self.folder)
        for what, before, asked in (
            ("profile", earlier.profile, self.profile),
            ("settings", earlier.settings, self.settings),
            ("grid parameters", sorted(earlier.axes), sorted(self.axes)),
        ):
            if before != asked:
                raise SweepFolderError(
                    f"{str(self.folder)!r} holds a sweep with {what} {before!r}, this one has {asked!r}: "
                    "choose another folder"
                )
        return earlier.cells

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Sweep:
        """Read the sweep of a folder.

        Raises
        ------
        FileNotFoundError
            The folder holds no sweep.
        """
        path = Path(folder) / SWEEP
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} holds no sweep: it has no {SWEEP}")
        stored = json.loads(path.read_text(encoding="utf-8"))
        cells = {name: Cell(**cell) for name, cell in stored["cells"].items()}
        return cls(Path(folder), stored["profile"], stored["settings"], cells)


def plan_sweep(
    notebooks: Iterable[str | os.PathLike],
    grid: Mapping[str, Sequence[Any]],
    *,
    out: str | os.PathLike,
    profile: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Sweep:
    """Lay out a grid, and check every parameter of every run before anything starts.

    Parameters
    ----------
    notebooks : paths or stems
    grid : mapping of str to a sequence of values
        Every combination is a run of every notebook. Values may be texts of a command line.
    out : str or path
        The sweep's folder.
    profile : str, optional
        A file in ``profiles/`` beside the notebooks. Default: what the notebooks say themselves.
    settings : mapping, optional
        Parameters that are the same in every run.

    Raises
    ------
    ParameterError
        A name that a notebook does not have, a value that does not fit, a policy that is not registered, the same
        cell twice.
    FileNotFoundError
        There is no such notebook or profile.
    """
    settings = dict(settings or {})
    if both := sorted(set(settings) & set(grid)):
        raise ParameterError(f"{', '.join(both)} cannot be a setting of every run and vary in the grid")
    _check_policies({**grid, **{name: [value] for name, value in settings.items()}})
    folder = Path(out)
    cells: dict[str, Cell] = {}
    for notebook in runs.find_notebooks([str(each) for each in notebooks]):
        check_parameters(notebook, settings)
        for combination in itertools.product(*grid.values()):
            cell = Cell(str(notebook), check_parameters(notebook, dict(zip(grid, combination, strict=True))))
            name = f"{cell.stem}-{text_hash(json.dumps([profile, settings, cell.place], sort_keys=True))[:12]}"
            if name in cells:
                raise ParameterError(f"the grid has {cell} twice" + _elsewhere(cells[name], cell))
            cells[name] = cell
    sweep = Sweep(folder, profile, settings, cells)
    sweep.planned  # noqa: B018  checks the parameters of every run together
    return sweep


def run_sweep(
    sweep: Sweep,
    executor: Executor | None = None,
    *,
    retry_failed: bool = False,
    keep: bool = False,
    cell_timeout: int | None = None,
    say: runs.Say = runs.say_aloud,
) -> list[Manifest]:
    """Make the runs of a sweep that are missing; a run that fails does not stop the others.

    Parameters
    ----------
    sweep : Sweep
        From :func:`plan_sweep`.
    executor : Executor, optional
        From :func:`epiviz.executors.get`. Default: local processes.
    retry_failed : bool
        Try failed runs again, too. Runs that were interrupted always are.
    keep : bool
        Let finished runs of other versions of the code stand; without, they are made again.
    cell_timeout : int, optional
        Seconds that one cell may take.
    say : callable
        Receives each line of progress.

    Returns
    -------
    list of Manifest
        One for each cell, in order; ``reused`` marks those that stood.
    """
    sweep.save()
    jobs = plan_jobs(sweep, retry_failed=retry_failed, keep=keep, cell_timeout=cell_timeout)
    executor = executor or LocalExecutor()
    found = standing(jobs)
    missing = [job for job in jobs if job.name not in found]
    say(overview(sweep, jobs, found, executor.width()))
    if any(job.run.parameters.get("model") == runs.BUNDLED_MODEL for job in missing):
        runs.fetch_bundled_model(say)
    with Progress(len(missing), say) as progress:
        for wait in (False, True):  # what another launcher is at, is waited for at the end
            left = [replace(job, wait=wait) for job in missing if job.name not in found]
            if not left:
                break
            with closing(executor.run(left)) as ended:  # whatever happens here, no run is left without a launcher
                for job, run in ended:
                    if run is not None:
                        found[job.name] = run
                        progress.tell(str(sweep.cells[job.name]), run)
    return [found[job.name] for job in jobs]


def plan_jobs(sweep: Sweep, *, retry_failed: bool = False, keep: bool = False, cell_timeout=None) -> list[Job]:
    """Return a job for each cell of a sweep."""
    since = runs.now() if retry_failed else ""
    return [Job(run, since, keep, cell_timeout) for run in sweep.planned.values()]


def standing(jobs: Iterable[Job]) -> dict[str, Manifest]:
    """Return the earlier runs that need not be made again."""
    return {job.name: run for job in jobs if (run := settled(job))}


def overview(sweep: Sweep, jobs: Sequence[Job], found: Mapping[str, Manifest], width: int) -> str:
    """Return in words what a sweep has (``found``, from :func:`standing`), lacks, and will take."""
    failed = sum(run.status == "failed" for run in found.values())
    left = [job.run for job in jobs if job.name not in found]
    text = f"{len(jobs)} runs in {str(sweep.folder)!r}: {len(found) - failed} done, {len(left)} to make"
    text += f", {failed} failed before (--retry-failed tries them again)" if failed else ""
    outdated = [run for run in left if _is_outdated(run)]
    if outdated:
        text += f"\n{len(outdated)} finished runs are of another version of the code (--keep lets them stand)"
    return f"{text}\n{_estimate(sweep, left, width)}" if left else text


def status(folder: str | os.PathLike) -> pd.DataFrame:
    """Return how far each run of a sweep is.

    Returns
    -------
    pandas.DataFrame
        One row per cell: ``run`` (its folder), ``notebook``, the grid's parameters, ``status`` ("planned", "running",
        "done", "failed" or "stopped"), ``seconds``, ``host``, ``device``, and ``told``: its finding, or its error.
    """
    sweep = Sweep.load(folder)
    rows = []
    for name, cell in sweep.cells.items():
        row = {"run": name, "notebook": cell.stem, **cell.place}
        path = sweep.folder / name
        if (path / MANIFEST).is_file():
            run = Manifest.load(path)
            gone = run.status == "running" and not is_claimed(sweep.folder / LOCKS / f"{name}.lock")
            row |= {"status": "stopped" if gone else run.status, "seconds": run.seconds, "host": run.host}
            row |= {"device": run.device, "told": runs.outcome(run)}
        else:
            row |= {"status": "planned", "seconds": None, "host": None, "device": None, "told": ""}
        rows.append(row)
    return pd.DataFrame(rows)


def summary(sweep: Sweep, made: Sequence[Manifest]) -> str:
    """Return for a terminal how a sweep ended: counts, and why runs failed."""
    count = {each: sum(run.status == each for run in made) for each in ENDED}
    lines = [f"{sum(run.reused for run in made)} reused; " + ", ".join(f"{n} {each}" for each, n in count.items())]
    lines += [
        f"  {sweep.cells[run.folder.name]}: {run.status}, {runs.outcome(run)}" for run in made if run.status != "done"
    ]
    if count["failed"]:
        lines.append("the same command with --retry-failed tries the failed ones again")
    return "\n".join([*lines, f"one table of all: ev.collect({str(sweep.folder)!r})"])


def _estimate(sweep: Sweep, left: Sequence[Manifest], width: int) -> str:
    """Guess from finished runs, here and in the folders beside, how long the missing ones take."""
    known: dict[tuple, list[float]] = {}
    for path in sweep.folder.resolve().parent.glob(f"*/*/{MANIFEST}"):
        try:
            run = Manifest.load(path.parent)
        except FileExistsError:  # somebody else's: nothing to learn from
            continue
        if run.status == "done" and run.seconds is not None:
            known.setdefault((run.stem, run.parameters.get("profile")), []).append(run.seconds)
    keys = [(run.stem, run.parameters.get("profile")) for run in left]
    if strange := sorted({stem for stem, profile in keys if (stem, profile) not in known}):
        return f"no estimate: no run of {', '.join(strange)} has finished yet with this profile"
    seconds = sum(statistics.median(known[key]) for key in keys) / max(1, min(width, len(left)))
    return f"about {duration(seconds)} on {min(width, len(left))} workers, as earlier runs took"


def duration(seconds: float) -> str:
    """Return a time span in words.

    Examples
    --------
    >>> duration(42), duration(600), duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _is_outdated(planned: Manifest) -> bool:
    if not (planned.folder / MANIFEST).is_file():
        return False
    found = Manifest.load(planned.folder)
    return found.status == "done" and found.asked == planned.asked and found.key != planned.key


def _check_policies(values: Mapping[str, Sequence]) -> None:
    """Refuse unknown policies before the first run starts: ``others`` may be ``all``, or several between commas."""
    lists = [str(value) for value in values.get("others", ()) if str(value) != "all"]
    names = [*map(str, values.get("policy", ())), *(name.strip() for each in lists for name in each.split(","))]
    names = [name for name in names if name and not name.partition(":")[0].endswith(".py")]
    if names:
        from epiviz import policies  # imports torch

        for name in names:
            try:
                policies.get(name)
            except policies.UnknownPolicyError as error:
                raise ParameterError(str(error)) from error


def _elsewhere(first: Cell, second: Cell) -> str:
    return "" if first.notebook == second.notebook else f": {first.notebook} and {second.notebook} share a name"
