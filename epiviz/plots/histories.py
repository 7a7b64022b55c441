"""What was kept: eviction histories side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import PercentFormatter

from epiviz.frames.histories import CHANCE
from epiviz.palette import (
    MAGNITUDE,
    ORANGE,
    dress,
    new_axes,
    note,
    policy_style,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"prompt": "the prompt", "generated": "what they wrote"}


def kept_share(frame: pd.DataFrame, bins: int = 120, ax: Axes | None = None) -> Axes:
    """Draw which part of the text each policy still holds, one strip for each.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.kept`.
    bins : int
        Pixels of a strip; each is the mean over its tokens.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    policies = list(dict.fromkeys(frame["policy"]))
    last = int(frame["position"].max()) + 1
    width = max(1, -(-last // bins))
    edges = np.arange(0, last + width, width)
    grid = np.full((len(policies), len(edges) - 1), np.nan)
    told = []
    for row, policy in enumerate(policies):
        rows = frame[frame["policy"] == policy]
        means = rows.groupby(rows["position"] // width)["kept"].mean()
        grid[row, means.index] = means
        told.append(f"{rows['kept'].mean():.0%}")
        # a text that ended earlier has no pixels here: say where it ended
        ax.plot([len(rows)] * 2, [row - 0.42, row + 0.42], color=policy_style(policy).color, lw=2)
    image = ax.pcolormesh(edges, np.arange(len(policies) + 1) - 0.5, grid, cmap=MAGNITUDE, vmin=0, vmax=1)
    ax.hlines(np.arange(1, len(policies)) - 0.5, 0, last, color="white", lw=3)
    prompt = int((frame["part"] == "prompt").groupby(frame["policy"]).sum().max())
    ax.axvline(prompt, color=ORANGE, lw=1, ls=(0, (4, 2)))
    note(ax, "prompt ends", (prompt, 1), (3, 2), on_edge=True, color=ORANGE, va="bottom")
    labels = [f"{policy}\n{share} held" for policy, share in zip(policies, told, strict=True)]
    ax.set_yticks(np.arange(len(policies)), labels)
    ax.invert_yaxis()
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, fraction=0.05, aspect=18, format=PercentFormatter(1))
    bar.set_label("heads that hold the token", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    tokens = "each pixel one token" if width == 1 else f"each pixel the mean of {width} tokens"
    title = "What is held at the end of each text"
    evicting = frame[frame.groupby("policy")["kept"].transform("min") < 1]
    if len(evicting):
        held = evicting.groupby(["part", "policy"])["kept"].mean()
        told = [f"{spread(held[part])} of {what}" for part, what in PARTS.items() if part in held.index]
        title = f"At the end evicting caches hold {' and '.join(told)}"
    dress(ax, title, f"position (tokens; {tokens})", "")
    ax.grid(False)
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=9, fontweight="bold", pad=16)
    return ax


def overlap(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw how much of their kept sets policies share.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.overlap`.
    ax : matplotlib.axes.Axes, optional
    """
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_size_inches(max(6.4, 1.8 + 0.42 * len(table)), max(3.6, 1.4 + 0.36 * len(table)))
    sns.heatmap(
        table, ax=ax, cmap=MAGNITUDE, vmin=0, vmax=1, annot=True, fmt=".2f", annot_kws={"fontsize": 7}, square=False,
        linewidths=0.5, cbar_kws={"label": "Jaccard index, mean over heads", "pad": 0.02},
    )  # fmt: skip
    title = "Overlap of kept sets"
    policies = table.drop(index=CHANCE, columns=CHANCE, errors="ignore")
    pairs = [(policies.iloc[a, b], a, b) for a in range(len(policies)) for b in range(a)]
    if pairs:
        told = [f"{table.index[a]} and {table.index[b]} ({share:.2f})" for share, a, b in (max(pairs), min(pairs))]
        title = f"Most alike: {told[0]}; least: {told[1]}"
        if CHANCE in table:
            title += f"; a random draw: {table[CHANCE].iloc[:-1].mean():.2f}"
    bar = ax.collections[0].colorbar.ax
    bar.tick_params(labelsize=8)
    bar.yaxis.label.set_fontsize(8.5)
    dress(ax, title, "", "", width=58)
    ax.grid(False)
    ax.tick_params(axis="x", rotation=60)
    ax.tick_params(axis="y", rotation=0)
    return ax
