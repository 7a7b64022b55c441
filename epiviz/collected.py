"""One table from many runs."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from epiviz.manifest import MANIFEST, Manifest
from epiviz.sweeps import SWEEP, Sweep, status

LISTED = 8  # names in a message


class MixedVersionsError(ValueError):
    """Runs of different versions of the code, which one table must not mix unawares."""


def collect(folder: str | os.PathLike, name: str = "results", *, mix_versions: bool = False) -> pd.DataFrame:
    """Return one frame from a tree of runs.

    Parameters
    ----------
    folder : str or path
        Searched for ``<name>.parquet`` at any depth.
    name : str
        The table's name, as given to :func:`epiviz.save_results`.
    mix_versions : bool
        Take runs of different versions of the code together.

    Returns
    -------
    pandas.DataFrame
        All rows, with a first column ``run``: the run's folder relative to ``folder`` (its own name if the table lies
        in ``folder`` itself). Of a sweep, the columns ``notebook`` and the parameters of its grid follow; where a table
        has a column of that name, it stays and the parameter is ``given_<name>``. Columns that a run lacks are missing
        values in its rows.

    Raises
    ------
    FileNotFoundError
        There is no such folder, or no finished run in it.
    MixedVersionsError
        The runs were made by different versions of the package's source.

    Warns
    -----
    UserWarning
        Runs that did not finish, and cells of a sweep's grid that are missing, are left out, by name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r} to collect from")
    tables = {_run_name(path, folder): path for path in sorted(folder.rglob(f"{name}.parquet"))}
    manifests = {run: Manifest.load(path.parent) for run, path in tables.items() if (path.parent / MANIFEST).is_file()}
    finished = {run: path for run, path in tables.items() if run not in manifests or manifests[run].status == "done"}
    sweep = Sweep.load(folder) if (folder / SWEEP).is_file() else None
    _warn_of_missing(folder, sweep, tables, finished)
    if not finished:
        raise FileNotFoundError(
            f"no finished run under {str(folder)!r} holds a {name}.parquet ({len(tables)} unfinished); "
            "record one with save_results, or run the notebooks first"
        )
    if not mix_versions:
        _check_versions(folder, [manifests[run] for run in finished if run in manifests])
    return pd.concat([_read(path, run, sweep) for run, path in finished.items()], ignore_index=True)


def _read(path: Path, run: str, sweep: Sweep | None) -> pd.DataFrame:
    frame = pd.read_parquet(path)
    first = {"run": run}
    if sweep and run in sweep.cells:
        cell = sweep.cells[run]
        given = {"notebook": cell.stem, **cell.place}
        first |= {f"given_{key}" if key in frame else key: value for key, value in given.items()}
    for place, (key, value) in enumerate(first.items()):
        frame.insert(place, key, [value] * len(frame))
    return frame


def _warn_of_missing(folder: Path, sweep: Sweep | None, tables: Iterable[str], finished: Iterable[str]) -> None:
    if sweep:
        cells = status(folder).set_index("run")["status"]
        missing = [f"{sweep.cells[run]} ({cells[run]})" for run in sweep.cells if run not in finished]
        whole = len(sweep.cells)
    else:
        missing = [run for run in tables if run not in finished]
        whole = len(list(tables))
    if missing:
        text = f"left out {len(missing)} of {whole} runs that did not finish: {_some(missing)}"
        warnings.warn(text, stacklevel=3)


def _check_versions(folder: Path, runs: list[Manifest]) -> None:
    counts = Counter((run.source_sha256, run.commit or "no commit") for run in runs)
    if len({source for source, _ in counts}) > 1:
        told = ", ".join(f"{n} of {commit} ({source[:8]})" for (source, commit), n in counts.items())
        raise MixedVersionsError(
            f"the runs in {str(folder)!r} were made by {len(counts)} versions of the code: {told}; make them again, or "
            "pass mix_versions=True if that does not matter here"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _run_name(table: Path, folder: Path) -> str:
    relative = table.parent.relative_to(folder).as_posix()
    return folder.resolve().name if relative == "." else relative
