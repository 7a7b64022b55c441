"""Rows of a public set, from a local file or from the hub, and the columns that are read of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import pandas as pd


@dataclass(frozen=True)
class Hub:
    """Where a set lies on the hub: a repository's split, or files of it that are read as they are."""

    repository: str
    config: str | None = None
    split: str = "train"
    files: tuple[str, ...] = ()


def read_hub(task: str, sources: Iterable[Hub], columns: Sequence[str] = ()) -> list[dict]:
    """Return the rows of a set from the hub, through the library ``datasets``.

    Parameters
    ----------
    task : str
        Named in the error.
    sources : iterable of Hub
        Their rows follow each other.
    columns : sequence of str
        Only these are kept, row by row, where the others are too large to be held.

    Raises
    ------
    ImportError
        ``datasets`` is not installed.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{task} comes from the hub through the library datasets, which is not installed: "
            'run pip install "epiviz[hub]", or give path="…" to read a local copy'
        ) from error
    rows = []
    for source in sources:
        if source.files:  # as files, because the repository's own loading code would have to be trusted
            files = [f"hf://datasets/{source.repository}/{file}" for file in source.files]
            part = load_dataset("json", data_files=files, split=source.split, streaming=True)
        else:
            part = load_dataset(source.repository, source.config, split=source.split)
        rows += [{name: row[name] for name in columns} if columns else dict(row) for row in part]
    return rows


def read_files(paths: str | PathLike | Sequence[str | PathLike]) -> list[dict]:
    """Return the rows of local files, one after the other.

    Parameters
    ----------
    paths : path or sequence of paths
        ``.jsonl`` (an object a line), ``.json`` (a list of objects), ``.csv`` or ``.parquet``.

    Raises
    ------
    FileNotFoundError
        A file is not there.
    ValueError
        A file is of another kind, holds no rows or is not what its name says.
    """
    paths = [paths] if isinstance(paths, str | PathLike) else list(paths)
    return [row for path in paths for row in _read_file(Path(path))]


def _read_file(path: Path) -> list[dict]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; path must be a local copy of the set, or be left out")
    readers = {
        ".jsonl": lambda: _read_lines(path),
        ".json": lambda: json.loads(path.read_text(encoding="utf-8")),
        # As text: a number's own spelling (033, 1,234) is part of an answer.
        ".csv": lambda: pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records"),
        ".parquet": lambda: pd.read_parquet(path).to_dict("records"),
    }
    if path.suffix not in readers:
        raise ValueError(f"{path} is none of {', '.join(readers)}")
    try:
        rows = readers[path.suffix]()
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no list of rows with named columns")
    return rows


def _read_lines(path: Path) -> list:
    with path.open(encoding="utf-8") as lines:  # a line separator inside a text ends no line here
        return [json.loads(line) for line in lines if line.strip()]


def pick(row: dict, names: Sequence[str], what: str, where: str) -> str:
    """Return the first of some columns that a row has, as text.

    Raises
    ------
    ValueError
        It has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return str(row[name]).strip()
    raise ValueError(
        f"{where} has no column with the {what}: expected {' or '.join(names)}, found {', '.join(map(str, row))}"
    )
