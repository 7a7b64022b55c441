"""Who survives eviction: by class of token, by age, how diverse the survivors are, and what a draw promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, PercentFormatter

from epiviz.palette import BLUE, DARK_BLUE, GREY, LINE, ORANGE, dress, log_axis, new_axes, policy_style, spread
from epiviz.plots.dots import nothing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = {
    "key_cosine": "mean cosine between kept keys",
    "effective_rank": "effective rank of kept keys",
    "coverage": "stretches of text with a kept token",
    "gap_evenness": "evenness of gaps (1: equally spaced)",
    "largest_gap": "longest stretch without a kept token (tokens)",
}


def survival(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw how much more of each class of tokens a policy keeps than chance, with 95% intervals.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.survival`.
    ax : matplotlib.axes.Axes, optional
    """
    if frame.empty:
        return nothing(ax, "Which tokens are kept")
    policies = list(dict.fromkeys(frame["policy"]))
    classes = frame.groupby("group").agg(tokens=("tokens", "max"), low=("expected", "min"), high=("expected", "max"))
    classes = classes.sort_values("tokens")
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_figheight(max(3.6, 1.2 + 0.14 * len(classes) * len(policies)))
    ax.axvline(0, color=GREY, lw=1)
    between = np.arange(1, len(classes)) - 0.5
    ax.hlines(between, 0, 1, color=LINE, lw=0.6, transform=ax.get_yaxis_transform())
    for number, policy in enumerate(policies):
        rows, style = frame[frame["policy"] == policy], policy_style(policy)
        place = classes.index.get_indexer(rows["group"]) + 0.4 - 0.8 * (number + 0.5) / len(policies)
        ax.hlines(place, rows["low"], rows["high"], color=style.color, lw=1.5)
        ax.plot(rows["excess"], place, marker=style.marker, ms=5, color=style.color, ls="none", label=policy)
    labels = [f"{name} ({row.tokens:,.0f})\nchance {spread(row[['low', 'high']])}" for name, row in classes.iterrows()]
    ax.set_yticks(range(len(classes)), labels)
    ax.set_ylim(-0.5, len(classes) - 0.5)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:+.0f}".replace("-", "−").replace("+0", "0")))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    clear = frame[(frame["low"] > 0) | (frame["high"] < 0)]
    title = f"{len(clear)} of {len(frame)} kept shares differ clearly from chance"
    if len(clear):
        most = clear.loc[clear["excess"].abs().idxmax()]
        title += f"; most: {most['policy']} keeps {most['kept']:.0%} of {most['group']} tokens, "
        title += f"chance {most['expected']:.0%}"
    dress(ax, title, "kept share minus chance (points; 95%, block bootstrap)", "class (contested tokens)", width=58)
    ax.grid(False, axis="y")
    return ax


def lifetimes(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the share of slots still held against their age, one line for each policy.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.lifetimes`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    medians = {}
    for policy, rows in frame.groupby("policy", sort=False):
        style = policy_style(policy)
        ax.step(rows["age"], rows["held"], where="post", color=style.color, ls=style.dash, lw=1.6, label=policy)
        gone = rows.loc[rows["held"] <= 0.5, "age"]
        medians[policy] = int(gone.min()) if len(gone) else None
    ax.axhline(0.5, color=LINE, lw=0.8, ls=":")
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.legend(loc="best", frameon=False, fontsize=8)
    told = {policy: age for policy, age in medians.items() if age is not None}
    title = f"More than half of the slots outlive the text under all {len(medians)} policies"
    if told:
        first, last = min(told, key=told.get), max(told, key=told.get)
        title = f"Half of the slots are gone {told[first]:,} ({first}) to {told[last]:,} ({last}) tokens later"
    return dress(ax, title, "age (later tokens seen)", "slots still held (Kaplan–Meier)")


def diversity(
    frame: pd.DataFrame, measure: str = "key_cosine", control: str = "random", ax: Axes | None = None
) -> Axes:
    """Draw how much more of one measure of diversity each policy has than the control, after each eviction.

    Heads differ more than policies do, so each head is compared with itself: the line is the mean difference, the band
    the middle half of the heads.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.diversity`; all policies evict at the same steps.
    measure : str
        One of :data:`epiviz.diversity.MEASURES`.
    control : str
        The policy to compare with.
    ax : matplotlib.axes.Axes, optional
    """
    if frame.empty:
        return nothing(ax, MEASURES[measure].capitalize())
    wide = frame.pivot_table(index=["step", "layer", "head"], columns="policy", values=measure, sort=False)
    if control not in wide:
        raise ValueError(f"there is no policy {control!r} to compare with, only {', '.join(wide.columns)}")
    ax = new_axes(ax)
    ax.axhline(0, color=GREY, lw=1)
    told = {}
    for policy in [name for name in dict.fromkeys(frame["policy"]) if name != control]:
        style, by_step = policy_style(policy), (wide[policy] - wide[control]).groupby("step")
        mean, low, high = by_step.mean(), by_step.quantile(0.25), by_step.quantile(0.75)
        ax.fill_between(mean.index, low, high, color=style.color, alpha=0.15, lw=0)
        ax.plot(mean.index, mean, color=style.color, ls=style.dash, marker=style.marker, ms=3.5, lw=1.4, label=policy)
        told[policy] = wide[policy].mean()
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    title = f"{MEASURES[measure]}: {wide[control].mean():.3g} under {control}"
    if told:
        low, high = min(told, key=told.get), max(told, key=told.get)
        title += f", from {told[low]:.3g} ({low}) to {told[high]:.3g} ({high})"
    heads = len(frame[["layer", "head"]].drop_duplicates())
    unit = f"difference from {control}\n(mean and middle half of {heads} heads)"
    return dress(ax, title[0].upper() + title[1:], "step (tokens seen)", unit, width=62)


def inclusion(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw how often each token survived a draw, against VaSE's bound and the exact probability.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.inclusion`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    rows = frame[frame["share"] > 0].sort_values("share")
    ax.vlines(rows["share"], rows["low"], rows["high"], color=BLUE, lw=0.8, alpha=0.4)
    ax.plot(rows["share"], rows["frequency"], ls="none", marker="o", ms=2.8, color=BLUE, label="measured (95%)")
    ax.plot(rows["share"], rows["exact"], color=DARK_BLUE, lw=1.4, label="exact, without replacement")
    ax.plot(rows["share"], rows["bound"], color=ORANGE, lw=1.4, ls=(0, (4, 1.5)), label="bound 1 − (1 − a/Z)$^m$")
    ax.set_xscale("log")
    if rows["share"].max() < 100 * rows["share"].min():
        log_axis(ax.xaxis)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.legend(loc="best", frameon=False, fontsize=8)
    first = frame.iloc[0]
    below = int((rows["high"] < rows["bound"]).sum())
    gap = (rows["exact"] - rows["bound"]).max()
    title = (
        f"{first['draws']:.0f} of {len(frame):,} drawn, {first['seeds']:,.0f} seeds: {below} tokens below the bound; "
    )
    title += f"the exact probability exceeds it by up to {100 * gap:.0f} points"
    return dress(ax, title, "share of the attention drawn from, a/Z", "survived the draw")
