"""What the numbering of kept tokens does, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from epiviz.palette import FAINT, LINE, distinct_styles, dress, new_axes
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES = ("absolute", "rerotated", "cache-relative")


def position_modes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw each policy's cost under each position mode, evicting token by token and in blocks.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.position_modes`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    groups = [(mode, buffer) for mode in MODES for buffer in sorted(table["buffer"].unique())]
    policies = list(dict.fromkeys(table["policy"]))
    styles = distinct_styles(policies)
    for place, (mode, buffer) in enumerate(groups):
        rows = table[(table["positions"] == mode) & (table["buffer"] == buffer)].set_index("policy")
        for i, policy in enumerate(policy for policy in policies if policy in rows.index):
            x, row, style = place + 0.16 * (i - (len(policies) - 1) / 2), rows.loc[policy], styles[policy]
            ax.vlines(x, row["low"], row["high"], color=style.color, lw=1.5)
            ax.plot(x, row["nll_increase"], color=style.color, marker=style.marker, ls="none", ms=6,
                    label=policy if place == 0 else None)  # fmt: skip
        if place % 2:
            ax.axvspan(place - 0.5, place + 0.5, color=FAINT, alpha=0.4, lw=0, zorder=0)
    ax.axhline(0, color=LINE, lw=1)
    every = {1: "every token"}
    ax.set_xticks(
        range(len(groups)), [f"{mode}\n{every.get(buffer, f'every {buffer}')}" for mode, buffer in groups], fontsize=7.5
    )
    ax.legend(fontsize=7.5, frameon=False, loc="upper left")
    mean = table.groupby(["positions", "buffer"])["nll_increase"].mean()
    apart = table.groupby(["positions", "buffer"])["nll_increase"].agg(lambda x: x.max() - x.min())
    least = min(buffer for _, buffer in groups)
    frozen, kept = ("cache-relative", least), ("absolute", least)
    title = "Position modes"
    if frozen in mean.index and kept in mean.index:
        when = every.get(least, f"every {least}")
        title = f"Evicting {when}, frozen positions cost {signed(mean[frozen])} nats per token (absolute: "
        title += (
            f"{signed(mean[kept])}); the policies' means lie {apart[frozen]:.2f} apart (absolute: {apart[kept]:.2f})"
        )
    n = int(table["n"].max())
    return dress(ax, title, "position of a new token, and when evictions happen",
                 f"−log p above the full cache\n(nats per token; {n} traces, 95% t)")  # fmt: skip
