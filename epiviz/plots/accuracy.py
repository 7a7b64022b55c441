"""Accuracy under eviction: against budget, beside a control, what the other texts came to, and published curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz.palette import (
    BLUE,
    DARK_BLUE,
    FAINT,
    GREY,
    INK,
    LINE,
    MIDDLE_BLUE,
    ORANGE,
    PURPLE,
    distinct_styles,
    dress,
    new_axes,
    note,
)
from epiviz.plots.dots import ALPHA, dots, mark_clear

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURED = 6  # policies with a colour of their own, the most accurate
# Right is purple, wrong orange, and what never became an answer lies between; hatches, so that colour is never alone.
LOOKS = {
    "correct": (PURPLE, ""),
    "wrong": (ORANGE, ""),
    "no answer": ("#fdb863", "//"),
    "garbage": (MIDDLE_BLUE, "xx"),
    "empty": (FAINT, ".."),
    "length": (BLUE, "\\\\"),
    "loop": (DARK_BLUE, "oo"),
    "error": (INK, ""),
    "ungraded": ("white", ""),
}


def accuracy(
    table: pd.DataFrame,
    highlight: Sequence[str] | None = None,
    protect_prompt: bool = False,
    control: str = "random",
    ax: Axes | None = None,
) -> Axes:
    """Draw accuracy against budget, some policies in colour; the full cache and the protected control in every panel.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.accuracy`.
    highlight : sequence of str
        Policies in colour; by default the six most accurate on average over the budgets.
    protect_prompt : bool
        Which of the curves to draw. The control's curve with a protected prompt is drawn whichever this is.
    control : str
    ax : matplotlib.axes.Axes, optional

    Raises
    ------
    ValueError
        No row has a budget and this choice of ``protect_prompt``.
    """
    ax = new_axes(ax)
    rows = _with_budget(table, protect_prompt)
    wide = rows.pivot_table("accuracy", "policy", "budget")
    means = wide.dropna().mean(axis=1).sort_values(ascending=False, kind="stable")  # only what was run at all of them
    ranked = [name for name in means.index if name != control]
    chosen = list(highlight) if highlight else ranked[:COLOURED]
    styles = distinct_styles(chosen)
    _full_band(ax, table, vertical=False)
    for policy, curve in rows.groupby("policy", sort=False):
        curve = curve.sort_values("budget")
        if policy == control:
            _control_line(ax, curve, control + (", prompt protected" if protect_prompt else ""), ":")
        elif policy in chosen:
            style = styles[policy]
            # intervals beside, not over one another
            x = curve["budget"] * (1 + 0.012 * (chosen.index(policy) - (len(chosen) - 1) / 2))
            ax.vlines(x, curve["low"], curve["high"], color=style.color, lw=1, alpha=0.7, zorder=3)
            ax.plot(x, curve["accuracy"], color=style.color, marker=style.marker, ls=style.dash, ms=5, lw=1.4,
                    zorder=5, label=policy)  # fmt: skip
        else:
            ax.plot(curve["budget"], curve["accuracy"], color=LINE, lw=0.6, alpha=0.6, zorder=2)
    protected = table[table["protect_prompt"] & (table["policy"] == control)].sort_values("budget")
    if not protect_prompt and len(protected):
        _control_line(ax, protected, f"{control}, prompt protected", "--")
    if rows["budget"].min() < 1:
        ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    else:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(rows["budget"].unique()), [f"{budget:g}" for budget in sorted(rows["budget"].unique())])
        ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter(_percent)
    ax.set_ylim(-0.02, 1.02)
    ax.legend(fontsize=7.5, frameon=False, ncols=2, loc="best")
    title = f"Accuracy, prompt {'protected' if protect_prompt else 'not protected'}"
    if ranked:
        many = len(wide.columns) > 1
        where = f"On average over {len(wide.columns)} budgets" if many else f"At {_limit(wide.columns[0])}"
        title = f"{where}, prompt {'' if protect_prompt else 'not '}protected, {ranked[0]} "
        title += f"solves {means[ranked[0]]:.0%}"
        if control in means:
            title += f", {control} {means[control]:.0%}"
        if len(full := table[table["policy"] == "full"]):
            title += f", the full cache {full.iloc[0]['accuracy']:.0%}"
    return dress(ax, title, "budget (slots per layer and KV head)", f"accuracy\n{_sizes(rows)}, 95% intervals")


def paired_accuracy(
    table: pd.DataFrame,
    budget: float | None = None,
    protect_prompt: bool = False,
    control: str = "random",
    ax: Axes | None = None,
) -> Axes:
    """Draw each policy's difference to the control on the same problems at one budget, with intervals.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.paired_accuracy`.
    budget : float, optional
        The tightest by default.
    protect_prompt : bool
    control : str
        Named in the title.
    ax : matplotlib.axes.Axes, optional
    """
    rows = _at(table, budget, protect_prompt).sort_values("difference").reset_index(drop=True)
    ax = dots(rows, "difference", control, ax)
    ax.axvline(0, color=LINE, lw=1)
    standing = mark_clear(ax, rows)
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:+.0f}".replace("-", "−"))
    above, below = (standing & (rows["difference"] > 0)).sum(), (standing & (rows["difference"] < 0)).sum()
    limit, compared = _limit(rows["budget"][0]), rows["compared"].iloc[0]
    title = f"{above} of {len(rows)} policies solve clearly more than {control} at {limit}, {below} fewer "
    title += f"(• p < {ALPHA:g} after Holm over {compared} comparisons)"
    label = f"accuracy minus that of {control} (points), paired over {_range(rows['n'])} problems, 95% bootstrap"
    return dress(ax, title, label, "")


def outcomes(
    table: pd.DataFrame, budget: float | None = None, protect_prompt: bool = False, ax: Axes | None = None
) -> Axes:
    """Draw what became of the texts of each policy at one budget, and of the full cache's, as stacked shares.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.outcomes`.
    budget : float, optional
        The tightest by default.
    protect_prompt : bool
    ax : matplotlib.axes.Axes, optional
    """
    chosen = pd.concat([_at(table, budget, protect_prompt), table[table["policy"] == "full"]])
    wide = chosen.pivot_table("share", "policy", "outcome", sort=False).fillna(0.0)
    wide = wide[[name for name in LOOKS if name in wide]]
    wide = wide.sort_values("correct" if "correct" in wide else next(iter(wide.columns)))
    if ax is None:
        ax = new_axes(None)
        ax.figure.set_figheight(max(3.6, 1.5 + 0.22 * len(wide)))
    left = np.zeros(len(wide))
    for name, shares in wide.items():
        colour, hatch = LOOKS[name]
        ax.barh(range(len(wide)), shares, left=left, color=colour, hatch=hatch, edgecolor="white", lw=0.4, label=name)
        left += shares.to_numpy()
    ax.set_yticks(range(len(wide)), wide.index)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(_percent)
    ax.legend(fontsize=7.5, frameon=False, ncols=len(wide.columns), loc="lower center", bbox_to_anchor=(0.5, -0.32))
    limit, evicting = _limit(chosen["budget"].min()), wide.drop("full", errors="ignore")
    failed = evicting[[name for name in evicting if name not in ("correct", "wrong", "ungraded")]].sum(axis=1)
    wrong = evicting["wrong"] if "wrong" in evicting else 0 * failed
    title = (
        f"At {limit}, {failed.mean():.0%} of the texts give no answer that counts and {wrong.mean():.0%} a wrong one"
    )
    if failed.max() > 0:
        worst = failed.idxmax()
        kinds = evicting.loc[worst].drop(["correct", "wrong"], errors="ignore")
        title += f"; most {worst} ({failed.max():.0%}, mainly {kinds.idxmax()})"
    ax = dress(ax, title, f"share of texts ({_range(chosen['n'])} a policy)", "")
    ax.grid(False, axis="y")
    return ax


def evicted_accuracy(
    table: pd.DataFrame, budget: float | None = None, protect_prompt: bool = False, ax: Axes | None = None
) -> Axes:
    """Draw the accuracy of the texts that evicted beside that of all texts and the full cache's on the same problems.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.accuracy`.
    budget : float, optional
        The tightest by default.
    protect_prompt : bool
    ax : matplotlib.axes.Axes, optional
    """
    rows = _at(table, budget, protect_prompt).sort_values("accuracy_evicted", na_position="first")
    rows = rows.reset_index(drop=True)
    drawn = rows.drop(columns=["low", "high"]).rename(columns={"evicted_low": "low", "evicted_high": "high"})
    ax = dots(drawn, "accuracy_evicted", "random", ax)
    places = range(len(rows))
    ax.plot(rows["accuracy"], places, marker="o", ms=7, mfc="none", mec=GREY, ls="none", label="all texts")
    ax.plot(rows["full_evicted"], places, marker="|", ms=11, mew=2, color=INK, ls="none",
            label="full cache, same problems")  # fmt: skip
    for place, row in rows.iterrows():
        note(ax, f"{row['evicted']:.0%} evict", (1.01, place), va="center", color=GREY)
    ax.set_xlim(-0.02, 1.16)
    ax.xaxis.set_major_formatter(_percent)
    ax.legend(fontsize=7.5, frameon=False, loc="lower right")
    gap = (rows["accuracy"] - rows["accuracy_evicted"]).max()
    found = "no text evicted anything"
    if (rows["evicted"] == 1).all():
        found = "every text evicted something: accuracy is not a matter of short texts"
    elif np.isfinite(gap):
        found = f"texts that never evict raise a policy's accuracy by up to {100 * gap:.0f} points"
    title = f"At {_limit(rows['budget'][0])}, {found}"
    return dress(ax, title, f"accuracy of the texts that evicted ({_sizes(rows)}), 95% intervals", "")


def accuracy_at(
    table: pd.DataFrame,
    budget: float | None = None,
    protect_prompt: bool = False,
    control: str = "random",
    ax: Axes | None = None,
) -> Axes:
    """Draw the accuracy of each policy at one budget, with the full cache and the control: for variants of a method.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`epiviz.frames.accuracy`.
    budget : float, optional
        The tightest by default.
    protect_prompt : bool
    control : str
    ax : matplotlib.axes.Axes, optional
    """
    rows = _at(table, budget, protect_prompt)
    if len(set(rows["positions"])) > 1:
        rows = rows.assign(policy=rows["policy"] + ", " + rows["positions"])
    rows = rows.iloc[::-1].reset_index(drop=True)
    ax = dots(rows, "accuracy", control, ax)
    _full_band(ax, table, vertical=True)
    ax.xaxis.set_major_formatter(_percent)
    best, worst = rows.loc[rows["accuracy"].idxmax()], rows.loc[rows["accuracy"].idxmin()]
    title = f"At {_limit(rows['budget'][0])}, from {worst['accuracy']:.0%} ({worst['policy']}) to "
    title += f"{best['accuracy']:.0%} ({best['policy']})"
    return dress(ax, title, f"accuracy ({_sizes(rows)}), 95% intervals", "")


def published_accuracy(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw accuracies that a paper published, in a panel of their own: other models, other problems.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows of :func:`epiviz.published` of one paper, model and task, in percent.
    ax : matplotlib.axes.Axes, optional

    Raises
    ------
    ValueError
        The rows are of several models or tasks, not in percent, or have two numbers for one point.
    """
    for column in ("paper", "model", "task", "unit"):
        if len(set(frame[column])) != 1:
            raise ValueError(f"one {column} is needed, got {', '.join(sorted(set(frame[column]))) or 'no rows'}")
    if frame["unit"].iloc[0] != "%":
        raise ValueError(f"accuracies in % are needed, got {frame['unit'].iloc[0]!r}")
    twice = frame[frame.duplicated(["method", "budget"], keep=False)]
    if len(twice):
        one = twice.iloc[0]
        raise ValueError(f"{one['method']} has several numbers at budget {one['budget']}; choose a table")
    ax = new_axes(ax)
    curves = frame[frame["budget"].notna()]
    best = curves[curves["budget"] == curves["budget"].min()].sort_values("value", ascending=False)
    styles = distinct_styles(list(dict.fromkeys(curves["method"])))
    for method, curve in curves.groupby("method", sort=False):
        curve, style = curve.sort_values("budget"), styles[method]
        ax.plot(curve["budget"].astype(float), curve["value"] / 100, color=style.color, marker=style.marker,
                ls=style.dash, ms=4, lw=1.2, label=method)  # fmt: skip
    for _, row in frame[frame["budget"].isna()].iterrows():
        ax.axhline(row["value"] / 100, color=INK, lw=1.2)
        note(ax, row["method"], (curves["budget"].max(), row["value"] / 100), (0, 3), ha="right", color=INK)
    ax.set_xscale("log", base=2)
    budgets = sorted(curves["budget"].unique())
    ax.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter(_percent)
    ax.set_ylim(-0.02, 1.02)
    ax.legend(fontsize=6.5, frameon=False, ncols=2, loc="upper left")
    first = frame.iloc[0]
    title = f"Published by {first['paper']} ({first['model'].split('/')[-1]}, {first['task']}): at "
    title += f"{best.iloc[0]['budget']} slots {best.iloc[0]['method']} {best.iloc[0]['value']:g}%"
    return dress(ax, title, "budget (slots, as the paper counts them)", "accuracy, as published, no intervals given")


