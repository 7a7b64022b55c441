"""Figures: frames in, Axes out.

Every function draws into ``ax`` (a new figure of 6.4 × 3.6 inches if none is given) and returns it; none shows or
saves. Frames come from :mod:`epiviz.frames`, looks from :mod:`epiviz.palette`. Titles state what was found, in
numbers of the frame at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from epiviz import frames
from epiviz.palette import (
    BLUE,
    CYCLE,
    DARK_BLUE,
    FAINT,
    GREY,
    INK,
    LAYERS,
    LINE,
    MAGNITUDE,
    MIDDLE_BLUE,
    ORANGE,
    PURPLE,
    Style,
    dress,
    log_axis,
    new_axes,
    note,
    policy_style,
    spread,
)
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"prompt": "the prompt", "generated": "what they wrote"}


def displacement(frame: pd.DataFrame, token: int | None = None, around: int = 20, ax: Axes | None = None) -> Axes:
    """Draw displacement (dots) and its causal rolling mean (line) of each layer around one token.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.displacements`.
    token : int, optional
        Position to mark and to centre on; without it the generated part is drawn.
    around : int
        Tokens on both sides.
    ax : matplotlib.axes.Axes, optional
    """
    ax, part = new_axes(ax), _near(frame, token, around)
    told = []
    for style, (layer, rows) in zip(LAYERS, part.groupby("layer"), strict=False):
        ax.plot(rows["position"], rows["displacement"], color=style.color, lw=0.6, alpha=0.5)
        dots = {"marker": style.marker, "ms": 3.2 if token is not None else 1.6, "ls": "none"}
        ax.plot(rows["position"], rows["displacement"], color=style.color, label=f"layer {layer}", **dots)
        _line_label(ax, rows, "rolling_mean", f"layer {layer}\nmean", style)
        if token is not None:
            here = rows[rows["position"] == token].iloc[0]
            told.append(f"{here['displacement'] / here['rolling_mean']:.2f}× its recent mean at layer {layer}")
        else:
            told.append(f"{rows['displacement'].mean():.0f} ± {rows['displacement'].std(ddof=0):.0f} at layer {layer}")
    _mark(ax, token)
    who = "Displacement (mean ± sd):" if token is None else f"Token {token}{_quoted(part, token)} moves"
    dress(ax, f"{who} {', '.join(told)}", "", "displacement ‖Δh‖₂")
    return _token_axis(ax, part, token)


def zscores(frame: pd.DataFrame, token: int | None = None, around: int = 20, ax: Axes | None = None) -> Axes:
    """Draw the causal z-score of each layer's displacement around one token; parameters as in :func:`displacement`."""
    ax, part = new_axes(ax), _near(frame, token, around)
    ax.axhline(0, color=GREY, lw=0.8)
    told = []
    for style, (layer, rows) in zip(LAYERS, part.groupby("layer"), strict=False):
        marker = {"marker": style.marker, "ms": 3.2} if token is not None else {}
        ax.plot(
            rows["position"], rows["zscore"], color=style.color, ls=style.dash, lw=1.2, label=f"layer {layer}", **marker
        )
        if token is not None:
            here = rows.loc[rows["position"] == token, "zscore"].iloc[0]
            told.append((layer, here))
    _mark(ax, token)
    title = "Causal z-score of the displacement"
    if len(told) == 2:
        (low, first), (high, second) = told
        title = (
            f"Token {token}{_quoted(part, token)}: {signed(first)} at layer {low}, {signed(second)} at layer {high}, "
        )
        title += f"score {signed(first - second)}"
    dress(ax, title, "", "z-score (standard deviations)")
    ax.legend(loc="best", frameon=False, fontsize=8, ncols=2)
    return _token_axis(ax, part, token)


def score(frame: pd.DataFrame, token: int | None = None, top: int = 5, ax: Axes | None = None) -> Axes:
    """Draw the epiphany score along a trace, and name the highest of the generated part.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.scores`.
    token : int, optional
        Position to mark.
    top : int
        So many tokens are named.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    colours = np.where(frame["score"] >= 0, PURPLE, ORANGE)
    ax.vlines(frame["position"], 0, frame["score"], color=colours, lw=max(0.4, min(1.2, 300 / len(frame))))
    ax.axhline(0, color=GREY, lw=0.8)
    generated = frame[frame["part"] == "generated"]
    highest = generated.nlargest(top, "score")
    ax.plot(highest["position"], highest["score"], ls="none", marker="o", ms=3.5, color=PURPLE)
    _prompt_band(ax, frame)
    _mark(ax, token)
    _name_tokens(ax, highest)
    title = "Epiphany score along the trace"
    if len(highest):
        best = highest.iloc[0]
        title = f"Highest score {signed(best['score'])} at token {best['position']} "
        title += f"(‘{_plain(best['token'])}’); half lie within ±{generated['score'].abs().median():.2f}"
    return dress(ax, title, "position (tokens)", "epiphany score z₁₀ − z₂₁")


