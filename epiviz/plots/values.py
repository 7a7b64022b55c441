"""Value ranges: distribution, tail, heads, sinks and carriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from epiviz.frames import TAIL_FACTOR
from epiviz.palette import (
    BLUE,
    CYCLE,
    DARK_BLUE,
    GREY,
    MAGNITUDE,
    MIDDLE_BLUE,
    ORANGE,
    PURPLE,
    dress,
    log_axis,
    new_axes,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def value_ranges(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the distribution of value ranges in each layer (log scale), sinks as separate points.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.value_ranges`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    rest, sinks = frame[~frame["sink"]], frame[frame["sink"]]
    if rest.empty:
        rest = frame
    line = {"color": DARK_BLUE, "linewidth": 1.2}
    # boxenplot's light end vanishes on white: start from a mid blue
    sns.boxenplot(
        rest, x="layer", y="value_range", color=MIDDLE_BLUE, line_kws=line, linewidth=0.3, showfliers=True,
        flier_kws={"s": 2, "color": GREY, "linewidth": 0}, native_scale=True, log_scale=(False, True), ax=ax,
    )  # fmt: skip
    ax.plot(sinks["layer"] + 0.32, sinks["value_range"], ls="none", marker="D", ms=2.2, color=ORANGE, alpha=0.75,
            label=f"sinks (first {sinks['position'].nunique()} tokens, every head)")  # fmt: skip
    medians = rest.groupby("layer")["value_range"].median()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    log_axis(ax.yaxis)
    ax.legend(loc="best", frameon=False, fontsize=8)
    title = f"Median range from {medians.min():.2g} (layer {medians.idxmin()}) to {medians.max():.2g}"
    return dress(ax, f"{title} (layer {medians.idxmax()})", "layer", "value range, max − min (log scale)")


def head_map(frame: pd.DataFrame, column: str, label: str, log: bool = False, ax: Axes | None = None) -> Axes:
    """Draw one number for each head as a heat map, layers from left to right; the highest is marked.

    Parameters
    ----------
    frame : pandas.DataFrame
        ``layer``, ``head`` and ``column``, as from :func:`epiviz.frames.value_heads`.
    column : str
    label : str
        What the colour means, with its unit.
    log : bool
        Colour on a log scale.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    grid = frame.pivot_table(index="head", columns="layer", values=column)
    norm = "log" if log else None
    image = ax.pcolormesh(
        grid.columns, grid.index, grid.to_numpy(), cmap=MAGNITUDE, norm=norm, edgecolors="white", lw=0.4
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, fraction=0.05, aspect=18)
    bar.set_label(label, fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    if log:
        log_axis(bar.ax.yaxis)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.invert_yaxis()
    best = frame.loc[frame[column].idxmax()]
    ax.plot(best["layer"], best["head"], marker="s", ms=9, mfc="none", mec=ORANGE, mew=1.6, ls="none")
    where = f"highest in layer {best['layer']:.0f}, head {best['head']:.0f} ({best[column]:.2f})"
    title = f"{label[0].upper()}{label[1:]}: {where}; median of all heads {frame[column].median():.2f}"
    dress(ax, title, "layer", "KV head")
    ax.grid(False)
    return ax


def value_tail(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw how many tokens exceed a multiple of their head's median value range; one line for each head.

    The title tells of :data:`epiviz.frames.TAIL_FACTOR` medians.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.value_tail`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    wide = frame.pivot_table(index="multiple", columns=["layer", "head"], values="share")
    shown = wide.where(wide > 0)
    ax.plot(shown.index, shown.to_numpy(), color=BLUE, lw=0.5, alpha=0.25)
    mean = wide.mean(axis=1)
    ax.plot(mean.index, mean.where(mean > 0), color=DARK_BLUE, lw=2.2, label="mean of all heads")
    ax.plot([], [], color=BLUE, lw=0.8, alpha=0.6, label=f"each of {wide.shape[1]} heads")
    ax.axvline(TAIL_FACTOR, color=ORANGE, lw=1, ls=(0, (4, 2)))
    ax.set(xscale="log", yscale="log")
    last = mean.index[mean > 0].max()
    ax.set_xlim(0.5, max(TAIL_FACTOR * 1.15, float(last) * 1.05))
    log_axis(ax.xaxis, steps=(1, 1.5, 2, 3, 5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    beyond = float(np.interp(TAIL_FACTOR, mean.index, mean))
    title = f"{100 * beyond:.2g}% of value states exceed {TAIL_FACTOR:g}× their head's median"
    ax.legend(loc="lower left", frameon=False, fontsize=8)
    return dress(ax, title, "value range ÷ head's median (log scale)", "share of tokens above (log scale)")


def sink_ranks(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw where each sink's value range stands in its heads, layer by layer.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.sink_ranks`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    ax.axhline(0.5, color=GREY, lw=0.8)
    told = []
    for style, ((position, token), rows) in zip(CYCLE, frame.groupby(["position", "token"]), strict=False):
        line = rows.groupby("layer")["rank"].mean()
        look = {"color": style.color, "marker": style.marker, "ms": 3, "ls": style.dash, "lw": 1.3}
        ax.plot(line.index, line, label=f"{position}: {plain(token)}", **look)
        told.append(f"{rows['rank'].median():.0%}")
    ax.set_ylim(-0.03, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, title="sink", title_fontsize=8)
    title = f"Median percentile of the sinks' ranges: {', '.join(told)}"
    return dress(ax, title, "layer", "percentile in the head\n(mean of its KV heads)")


def carriers(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw how much more often each class of tokens carries a large value state than tokens at large.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.carriers`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    rows = frame.dropna(subset=["ratio"]).iloc[::-1]
    place = np.arange(len(rows))
    clear = (rows["low"] > 1) | (rows["high"] < 1)
    colours = np.where(~clear, GREY, np.where(rows["ratio"] > 1, PURPLE, ORANGE))
    ax.axvline(1, color=GREY, lw=0.8)
    ax.hlines(place, rows["low"], rows["high"], color=colours, lw=2)
    ax.scatter(rows["ratio"], place, c=colours, s=30, zorder=3)
    ax.set_yticks(place, [f"{name} ({count:,})" for name, count in zip(rows["class"], rows["tokens"], strict=True)])
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.5), numticks=12))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    ax.xaxis.set_minor_locator(NullLocator())
    title = "No class differs clearly from tokens at large"
    if clear.any():
        high, low = rows[clear].iloc[-1], rows[clear].iloc[0]
        told = dict.fromkeys(f"{row['class']} tokens carry {row['ratio']:.1f}×" for row in (high, low))
        title = f"Of the large value states, {', '.join(told)} their share"
    unit = f"share among the largest {frame['share'].iloc[0]:.0%} of each head ÷ share of tokens (95%)"
    return dress(ax, title, unit, "class (tokens)")
