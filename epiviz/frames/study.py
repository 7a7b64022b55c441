"""What the table of a sweep holds: replays, answers, or both; and what its runs took."""

from __future__ import annotations

import pandas as pd

from epiviz.frames.budgets import LIMITS

MADE_BY = {"replays": "nll_increase", "answers": "outcome"}  # the column that only rows of a kind have


def part(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the rows of one kind, with the columns that say something about them.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.collect`.
    kind : {"replays", "answers"}
        Rows of :func:`epiviz.frames.replays`, or of :func:`epiviz.evaluate`.

    Returns
    -------
    pandas.DataFrame
        Without rows if the table has none of this kind. A row that several runs of the sweep recorded alike (the full
        cache in every cell of a grid of budgets) stands once.

    Raises
    ------
    ValueError
        There is no such kind.
    """
    if kind not in MADE_BY:
        raise ValueError(f"rows are {' or '.join(MADE_BY)}, not {kind!r}")
    if MADE_BY[kind] not in table:
        return table.iloc[:0]
    rows = table[table[MADE_BY[kind]].notna()].dropna(axis=1, how="all")
    about_the_run = [name for name in rows if name in ("run", "notebook", "seconds") or name.startswith("given_")]
    once = rows.drop_duplicates(rows.columns.difference(about_the_run)).reset_index(drop=True)
    return once.infer_objects()  # a column that other kinds lack holds objects until they are gone


def groups(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows that may be drawn together, named by what tells them from the others.

    Texts of two models, answers to two notebooks' problems, or replays under other limits share no mean. The name is
    empty if there is one group.
    """
    if rows.empty:
        return {}
    apart = ["notebook", "model", *(LIMITS if MADE_BY["replays"] in rows else ())]
    keys = [name for name in apart if name in rows and len(set(rows[name].dropna())) > 1]
    if not keys:
        return {"": rows}
    named = [name for name in keys if name in LIMITS]
    return {
        ", ".join(f"{name} {value}" if name in named else str(value) for name, value in zip(keys, key, strict=True)):
            each.dropna(axis=1, how="all")
        for key, each in rows.groupby(keys, sort=False)
    }  # fmt: skip


def run_times(state: pd.DataFrame) -> pd.DataFrame:
    """Return what the finished runs of each notebook took.

    Parameters
    ----------
    state : pandas.DataFrame
        From :func:`epiviz.sweeps.status`.

    Returns
    -------
    pandas.DataFrame
        One row per ``notebook`` and ``device``: ``runs`` (finished), ``median``, ``least``, ``most`` and ``total``
        seconds.
    """
    done = state[state["status"] == "done"]
    seconds = done.groupby(["notebook", "device"], sort=False)["seconds"]
    found = seconds.agg(runs="count", median="median", least="min", most="max", total="sum")
    return found.reset_index()


def speed(answers: pd.DataFrame) -> pd.DataFrame:
    """Return how fast texts were written: tokens of all texts ÷ their share of the time of their batches.

    Parameters
    ----------
    answers : pandas.DataFrame
        Rows of :func:`epiviz.evaluate`.

    Returns
    -------
    pandas.DataFrame
        One row per ``policy`` and ``budget``: ``texts``, ``tokens``, ``seconds``, ``tokens_per_second``. Runs of one
        sweep may have been made on other machines, or beside other work: times are no benchmark.
    """
    groups = answers.groupby(["policy", "budget"], sort=False, dropna=False)
    found = groups.agg(texts=("tokens", "count"), tokens=("tokens", "sum"), seconds=("seconds", "sum"))
    return found.assign(tokens_per_second=found["tokens"] / found["seconds"]).reset_index()
