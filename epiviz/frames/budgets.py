"""What eviction costs at each budget, over traces and beside a control."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from epiviz import stats

CELL = ["policy", "share", "trace", "seed"]
LIMITS = ("sinks", "recent", "buffer", "protect_prompt", "positions")  # no axis of a curve


def budget_curves(frame: pd.DataFrame, control: str = "random", level: float = stats.LEVEL) -> pd.DataFrame:
    """Return the mean cost of each policy at each budget over traces, and its paired difference to a control.

    Seeds of a trace are averaged first: the traces are the sample. With one trace the interval of its own tokens is
    taken over, and there is none for the difference.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.replays` or a grid. Rows without a budget are left out, and so are policies that do
        not bound memory, which a budget cannot compare.
    control : str
        The policy that the others are compared with.
    level : float
        Coverage of the intervals (Student's t over traces).

    Returns
    -------
    pandas.DataFrame
        One row per ``policy`` and ``share`` (budget ÷ tokens of the trace, in hundredths): ``n`` (traces),
        ``nll_increase`` with ``low`` and ``high`` (nats per token); ``difference`` to the control on the same traces
        with ``difference_low`` and ``difference_high``; ``p`` of the paired t-test and ``p_holm``, which allows for
        comparing many policies at one budget. NaN where there is no control, or too few traces.

    Raises
    ------
    ValueError
        No row has a budget, or replays of one policy, share, trace and seed differ in their buffer, positions, …
    """
    limited = frame[frame["budget"].notna() & frame["bounded"]].assign(share=lambda rows: rows["share"].round(2))
    if limited.empty:
        raise ValueError(f"none of the {len(frame)} rows has a budget; replay under at least one")
    _check_once(limited)
    cells = limited.groupby(["policy", "share", "trace"], sort=False)[["nll_increase", "low", "high"]].mean()
    wide = cells.pivot_table("nll_increase", ["policy", "share"], "trace", sort=False)
    rows = []
    for (policy, share), values in wide.iterrows():
        values = values.dropna()
        cost = stats.clustered_mean(values, values.index, level)
        low, high = cost.low, cost.high
        if len(values) == 1:
            low, high = cells.loc[(policy, share, values.index[0]), ["low", "high"]]
        row = {"policy": policy, "share": share, "n": len(values), "nll_increase": cost.value, "low": low, "high": high}
        beside = wide.loc[(control, share)] if (control, share) in wide.index else None
        paired = values[:0] if beside is None or policy == control else (values - beside).dropna()
        difference = stats.clustered_mean(paired, paired.index, level)
        row |= {"difference": difference.value, "difference_low": difference.low, "difference_high": difference.high}
        rows.append(row | {"p": scipy_stats.ttest_1samp(paired, 0).pvalue if len(paired) > 1 else np.nan})
    table = pd.DataFrame(rows)
    table["p_holm"] = table.groupby("share")["p"].transform(lambda p: stats.holm(p.to_numpy()))
    return table.sort_values(["share", "nll_increase"], ignore_index=True)


def _check_once(limited: pd.DataFrame) -> None:
    """Refuse replays that differ in what no curve shows: they would be averaged like seeds."""
    settings = [name for name in ("model", *LIMITS, "budget") if name in limited]
    each = limited.drop_duplicates([*CELL, *settings])
    twice = each[each.duplicated(CELL, keep=False)]
    if len(twice):
        first = twice[(twice[CELL] == twice[CELL].iloc[0]).all(axis=1)]
        differ = [f"{name} {first[name].unique().tolist()}" for name in settings if len(first[name].unique()) > 1]
        raise ValueError(
            f"{len(twice)} replays share {', '.join(CELL)} but not their limits, as {first['policy'].iloc[0]}: "
            f"{', '.join(differ)}; choose the rows that belong together"
        )
