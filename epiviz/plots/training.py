"""A training: how the loss falls and what the model can do by then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from epiviz.palette import CYCLE, GREY, INK, dress, new_axes, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def training_loss(metrics: pd.DataFrame, unigram: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw the loss over the tokens read, and where longer problems came in.

    Parameters
    ----------
    metrics : pandas.DataFrame
        As :func:`epiviz.training.train` writes them.
    unigram : float, optional
        The loss of a model that only knows how often each token occurs, drawn as a line.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    millions = metrics["tokens"] / 1e6
    ax.plot(millions, metrics["loss"], color=INK, lw=1.2, marker="o", ms=2.5)
    ax.set_yscale("log")
    if unigram is not None:
        ax.axhline(unigram, color=GREY, lw=1, ls=":")
        note(ax, f"unigram model {unigram:.2f}", (millions.iloc[-1], unigram), (0, 3), ha="right")
    raised = metrics[metrics["statements"].diff().fillna(0) > 0]
    for _, row in raised.iterrows():
        ax.axvline(row["tokens"] / 1e6, color=GREY, lw=0.6)
        note(ax, f"≤ {row['statements']:.0f} lines", (row["tokens"] / 1e6, 1), (2, -8), on_edge=True)
    first, last = metrics["loss"].iloc[[0, -1]]
    title = (
        f"Loss fell from {first:.3g} to {last:.3g} nats per token of the solution in {millions.iloc[-1]:.3g} M tokens"
    )
    return dress(ax, title, "tokens read (millions)", "loss (nats per token)")


def training_accuracy(metrics: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the share of unseen problems solved without a slip (lines) and of values looked up right (dots).

    Parameters
    ----------
    metrics : pandas.DataFrame
        With the columns of :func:`epiviz.training.unseen`: ``exact_<lines>`` and ``lookups_<lines>``.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    sizes = sorted(int(name.removeprefix("exact_")) for name in metrics if name.startswith("exact_"))
    millions = metrics["tokens"] / 1e6
    for style, size in zip(CYCLE, sizes, strict=False):
        ax.plot(millions, metrics[f"exact_{size}"], color=style.color, ls=style.dash, lw=1.4, label=f"{size} lines")
        ax.plot(
            millions, metrics[f"lookups_{size}"], color=style.color, ls="none", marker=style.marker, ms=2, alpha=0.5
        )
    ax.set_ylim(-0.03, 1.03)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    last = ", ".join(f"{metrics[f'exact_{size}'].iloc[-1]:.0%} at {size} lines" for size in sizes)
    title = f"Unseen problems solved without a slip: {last}; dots are single look-ups"
    return dress(ax, title, "tokens read (millions)", "share right")