def positional_trend(
    frame: pd.DataFrame, trend: pd.DataFrame, signal: str = "displacement", ax: Axes | None = None
) -> Axes:
    """Draw one signal against position over the generated part, with ρ and its interval.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.displacements`.
    trend : pandas.DataFrame
        From :func:`epiviz.frames.positional_trend`; the ρ that the labels tell.
    signal : {"displacement", "z-score"}
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    column, unit = {
        "displacement": ("displacement", "displacement ‖Δh‖₂"),
        "z-score": ("zscore", "z-score (standard deviations)"),
    }[signal]
    generated = frame[frame["part"] == "generated"]
    told = []
    for style, (layer, rows) in zip(LAYERS, generated.groupby("layer"), strict=False):
        rho = trend[(trend["layer"] == layer) & (trend["signal"] == signal)].iloc[0]
        ax.plot(rows["position"], rows[column], ls="none", marker=style.marker, ms=2, alpha=0.35, color=style.color)
        smooth = rows[column].rolling(max(5, len(rows) // 8), center=True, min_periods=3).median()
        interval = f"[{signed(rho['low'])}, {signed(rho['high'])}]"
        label = f"layer {layer}: ρ = {signed(rho['rho'])}, 95% {interval}"
        ax.plot(rows["position"], smooth, color=style.color, ls=style.dash, lw=2, label=label)
        told.append(f"ρ = {signed(rho['rho'])} at layer {layer}")
    ax.legend(loc="best", fontsize=8, framealpha=0.85, edgecolor="none")
    name = {"displacement": "Raw displacement", "z-score": "Causal z-score"}[signal]
    return dress(ax, f"{name} against position: {', '.join(told)}", "position (tokens)", unit)


def trend_by_layer(trend: pd.DataFrame, layers: Sequence[int] = (), ax: Axes | None = None) -> Axes:
    """Draw ρ against position for every layer, before and after the z-score, with 95% intervals.

    Parameters
    ----------
    trend : pandas.DataFrame
        From :func:`epiviz.frames.positional_trend`.
    layers : sequence of int
        Layers to mark.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    ax.axhline(0, color=GREY, lw=0.8)
    looks = {"displacement": (GREY, "o", "-", "raw"), "z-score": (BLUE, "s", (0, (4, 1.5)), "z-scored")}
    told = []
    for signal, rows in trend.groupby("signal", sort=True):
        colour, marker, dash, name = looks[signal]
        ax.fill_between(rows["layer"], rows["low"], rows["high"], color=colour, alpha=0.18, lw=0)
        ax.plot(rows["layer"], rows["rho"], color=colour, marker=marker, ms=3.5, ls=dash, lw=1.4, label=name)
        clear = int(((rows["low"] > 0) | (rows["high"] < 0)).sum())
        told.append(f"{clear} of {len(rows)} {name}")
    for layer in layers:
        ax.axvline(layer, color=GREY, lw=0.8, ls=":")
        note(ax, f"layer {layer}", (layer, 0), (-2, 2), on_edge=True, rotation=90, ha="right", va="bottom")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="best", frameon=False, fontsize=8, ncols=2)
    title = f"Layers whose interval excludes 0: {', '.join(told)}"
    unit = f"Spearman ρ with position\n(95%, {int(trend['tokens'].iloc[0]):,} tokens)"
    return dress(ax, title, "layer", unit)


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


