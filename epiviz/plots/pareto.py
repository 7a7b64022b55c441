"""What eviction costs against what is held, and the points that nothing beats: printed, and to hover over."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pandas as pd

from epiviz.palette import GREY, INK, LINE, distinct_styles, dress, new_axes
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

NAMED = 8  # policies on the front with a colour of their own, the cheapest of each amount of memory first
MEMORIES = {
    "mean_slots": "slots held per layer and KV head, mean over decode steps",
    "peak_slots": "slots held per layer and KV head, at most",
    "attended_slots": "slots attended per layer and KV head, mean over decode steps",
    "mib": "MiB of keys, values and what policies keep besides",
}
UNITS = {"mean_slots": "slots held", "peak_slots": "slots at most", "attended_slots": "slots attended", "mib": "MiB"}
COST = "−log p above the full cache (nats per token)"
SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross",
           "X": "x", "p": "pentagon", "h": "hexagon", "<": "triangle-left", "*": "star"}  # fmt: skip


def pareto(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw cost against memory: what nothing beats in colour with intervals and joined, all else in grey.

    Policies that do not bound memory have hollow markers.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.pareto`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    front, rest = table[table["front"]], table[~table["front"]]
    for bounded, rows in rest.groupby("bounded"):
        face = LINE if bounded else "none"
        ax.plot(rows["memory"], rows["nll_increase"], ls="none", marker="o", ms=3, mfc=face, mec=LINE, mew=0.7)
    ax.plot(front["memory"], front["nll_increase"], color=GREY, lw=1, drawstyle="steps-post", zorder=3)
    styles = distinct_styles(list(dict.fromkeys(front["policy"]))[:NAMED])
    for policy, rows in front.groupby("policy", sort=False):
        style = styles.get(policy)
        colour, marker = (style.color, style.marker) if style else (INK, "o")
        ax.vlines(rows["memory"], rows["low"], rows["high"], color=colour, lw=1.2, zorder=4)
        for row in rows.itertuples():
            face = colour if row.bounded else "white"
            ax.plot(row.memory, row.nll_increase, marker=marker, ms=7, mfc=face, mec=colour, ls="none", zorder=5)
        ax.plot([], [], marker=marker, ms=7, color=colour, ls="none", label=policy)
    if len(rest):
        ax.plot([], [], marker="o", ms=3, color=LINE, ls="none", label=f"{len(rest)} others")
    if not table["bounded"].all():
        ax.plot([], [], marker="o", ms=5, mfc="none", mec=GREY, ls="none", label="hollow: does not bound memory")
    ax.axhline(0, color=LINE, lw=0.8, zorder=1)
    # The means set the scale: intervals over few traces are long, and may leave the picture.
    low, high = table["nll_increase"].min(), table["nll_increase"].max()
    ax.set_ylim(min(low, 0) - 0.12 * (high - low or 1), high + 0.12 * (high - low or 1))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7.5)
    return dress(ax, _title(table), MEMORIES[table.attrs["memory"]], f"{COST}\n{_over(table)}")


def pareto_hover(table: pd.DataFrame) -> Figure:
    """Return the same points as a plotly figure, whose points tell their policy, budget, memory, cost and interval.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.pareto`.
    """
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    front = table[table["front"]]
    line = {"color": GREY, "width": 1, "shape": "hv"}
    figure.add_trace(
        Scatter(x=front["memory"], y=front["nll_increase"], mode="lines", line=line, name="front", hoverinfo="skip")
    )
    for policy, style in distinct_styles(list(dict.fromkeys([*front["policy"], *table["policy"]]))).items():
        rows = table[table["policy"] == policy]
        symbol = SYMBOLS[style.marker]
        marker = {
            "color": style.color,
            "size": [11 if on else 6 for on in rows["front"]],
            "opacity": [1 if on else 0.55 for on in rows["front"]],
            "symbol": [symbol if bounded else f"{symbol}-open" for bounded in rows["bounded"]],
        }
        told = [_hover(row, UNITS[table.attrs["memory"]]) for row in rows.itertuples()]
        figure.add_trace(
            Scatter(x=rows["memory"], y=rows["nll_increase"], mode="markers", marker=marker, name=policy,
                    hovertext=told, hoverinfo="text")
        )  # fmt: skip
    figure.update_layout(
        title={"text": "<br>".join(textwrap.wrap(_title(table), 110, break_on_hyphens=False)), "font": {"size": 14}},
        xaxis_title=MEMORIES[table.attrs["memory"]],
        yaxis_title=f"{COST}<br>{_over(table)}",
        template="plotly_white",
        height=480,
        legend={"font": {"size": 10}},
    )
    return figure


def _title(table: pd.DataFrame) -> str:
    front = table[table["front"]]
    told = [
        f"{row['policy']} ({row['memory']:,.0f} {UNITS[table.attrs['memory']]}, {signed(row['nll_increase'])} nats)"
        for _, row in front.iloc[[0, -1]].drop_duplicates().iterrows()
    ]
    return f"By their means nothing beats {len(front)} of {len(table)} points, from {' to '.join(told)}"


def _over(table: pd.DataFrame) -> str:
    n = int(table["n"].iloc[0])
    return f"replays, mean of {n} traces, 95% t interval" if n > 1 else "replay of one trace, 95% block bootstrap"


def _hover(row, unit: str) -> str:
    budget = "no budget" if pd.isna(row.share) else f"budget {row.share:.0%} of the text"
    parts = [f"<b>{row.policy}</b>", budget, f"{row.memory:,.1f} {unit}"]
    parts += [f"costs {signed(row.nll_increase)} [{signed(row.low)}, {signed(row.high)}] nats per token"]
    parts += [f"replays of {row.n} traces" if row.n > 1 else "replay of one trace"]
    parts += [] if row.bounded else ["does not bound memory"]
    return "<br>".join(parts)
