"""What runs and replays used, and what eviction cost them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from epiviz.palette import (
    GREY,
    INK,
    LINE,
    dress,
    new_axes,
    note,
    policy_style,
    spread,
)
from epiviz.plots.dots import dots
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def meter(frame: pd.DataFrame, budget: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw mean and peak slots of each policy, and the bytes beside them.

    A selection attends fewer slots than it holds: a hollow marker shows how many.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.runs` or :func:`epiviz.frames.replays`.
    budget : int, optional
        Slots right after an eviction, drawn as a line.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    rows = frame.iloc[::-1].reset_index(drop=True)
    for place, run in rows.iterrows():
        style = policy_style(run["policy"])
        ax.hlines(place, run["mean_slots"], run["peak_slots"], color=style.color, lw=2)
        ax.plot(run["mean_slots"], place, marker=style.marker, ms=8, color=style.color, ls="none")
        ax.plot(run["peak_slots"], place, marker="|", ms=12, mew=2, color=style.color, ls="none")
        right = max(run["mean_slots"], run["peak_slots"])
        used = f"{run['kv_mib']:.1f} + {run['state_mib']:.2f} MiB"
        if run["attended_slots"] < run["mean_slots"]:  # a selection; what evicts attends all that it holds
            ax.hlines(place, run["attended_slots"], run["mean_slots"], color=style.color, lw=1, ls=(0, (1, 2)))
            ax.plot(run["attended_slots"], place, marker=style.marker, ms=8, mfc="white", mec=style.color, ls="none")
            used += f", {run['attended_slots']:.0f} attended"
        else:
            used += f", {run['evictions']} evictions"
        note(ax, used, (right, place), (9, 0), va="center", fontsize=8, color=INK)
    if budget is not None:
        ax.axvline(budget, color=GREY, lw=1, ls=":")
        note(ax, f"budget {budget}", (budget, len(rows) - 0.1), (4, 0), va="center")
    ax.set_yticks(range(len(rows)), rows["policy"])
    ax.set_ylim(-0.6, len(rows) - 0.4 + 0.7 * (budget is not None))  # the line's name has a place of its own
    ax.set_xlim(0, rows["peak_slots"].max() * 1.6)
    full = frame[frame["evictions"] == 0]
    evicting = frame[frame["evictions"] > 0]
    title = "Slots held per layer and KV head"
    if len(full) and len(evicting):
        pairs = evicting["kv_mib"] / full["kv_mib"].max()
        all_of_it = (evicting["kv_mib"] + evicting["state_mib"]) / (full["kv_mib"] + full["state_mib"]).max()
        title = f"Evicting caches: {spread(pairs)} of the full cache's keys and values, "
        title += f"{spread(all_of_it)} with what policies keep besides"
    elif len(evicting) > 1:
        most = evicting.loc[evicting["state_mib"].idxmax()]
        title = f"Besides {evicting['kv_mib'].mean():.1f} MiB of keys and values, {most['policy']} keeps "
        title += f"{most['state_mib']:.2f} MiB, the median policy {evicting['state_mib'].median():.2f}"
    attended = "attended (hollow), " if (frame["attended_slots"] < frame["mean_slots"]).any() else ""
    unit = f"slots per layer and KV head: {attended}mean (marker) to peak (bar); keys and values + state"
    return dress(ax, title, unit, "")


def cost(frame: pd.DataFrame, control: str = "random", ax: Axes | None = None) -> Axes:
    """Draw what each policy's evictions cost in prediction, with intervals, beside the control.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.replays`.
    control : str
        The policy that others have to beat, drawn as a band.
    ax : matplotlib.axes.Axes, optional
    """
    rows = frame.sort_values("nll_increase", ascending=False).reset_index(drop=True)
    ax = dots(rows, "nll_increase", control, ax)
    title = "Eviction's cost in prediction"
    reference = rows[rows["policy"] == control]
    if len(reference):
        row = reference.iloc[0]
        others = rows[rows["policy"] != control]
        better = others[others["high"] < row["low"]]
        title = f"{len(better)} of {len(others)} policies lie clear of {control} ({signed(row['nll_increase'])} nats)"
        title += f"; lowest {others['policy'].iloc[-1]} ({signed(others['nll_increase'].iloc[-1])})"
    ax.axvline(0, color=LINE, lw=1)
    n = int(rows["n"].iloc[0])
    return dress(ax, title, f"−log p above the full cache (nats per token; {n} tokens, 95% block bootstrap)", "")
