"""What the numbering of kept tokens does to predictions, and to the differences between methods."""

from __future__ import annotations

import pandas as pd

from epiviz import stats


def position_modes(frame: pd.DataFrame, level: float = stats.LEVEL) -> pd.DataFrame:
    """Return the mean cost of each policy under each position mode and buffer, over traces.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.replays` or a grid, one budget.
    level : float
        Coverage of the intervals (Student's t over traces).

    Returns
    -------
    pandas.DataFrame
        ``positions``, ``buffer``, ``policy``, ``n`` (traces), ``nll_increase`` with ``low`` and ``high`` (nats per
        token).
    """
    limited = frame[frame["budget"].notna()]
    means = limited.groupby(["positions", "buffer", "policy", "trace"], sort=False)["nll_increase"].mean()
    rows = []
    for (positions, buffer, policy), values in means.groupby(level=[0, 1, 2], sort=False):
        cost = stats.clustered_mean(values, values.index.get_level_values("trace"), level)
        rows.append({"positions": positions, "buffer": int(buffer), "policy": policy, "n": len(values)}
                    | {"nll_increase": cost.value, "low": cost.low, "high": cost.high})  # fmt: skip
    return pd.DataFrame(rows)
