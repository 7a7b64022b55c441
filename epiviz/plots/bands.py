"""Which tokens make which layers move, and what that makes of the epiphany score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from epiviz import signals
from epiviz.palette import GREY, INK, LAYERS, LINE, Style, dress, new_axes
from epiviz.stats import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNIT = "mean z-score of the displacement (standard deviations)"


def band_anatomy(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the mean z-score of each class of tokens in each layer, and mark EpiKV's bands and layers.

    Dots mark means whose interval excludes 0. Classes are sorted by the difference between the two layers.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.band_anatomy`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    wide = frame.pivot_table("zscore", "class", "layer")
    bands, layers = signals.reference_marks(wide.shape[1])
    if layers:
        wide = wide.loc[(wide[layers[0]] - wide[layers[1]]).sort_values(ascending=False).index]
    limit = float(np.quantile(np.abs(wide), 0.98)) or 1.0
    image = ax.imshow(wide, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
    clear = frame[(frame["low"] > 0) | (frame["high"] < 0)]
    rows = wide.index.get_indexer(clear["class"])
    dark = (clear["zscore"].abs() > 0.65 * limit).to_numpy()
    ax.scatter(clear["layer"], rows, s=5, c=np.where(dark, "white", INK), lw=0)
    for first, last in bands:
        ax.plot([first - 0.4, last + 0.4], [-0.62, -0.62], color=GREY, lw=3, solid_capstyle="butt", clip_on=False)
    ax.plot(layers, [-0.62] * len(layers), ls="none", marker="v", ms=7, color=INK, clip_on=False)
    bar = ax.figure.colorbar(image, ax=ax, extend="both", pad=0.02)
    bar.set_label(UNIT.replace(" (", "\n("), fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    tokens = frame.drop_duplicates("class").set_index("class")["tokens"]
    ax.set_yticks(range(len(wide)), [f"{name} ({tokens[name]:,})" for name in wide.index])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    told = [
        f"layer {layer} moves most at {wide[layer].idxmax()} tokens ({signed(wide[layer].max())})" for layer in layers
    ]
    title = ", ".join(told) if told else "Which tokens make which layers move"
    dress(ax, title[0].upper() + title[1:], "layer (bars: EpiKV's bands, arrows: its two layers)", "class (tokens)", 58)
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=9, fontweight="bold", pad=14)
    ax.grid(False)
    return ax


def score_anatomy(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the mean z-scores of the two layers of the epiphany score in each class of tokens, and their difference.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`epiviz.frames.score_anatomy`.
    ax : matplotlib.axes.Axes, optional
    """
    ax = new_axes(ax)
    classes = list(dict.fromkeys(frame["class"]))
    parts = list(dict.fromkeys(frame["part"]))
    styles = dict(zip(parts, [*LAYERS[:2], Style(INK, "D", "-")], strict=True))
    ax.axvline(0, color=GREY, lw=1)
    ax.hlines(np.arange(1, len(classes)) - 0.5, 0, 1, color=LINE, lw=0.6, transform=ax.get_yaxis_transform())
    for number, (part, style) in enumerate(styles.items()):
        rows = frame[frame["part"] == part]
        place = np.array([classes.index(name) for name in rows["class"]]) + 0.25 * (number - 1)
        ax.hlines(place, rows["low"], rows["high"], color=style.color, lw=1.5)
        ax.plot(rows["mean"], place, ls="none", marker=style.marker, ms=5.5, color=style.color, label=part)
    tokens = frame.drop_duplicates("class").set_index("class")["tokens"]
    ax.set_yticks(range(len(classes)), [f"{name} ({tokens[name]:,})" for name in classes])
    ax.set_ylim(len(classes) - 0.5, -0.5)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    means = frame.pivot_table("mean", "class", "part")
    told = [
        f"{name} tokens {signed(means.loc[name, 'score'])} ({signed(means.loc[name, parts[0]])} minus "
        f"{signed(means.loc[name, parts[1]])})"
        for name in dict.fromkeys([classes[0], classes[-1]])
    ]
    dress(ax, f"Mean epiphany score: {' to '.join(told)}", f"{UNIT}; 95%, block bootstrap", "class (tokens)", 58)
    ax.grid(False, axis="y")
    return ax
