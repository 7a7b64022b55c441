"""What eviction costs at each budget, over traces and beside a control."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from epiviz import stats

LEVEL = 0.95


def budget_curves(frame: pd.DataFrame, control: str = "random", level: float = LEVEL) -> pd.DataFrame:
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
        No row has a budget.
    """
    limited = frame[frame["budget"].notna() & frame["bounded"]].assign(share=lambda rows: rows["share"].round(2))
    if limited.empty:
        raise ValueError(f"none of the {len(frame)} rows has a budget; replay under at least one")
    cells = limited.groupby(["policy", "share", "trace"], sort=False)[["nll_increase", "low", "high"]].mean()
    wide = cells.pivot_table("nll_increase", ["policy", "share"], "trace", sort=False)
    rows = []
    for (policy, share), values in wide.iterrows():
        values = values.dropna()
        mean, low, high = interval(values.to_numpy(), level)
        if len(values) == 1:
            low, high = cells.loc[(policy, share, values.index[0]), ["low", "high"]]
        row = {"policy": policy, "share": share, "n": len(values), "nll_increase": mean, "low": low, "high": high}
        beside = wide.loc[(control, share)] if (control, share) in wide.index else None
        difference = np.array([]) if beside is None or policy == control else (values - beside).dropna().to_numpy()
        mean, low, high = interval(difference, level)
        p = scipy_stats.ttest_1samp(difference, 0).pvalue if len(difference) > 1 else np.nan
        rows.append(row | {"difference": mean, "difference_low": low, "difference_high": high, "p": p})
    table = pd.DataFrame(rows)
    table["p_holm"] = table.groupby("share")["p"].transform(lambda p: stats.holm(p.to_numpy()))
    return table.sort_values(["share", "nll_increase"], ignore_index=True)


def interval(values: np.ndarray, level: float) -> tuple[float, float, float]:
    """Mean and Student's t interval; NaN where there is nothing, or only one value, to tell it from."""
    if not len(values):
        return (np.nan,) * 3
    mean = float(values.mean())
    if len(values) == 1:
        return mean, np.nan, np.nan
    half = scipy_stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return mean, mean - half, mean + half
