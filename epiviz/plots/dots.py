"""A dot with an interval for each policy, beside a control."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz.palette import FAINT, GREY, INK, dress, new_axes, note, policy_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALPHA = 0.05


def dots(rows: pd.DataFrame, value: str, control: str, ax: Axes | None = None) -> Axes:
    """Draw a row for each policy, the last at the top: ``value`` with ``low`` and ``high``; the control's is a band."""
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_figheight(max(3.6, 1.3 + 0.24 * len(rows)))
    for place, (_, row) in enumerate(rows.iterrows()):
        style = policy_style(row["policy"])
        ax.hlines(place, row["low"], row["high"], color=style.color, lw=2)
        ax.plot(row[value], place, marker=style.marker, ms=7, color=style.color, ls="none")
        if row["policy"] == control:
            ax.axvspan(row["low"], row["high"], color=FAINT, zorder=0)
            note(ax, control, (row[value], 1), (0, -3), on_edge=True, ha="center", va="top", color=GREY)
    ax.set_yticks(range(len(rows)), rows["policy"])
    return ax


def nothing(ax: Axes | None, what: str) -> Axes:
    """Say in a figure that there is nothing to draw, since no policy evicted."""
    ax = new_axes(ax)
    note(ax, "nothing was evicted", (0.5, 0.5), ha="center", va="center", fontsize=10, xycoords="axes fraction")
    ax.set_xticks([])
    ax.set_yticks([])
    return dress(ax, f"{what}: nothing was evicted", "", "")


def mark_clear(ax: Axes, rows: pd.DataFrame) -> pd.Series:
    """Put a • beside the rows whose ``p_holm`` lies below ``ALPHA``, and tell which they are."""
    clear = rows["p_holm"] < ALPHA
    for place in np.flatnonzero(clear):
        note(ax, "•", (rows["high"].iloc[place], place), (5, 0), va="center", fontsize=9, color=INK)
    return clear
