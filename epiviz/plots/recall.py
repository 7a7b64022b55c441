"""Attention recall, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from epiviz.palette import dress, policy_style
from epiviz.plots.dots import dots, nothing

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
    if frame.empty:
        return nothing(ax, "Attention that is still held")
    rows = frame.sort_values("recall").reset_index(drop=True)
    ax = dots(rows, "recall", control, ax)
    for place, row in rows.iterrows():
        style = policy_style(row["policy"])
        ax.plot(row["worst_heads"], place, marker=style.marker, ms=5, color=style.color, mfc="none", ls="none")
    title = "Attention that is still held"
    beside, others = rows[rows["policy"] == control], rows[rows["policy"] != control]
    if len(beside) and len(others):
        best = others.iloc[-1]
        title = f"{best['policy']} still holds {best['recall']:.0%} of what the full model attends to, "
        title += f"{control} {beside.iloc[0]['recall']:.0%}"
    ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    n = int(rows["n"].iloc[0])
    axis = f"attention recall: all heads (95% block bootstrap, {n} tokens); open: the worst tenth of the heads"
    return dress(ax, title, axis, "")
