"""The numbers that the papers published: to draw beside one's own, never as if they had been measured here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parents[1] / "data" / "published"
COLUMNS = ("value", "unit", "model", "task", "budget", "method", "paper", "table", "note")
KEY = ("unit", "model", "task", "budget", "method", "paper", "table")
WITHDRAWN = "withdrawn"  # how the note of a number begins that its authors took back


def published(*, withdrawn: bool = True, folder: Path | str = FOLDER) -> pd.DataFrame:
    """Return every published number, one a row.

    Parameters
    ----------
    withdrawn : bool
        Include numbers that their authors took back; the column ``withdrawn`` marks them.
    folder : path
        CSV files with the columns below; ``data/published`` of the repository, whose README says where each is from.

    Returns
    -------
    pandas.DataFrame
        ``value`` float64 in ``unit``; ``model``, a hub id; ``task``, named as in :mod:`epiviz.tasks` where it is one;
        ``budget`` in slots as the paper counts them, missing where nothing was evicted; ``method``, named as the policy
        here that follows the same rule, or in the paper's words; ``paper`` ("epikv", "vase") and ``table``; ``note``;
        ``withdrawn``; ``file``.

    Raises
    ------
    FileNotFoundError
        There are no such files: the package was installed without the repository's data.
    ValueError
        A file has other columns, or a number twice.

    Examples
    --------
    >>> frame = published()
    >>> one = frame.query("table == 'Table 3' and method == 'epikv' and budget == 2048")
    >>> one["value"].tolist()
    [49.0]
    """
    files = sorted(Path(folder).glob("*.csv"))
    if not files:
        raise FileNotFoundError(
            f"there are no tables in {folder}: they are in data/published/ of a source checkout. Install epiviz from a "
            "clone with `pip install -e .`, or pass the folder of a copy"
        )
    frame = pd.concat([_read(file) for file in files], ignore_index=True)
    twice = frame[frame.duplicated(list(KEY), keep=False)]
    if len(twice):
        raise ValueError(f"the same number stands twice: {', '.join(map(str, twice.iloc[0][list(KEY)]))}")
    frame["withdrawn"] = frame["note"].str.startswith(WITHDRAWN)
    return frame if withdrawn else frame[~frame["withdrawn"]].reset_index(drop=True)


def _read(file: Path) -> pd.DataFrame:
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    if tuple(frame.columns) != COLUMNS:
        raise ValueError(f"{file} must have the columns {', '.join(COLUMNS)}, it has {', '.join(frame.columns)}")
    frame["value"] = frame["value"].astype("float64")
    frame["budget"] = frame["budget"].replace("", pd.NA).astype("Int64")
    return frame.assign(file=file.stem)
