"""What eviction costs against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz.palette import FAINT, GREY, INK, LINE, distinct_styles, dress, new_axes, note
from epiviz.plots.dots import ALPHA, dots, mark_clear
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue look


def budget_curves(
    table: pd.DataFrame, highlight: Sequence[str] = (), control: str = "random", ax: Axes | None = None
) -> Axes:
    """Draw cost against budget: some policies in colour with intervals, all others in grey, the control as a band.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.budget_curves`.
    highlight : sequence of str
        Policies in colour, beside the one that costs least at the tightest budget; by default the six that do.
    control : str
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    tightest = table[table["share"] == table["share"].min()]
    ranked = [name for name in tightest["policy"] if name != control]
    chosen = [name for name in dict.fromkeys([*highlight, *ranked[:1]]) if name != control] if highlight else ranked[:6]
    others = len(set(table["policy"]) - {control, *chosen})
    styles = distinct_styles(chosen)
    for policy, curve in table.groupby("policy", sort=False):
        curve = curve.sort_values("share")
        if policy == control:
            ax.fill_between(curve["share"], curve["low"], curve["high"], color=FAINT, lw=0, zorder=1)
            ax.plot(curve["share"], curve["nll_increase"], color=INK, lw=1.5, ls=":", zorder=4, label=control)
        elif policy in chosen:
            style = styles[policy]
            shift = 0.006 * (chosen.index(policy) - (len(chosen) - 1) / 2)  # intervals beside, not over one another
            x = curve["share"] + shift
            ax.vlines(x, curve["low"], curve["high"], color=style.color, lw=1, alpha=0.7, zorder=3)
            ax.plot(x, curve["nll_increase"], color=style.color, marker=style.marker, ls=style.dash, ms=5, lw=1.4,
                    zorder=5, label=policy)  # fmt: skip
        else:
            ax.plot(curve["share"], curve["nll_increase"], color=LINE, lw=0.6, alpha=0.6, zorder=2)
    if others:
        ax.plot([], [], color=LINE, lw=0.8, label=f"{others} others")
    ax.axhline(0, color=LINE, lw=1)
    ax.set_xticks(sorted(table["share"].unique()))
    ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.legend(fontsize=7.5, frameon=False, ncols=2)
    traces = int(table["n"].max())
    over = f"mean of {traces} traces, 95% t interval" if traces > 1 else "one trace, 95% block bootstrap over tokens"
    title = "Cost of eviction in prediction"
    if len(beside := tightest[tightest["policy"] == control]):
        best = tightest[tightest["policy"] != control].iloc[0]
        title = (
            f"At {best['share']:.0%} of the text, {best['policy']} costs {signed(best['nll_increase'])} nats per token"
        )
        title += f", {control} {signed(beside.iloc[0]['nll_increase'])}"
    return dress(ax, title, "budget, share of the text", f"−log p above the full cache (nats per token)\n{over}")


def against_control(table: pd.DataFrame, control: str = "random", ax: Axes | None = None) -> Axes:
    """Draw each policy's difference to the control at each budget, and mark what many comparisons leave standing.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.budget_curves`, of several traces.
    control : str
    ax : matplotlib.axes.Axes, optional

    Raises
    ------
    ValueError
        The table has no control to compare with.
    """
    wide = table[table["policy"] != control].pivot_table("difference", "policy", "share", dropna=False)
    if wide.isna().all(axis=None):
        raise ValueError(f"the table has no policy {control!r} to compare with; replay it at the same budgets")
    order = wide.mean(axis=1).sort_values().index
    wide = wide.loc[order]
    standing = table.pivot_table("p_holm", "policy", "share", dropna=False).reindex_like(wide) < ALPHA
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_figheight(max(3.6, 1.4 + 0.19 * len(wide)))
    limit = float(np.nanquantile(np.abs(wide), 0.9)) or 1.0
    image = ax.imshow(wide, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    for row, column in np.argwhere(wide.notna().to_numpy()):
        value = wide.iloc[row, column]
        mark = "•" if standing.iloc[row, column] else ""
        dark = image.to_rgba(np.array([value]))[0, :3] @ LUMA < 0.55
        note(ax, f"{signed(value)} {mark}", (column, row), ha="center", va="center", fontsize=7,
             color="white" if dark else INK)  # fmt: skip
    bar = ax.figure.colorbar(image, ax=ax, extend="both", pad=0.02)
    bar.set_label(f"−log p minus that of {control} (nats per token)", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    ax.set_xticks(range(wide.shape[1]), [f"{share:.0%}" for share in wide.columns])
    ax.set_yticks(range(len(wide)), wide.index)
    below = (standing & (wide < 0)).sum()
    share = wide.columns[0]
    n = int(table["n"].max())
    title = f"{below[share]} of {len(wide)} policies cost clearly less than {control} at {share:.0%} of the text"
    if wide.shape[1] > 1:
        title += f", {below[wide.columns[-1]]} at {wide.columns[-1]:.0%}"
    title += f" (• p < {ALPHA:g} after Holm, paired over {n} trace{'s' * (n > 1)})"
    ax = dress(ax, title, "budget, share of the text", "")
    ax.grid(False)
    ax.tick_params(labelsize=7.5, length=0, color=GREY)
    return ax


def differences(
    table: pd.DataFrame, share: float | None = None, control: str = "random", ax: Axes | None = None
) -> Axes:
    """Draw each policy's paired difference to the control at one budget, with intervals.

    Intervals of two policies may overlap although one costs less on every trace; the interval of their difference
    tells. Those marked • stay clear of the control after Holm's correction for comparing many policies.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.budget_curves`, of several traces.
    share : float, optional
        Of the text, as in the table; the tightest budget if not given.
    control : str
    ax : matplotlib.axes.Axes, optional

    Raises
    ------
    ValueError
        No policy has a difference at this budget.
    """
    share = table["share"].min() if share is None else share
    rows = table[(table["share"] == share) & table["difference"].notna()]
    if rows.empty:
        raise ValueError(
            f"no policy has a difference to {control!r} at {share:.0%} of the text; the table has "
            f"{', '.join(f'{each:.0%}' for each in sorted(table['share'].unique()))} and needs the control at each"
        )
    rows = rows.sort_values("difference", ascending=False, ignore_index=True)
    rows = rows.drop(columns=["low", "high"]).rename(columns={"difference_low": "low", "difference_high": "high"})
    ax = dots(rows, "difference", control, ax)
    ax.axvline(0, color=LINE, lw=1)
    standing = mark_clear(ax, rows)
    n = int(rows["n"].max())
    best = rows.iloc[-1]
    better = int((standing & (rows["difference"] < 0)).sum())
    title = f"At {share:.0%} of the text {better} of {len(rows)} policies cost clearly less than {control} "
    title += f"(• p < {ALPHA:g} after Holm); lowest {best['policy']}, {signed(best['difference'])}"
    unit = f"−log p minus that of {control} (nats per token)\npaired over {n} traces, 95% t interval"
    return dress(ax, title, unit, "", width=46)