# -- what the figures share --------------------------------------------------------------------------------------------


def _with_budget(table: pd.DataFrame, protect_prompt: bool) -> pd.DataFrame:
    rows = table[table["budget"].notna() & (table["protect_prompt"] == protect_prompt)]
    if rows.empty:
        raise ValueError(f"no row of the table has a budget with protect_prompt={protect_prompt}")
    return rows


def _at(table: pd.DataFrame, budget: float | None, protect_prompt: bool) -> pd.DataFrame:
    """Return the rows of one budget, the tightest by default."""
    rows = _with_budget(table, protect_prompt)
    budget = rows["budget"].min() if budget is None else budget
    if not (rows["budget"] == budget).any():
        raise ValueError(f"no row has the budget {budget:g}; there are {sorted(rows['budget'].unique())}")
    return rows[rows["budget"] == budget]


def _full_band(ax: Axes, table: pd.DataFrame, vertical: bool) -> None:
    for row in table[table["policy"] == "full"].head(1).itertuples():
        span, line = (ax.axvspan, ax.axvline) if vertical else (ax.axhspan, ax.axhline)
        span(row.low, row.high, color=FAINT, lw=0, zorder=0)
        line(row.accuracy, color=INK, lw=1.2, zorder=1, label="full cache")


def _control_line(ax: Axes, curve: pd.DataFrame, label: str, dash: str) -> None:
    ax.plot(curve["budget"], curve["accuracy"], color=INK, lw=1.5, ls=dash, zorder=4, label=label)
    ax.fill_between(curve["budget"], curve["low"], curve["high"], color=GREY, alpha=0.12, lw=0, zorder=1)


def _limit(budget: float) -> str:
    return f"{budget:.0%} of the text" if budget < 1 else f"{budget:g} slots"


def _percent(share: float, _=None) -> str:
    return f"{share:.0%}"


def _range(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _sizes(rows: pd.DataFrame) -> str:
    return f"{_range(rows['problems'])} problems"
