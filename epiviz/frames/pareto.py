"""Cost against memory: which policies nothing beats on both."""

from __future__ import annotations

import numpy as np
import pandas as pd

from epiviz import stats

MEMORIES = ("mean_slots", "peak_slots", "attended_slots", "mib")


def pareto(frame: pd.DataFrame, memory: str = "mean_slots", level: float = stats.LEVEL) -> pd.DataFrame:
    """Return what each policy costs and holds at each budget, means over traces, and which points nothing beats.

    A point is on the front if no other costs less without holding more, or holds less without costing more. What a
    policy is told to keep does not matter here, only what it held: those that do not bound memory take part.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.replays` or a grid. Seeds of a trace are averaged first.
    memory : {"mean_slots", "peak_slots", "attended_slots", "mib"}
        Slots per layer and KV head, mean over decode steps, at most, or attended by a query; or MiB of keys, values
        and whatever the policy keeps besides.
    level : float
        Coverage of the intervals: Student's t over traces; with one trace that of its own tokens.

    Returns
    -------
    pandas.DataFrame
        One row per ``policy`` and ``share`` (budget ÷ tokens of the trace, in hundredths; NaN without a budget):
        ``n`` (traces), ``bounded``, ``memory``, ``nll_increase`` with ``low`` and ``high`` (nats per token), and
        ``front``. Sorted by memory, then by cost. The name of the memory is in ``attrs["memory"]``.

    Raises
    ------
    ValueError
        No such memory, no rows, or a point lacks some of the traces: means over other texts are no comparison.
    """
    if memory not in MEMORIES:
        raise ValueError(f"memory must be one of {', '.join(MEMORIES)}, got {memory!r}")
    if frame.empty:
        raise ValueError("the frame has no rows; replay at least one policy")
    cells = frame.assign(mib=frame["kv_mib"] + frame["state_mib"], share=frame["share"].astype(float).round(2))
    keys, values = ["policy", "share"], [memory, "nll_increase", "low", "high", "bounded"]
    per_trace = cells.groupby([*keys, "trace"], sort=False, dropna=False)[values].mean()
    traces, rows = cells["trace"].nunique(), []
    for (policy, share), of_point in per_trace.groupby(keys, sort=False, dropna=False):
        if len(of_point) < traces:
            where = "without a budget" if np.isnan(share) else f"at {share:.0%} of the text"
            raise ValueError(
                f"{policy} {where} was replayed on {len(of_point)} of {traces} traces; replay it on all of them at "
                "budgets that are shares of the text, or pass the rows of the traces that all have"
            )
        cost = stats.clustered_mean(of_point["nll_increase"], of_point.index.get_level_values("trace"), level)
        low, high = cost.low, cost.high
        if traces == 1:
            low, high = of_point[["low", "high"]].iloc[0]
        row = {"policy": policy, "share": share, "n": traces, "bounded": bool(of_point["bounded"].all())}
        rows.append(row | {"memory": of_point[memory].mean(), "nll_increase": cost.value, "low": low, "high": high})
    table = pd.DataFrame(rows)
    table["front"] = not_dominated(table["memory"].to_numpy(), table["nll_increase"].to_numpy())
    table = table.sort_values(["memory", "nll_increase"], ignore_index=True)
    table.attrs["memory"] = memory
    return table


def not_dominated(*costs: np.ndarray) -> np.ndarray:
    """Return which points no other beats: lower in one of the ``costs`` and higher in none, bool ``[points]``.

    Examples
    --------
    >>> not_dominated(np.array([1, 2, 3, 2]), np.array([9, 5, 5, 5])).tolist()
    [True, True, False, True]
    """
    points = np.stack(costs, axis=-1)
    no_higher = (points[:, None] <= points).all(-1)  # [i, j]: i is nowhere higher than j
    lower = (points[:, None] < points).any(-1)
    return ~(no_higher & lower).any(0)
