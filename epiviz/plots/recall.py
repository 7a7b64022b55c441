"""Attention recall, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from epiviz.palette import FAINT, GREY, dress, new_axes, note, policy_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def recall(frame: pd.DataFrame, control: str = "random", ax: Axes | None = None) -> Axes:
    """Draw how much of the full model's attention each policy still holds: all heads, and the worst tenth.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.recall`.
    control : str
        Drawn as a band.
    ax : matplotlib.axes.Axes, optional
    """
    rows = frame.sort_values("recall").reset_index(drop=True)
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_figheight(max(3.0, 1.3 + 0.24 * len(rows)))
    for place, row in rows.iterrows():
        style = policy_style(row["policy"])
        ax.hlines(place, row["low"], row["high"], color=style.color, lw=2)
        ax.plot(row["recall"], place, marker=style.marker, ms=7, color=style.color, ls="none")
        ax.plot(row["worst_heads"], place, marker=style.marker, ms=5, color=style.color, mfc="none", ls="none")
    title = "Attention that is still held"
    if len(beside := rows[rows["policy"] == control]):
        row = beside.iloc[0]
        ax.axvspan(row["low"], row["high"], color=FAINT, zorder=0)
        note(ax, control, (row["recall"], 1), (0, -3), on_edge=True, ha="center", va="top", color=GREY)
        best = rows[rows["policy"] != control].iloc[-1]
        title = f"{best['policy']} still holds {best['recall']:.0%} of what the full model attends to, "
        title += f"{control} {row['recall']:.0%}"
    ax.set_yticks(range(len(rows)), rows["policy"])
    ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    n = int(rows["n"].iloc[0])
    axis = f"attention recall: all heads (95% block bootstrap, {n} tokens); open: the worst tenth of the heads"
    return dress(ax, title, axis, "")
