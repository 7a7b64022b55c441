"""Results: what a notebook records; :mod:`epiviz.collected` makes one table of many records.

A run's folder holds ``results.parquet`` (one row per observation), ``finding.json`` (the one sentence a reader should
take away) and, if :mod:`epiviz.runs` made it, ``manifest.json``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd

FINDING = "finding.json"


def save_results(
    frame: pd.DataFrame, out_dir: str | os.PathLike, finding: str | None = None, name: str = "results"
) -> Path:
    """Record a table and the sentence that sums it up.

    Parameters
    ----------
    frame : pandas.DataFrame
        One row per observation. Named index levels become columns; an unnamed index is dropped.
    out_dir : str or path
        Folder of the run; made if it is missing.
    finding : str, optional
        One sentence, written to ``finding.json``.
    name : str
        The table goes to ``<name>.parquet``.

    Returns
    -------
    Path
        The written table.

    Raises
    ------
    TypeError
        ``frame`` is no data frame, or ``finding`` no text.
    ValueError
        The frame is empty, its columns cannot be stored, or the finding is not one line.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_results(pd.DataFrame({"budget": [64, 128]}), folder, "A larger budget keeps more.").name
    'results.parquet'
    """
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"save_results takes a pandas DataFrame, not {type(frame).__name__}; try pd.DataFrame(…)")
    if frame.empty:
        raise ValueError(
            f"the frame has {len(frame)} rows and {len(frame.columns)} columns; an empty table is no result: "
            "check what filtered everything out"
        )
    if finding is not None:
        finding = _one_line(finding)
    levels = [level for level in frame.index.names if level is not None]
    frame = frame.reset_index(level=levels).reset_index(drop=True) if levels else frame.reset_index(drop=True)
    _check_columns(frame)

    folder = Path(out_dir)
    table = folder / f"{name}.parquet"
    write_atomically(table, lambda path: frame.to_parquet(path, index=False))
    if finding is not None:
        write_text_atomically(folder / FINDING, json.dumps({"finding": finding}, ensure_ascii=False) + "\n")
    return table


def read_finding(folder: str | os.PathLike) -> str | None:
    """Return the finding that a run recorded, or None."""
    path = Path(folder) / FINDING
    return json.loads(path.read_text(encoding="utf-8"))["finding"] if path.is_file() else None


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary neighbour of ``path``, then put it in place; a reader never sees half a file.

    The folder is made if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        write(Path(temporary))
        # mkstemp makes files private; a result is as readable as any other file the user writes
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file so that a reader never sees half of it."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _one_line(finding: str) -> str:
    if not isinstance(finding, str):
        raise TypeError(f"a finding is a sentence, not {type(finding).__name__}")
    finding = finding.strip()
    if not finding or "\n" in finding:
        raise ValueError(f"a finding is one sentence on one line, got {len(finding.splitlines())} lines: {finding!r}")
    return finding


def _check_columns(frame: pd.DataFrame) -> None:
    odd = [column for column in frame.columns if not isinstance(column, str)]
    if odd:
        raise ValueError(f"column names must be text; rename {odd}")
    twice = sorted(set(frame.columns[frame.columns.duplicated()]))
    if twice:
        raise ValueError(f"columns appear twice: {twice}")
    if "run" in frame.columns:
        raise ValueError("the column 'run' is filled by collect(); rename yours")
