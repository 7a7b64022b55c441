"""A trace token by token: displacement, z-scores, the epiphany score and their trends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from epiviz.palette import (
    BLUE,
    FAINT,
    GREY,
    INK,
    LAYERS,
    ORANGE,
    PURPLE,
    Style,
    dress,
    new_axes,
    note,
    plain,
)
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        title += f"(‘{plain(best['token'])}’); half lie within ±{generated['score'].abs().median():.2f}"
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


def _quoted(frame: pd.DataFrame, token: int) -> str:
    piece = frame.loc[frame["position"] == token, "token"].iloc[0]
    return f" (‘{plain(piece)}’)"


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
    ax.set_xticks(tokens["position"], [plain(piece) for piece in tokens["token"]], rotation=90, fontsize=7)
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
            note(ax, plain(row.token), (row.position, row.score), (4, 2), fontsize=8, color=INK)


def _line_label(ax: Axes, rows: pd.DataFrame, column: str, text: str, style: Style) -> None:
    ax.plot(rows["position"], rows[column], color=style.color, ls=style.dash, lw=1.8)
    end = rows["position"].iloc[-1], rows[column].iloc[-1]
    note(ax, text, end, (6, 0), fontsize=8, color=style.color, va="center", annotation_clip=False)