def head_map(
    frame: pd.DataFrame, column: str, label: str, title: str | None = None, log: bool = False, ax: Axes | None = None
) -> Axes:
    """Draw one number for each head as a heat map, layers from left to right.

    Parameters
    ----------
    frame : pandas.DataFrame
        ``layer``, ``head`` and ``column``, as from :func:`epiviz.frames.value_heads`.
    column : str
    label : str
        What the colour means, with its unit.
    title : str, optional
        Names the highest head if not given.
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
    if title is None:
        where = f"highest in layer {best['layer']:.0f}, head {best['head']:.0f} ({best[column]:.2f})"
        title = f"{label[0].upper()}{label[1:]}: {where}; median of all heads {frame[column].median():.2f}"
    dress(ax, title, "layer", "KV head")
    ax.grid(False)
    return ax


def value_tail(frame: pd.DataFrame, factor: float = frames.TAIL_FACTOR, ax: Axes | None = None) -> Axes:
    """Draw how many tokens exceed a multiple of their head's median value range; one line for each head.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.value_tail`.
    factor : float
        The multiple that the title tells about.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    wide = frame.pivot_table(index="multiple", columns=["layer", "head"], values="share")
    shown = wide.where(wide > 0)
    ax.plot(shown.index, shown.to_numpy(), color=BLUE, lw=0.5, alpha=0.25)
    mean = wide.mean(axis=1)
    ax.plot(mean.index, mean.where(mean > 0), color=DARK_BLUE, lw=2.2, label="mean of all heads")
    ax.plot([], [], color=BLUE, lw=0.8, alpha=0.6, label=f"each of {wide.shape[1]} heads")
    ax.axvline(factor, color=ORANGE, lw=1, ls=(0, (4, 2)))
    ax.set(xscale="log", yscale="log")
    last = mean.index[mean > 0].max()
    ax.set_xlim(0.5, max(factor * 1.15, float(last) * 1.05))
    log_axis(ax.xaxis, steps=(1, 1.5, 2, 3, 5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    beyond = float(np.interp(factor, mean.index, mean))
    title = f"{100 * beyond:.2g}% of value states exceed {factor:g}× their head's median"
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
        ax.plot(line.index, line, label=f"{position}: {_plain(token)}", **look)
        told.append(f"{rows['rank'].median():.0%}")
    ax.set_ylim(-0.03, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, title="sink", title_fontsize=8)
    title = f"Median percentile of the sinks' ranges: {', '.join(told)}"
    return dress(ax, title, "layer", "percentile in the head\n(mean of its KV heads)")


def carriers(frame: pd.DataFrame, share: float = frames.LARGE_SHARE, ax: Axes | None = None) -> Axes:
    """Draw how much more often each class of tokens carries a large value state than tokens at large.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.carriers`.
    share : float
        What counted as large there.
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
    unit = f"share among the largest {share:.0%} of each head ÷ share of tokens (95%)"
    return dress(ax, title, unit, "class (tokens)")


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
    evicting = frame[frame["policy"].isin([name for name in policies if name != "full"])]
    if len(evicting):
        held = evicting.groupby(["part", "policy"])["kept"].mean()
        told = [f"{spread(held[part])} of {what}" for part, what in PARTS.items() if part in held.index]
        title = f"At the end evicting caches hold {' and '.join(told)}"
    dress(ax, title, f"position (tokens; {tokens})", "")
    ax.grid(False)
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=9, fontweight="bold", pad=16)
    return ax


def meter(frame: pd.DataFrame, budget: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw mean and peak slots of each policy, and the bytes beside them.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.runs`.
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
        used = f"{run['kv_mib']:.1f} + {run['state_mib']:.2f} MiB, {run['evictions']} evictions"
        note(ax, used, (right, place), (9, 0), va="center", fontsize=8, color=INK)
    if budget is not None:
        ax.axvline(budget, color=GREY, lw=1, ls=":")
        note(ax, f"budget {budget}", (budget, 1), (-3, -2), on_edge=True, rotation=90, ha="right", va="top")
    ax.set_yticks(range(len(rows)), rows["policy"])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_xlim(0, rows["peak_slots"].max() * 1.6)
    full = frame[frame["evictions"] == 0]
    evicting = frame[frame["evictions"] > 0]
    title = "Slots held per layer and KV head"
    if len(full) and len(evicting):
        pairs = evicting["kv_mib"] / full["kv_mib"].max()
        all_of_it = (evicting["kv_mib"] + evicting["state_mib"]) / (full["kv_mib"] + full["state_mib"]).max()
        title = f"Evicting caches: {spread(pairs)} of the full cache's keys and values, "
        title += f"{spread(all_of_it)} with what policies keep besides"
    return dress(ax, title, "slots per layer and KV head: mean (marker) to peak (bar); keys and values + state", "")


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
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_figheight(max(3.6, 1.3 + 0.24 * len(rows)))
    for place, row in rows.iterrows():
        style = policy_style(row["policy"])
        ax.hlines(place, row["low"], row["high"], color=style.color, lw=2)
        ax.plot(row["nll_increase"], place, marker=style.marker, ms=7, color=style.color, ls="none")
    title = "Eviction's cost in prediction"
    reference = rows[rows["policy"] == control]
    if len(reference):
        row = reference.iloc[0]
        ax.axvspan(row["low"], row["high"], color=FAINT, zorder=0)
        note(ax, control, (row["nll_increase"], 1), (0, -3), on_edge=True, ha="center", va="top", color=GREY)
        others = rows[rows["policy"] != control]
        better = others[others["high"] < row["low"]]
        title = f"{len(better)} of {len(others)} policies lie clear of {control} ({signed(row['nll_increase'])} nats)"
        title += f"; lowest {others['policy'].iloc[-1]} ({signed(others['nll_increase'].iloc[-1])})"
    ax.axvline(0, color=LINE, lw=1)
    ax.set_yticks(range(len(rows)), rows["policy"])
    n = int(rows["n"].iloc[0])
    return dress(ax, title, f"−log p above the full cache (nats per token; {n} tokens, 95% block bootstrap)", "")


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
        linewidths=0.5, cbar_kws={"label": "Jaccard index of kept sets, mean over heads", "pad": 0.02},
    )  # fmt: skip
    title = "Overlap of kept sets"
    pairs = [(table.iloc[a, b], a, b) for a in range(len(table)) for b in range(a)]
    if pairs:
        told = [f"{table.index[a]} and {table.index[b]} ({share:.2f})" for share, a, b in (max(pairs), min(pairs))]
        title = f"Most alike: {told[0]}; least: {told[1]}"
    dress(ax, title, "", "")
    ax.grid(False)
    ax.tick_params(axis="x", rotation=60)
    return ax


def _quoted(frame: pd.DataFrame, token: int) -> str:
    piece = frame.loc[frame["position"] == token, "token"].iloc[0]
    return f" (‘{_plain(piece)}’)"


def _near(frame: pd.DataFrame, token: int | None, around: int) -> pd.DataFrame:
    if token is None:
        # the first token's jump may be a hundred times larger than all others and would flatten them
        return frame[frame["part"] == "generated"] if (frame["part"] == "generated").any() else frame
    if not (frame["position"] == token).any():
        raise ValueError(f"there is no token {token} in a trace of {frame['position'].max() + 1} tokens")
    return frame[(frame["position"] - token).abs() <= around]


def _mark(ax: Axes, token: int | None) -> None:
    if token is not None:
        ax.axvspan(token - 0.5, token + 0.5, color=FAINT, zorder=0)


def _token_axis(ax: Axes, part: pd.DataFrame, token: int | None) -> Axes:
    """Write the text of the tokens under the axis where there is room for it."""
    if token is None:
        ax.set_xlabel("position (tokens)", fontsize=9)
        return ax
    tokens = part.drop_duplicates("position")
    ax.set_xticks(tokens["position"], [_plain(piece) for piece in tokens["token"]], rotation=90, fontsize=7)
    for tick, position in zip(ax.get_xticklabels(), tokens["position"], strict=True):
        tick.set_fontweight("bold" if position == token else "normal")
    ax.grid(False, axis="x")
    ax.set_xlim(tokens["position"].min() - 1, tokens["position"].max() + 1)
    ax.set_xlabel(f"tokens {tokens['position'].min()} to {tokens['position'].max()}", fontsize=9)
    return ax


def _prompt_band(ax: Axes, frame: pd.DataFrame) -> None:
    end = int((frame.drop_duplicates("position")["part"] == "prompt").sum())
    if end:
        ax.axvspan(-0.5, end - 0.5, color="#f1f1f1", zorder=0)
        note(ax, "prompt", (0, 1), (2, -2), on_edge=True, va="top")


def _name_tokens(ax: Axes, tokens: pd.DataFrame) -> None:
    """Write each token's text at its point; a neighbour of one that is named already stays unnamed."""
    named: list[float] = []
    gap = 0.04 * np.ptp(ax.get_xlim())
    for row in tokens.itertuples():
        if all(abs(row.position - other) > gap for other in named):
            named.append(row.position)
            note(ax, _plain(row.token), (row.position, row.score), (4, 2), fontsize=8, color=INK)


def _plain(piece: str) -> str:
    """A token's text that mathtext leaves alone."""
    return frames.printable(piece).replace("$", r"\$")


def _line_label(ax: Axes, rows: pd.DataFrame, column: str, text: str, style: Style) -> None:
    ax.plot(rows["position"], rows[column], color=style.color, ls=style.dash, lw=1.8)
    end = rows["position"].iloc[-1], rows[column].iloc[-1]
    note(ax, text, end, (6, 0), fontsize=8, color=style.color, va="center", annotation_clip=False)
