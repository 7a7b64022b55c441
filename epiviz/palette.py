"""How every figure looks: colours, markers, dashes, axes and numbers, defined once.

Colours are safe for colour-blind readers and never alone: policies and layers differ in marker and dash too. The two
ends of PuOr stand for signed numbers and for the two layers of the epiphany score, purple on the side that is kept; a
light Blues stands for magnitudes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from epiviz.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (6.4, 3.6)  # inches
DPI = 150
TITLE_WIDTH = 70  # characters that fit over the axes
INK, GREY, LINE, FAINT = "#333333", "#767676", "#999999", "#e3e3e3"  # grey: 4.5 to 1 on white
PURPLE, ORANGE = "#5e3c99", "#b35806"
BLUE, MIDDLE_BLUE, DARK_BLUE = "#2166ac", "#6baed6", "#08306b"


@dataclass(frozen=True)
class Style:
    """How one line looks in every figure."""

    color: str
    marker: str
    dash: str | tuple


def _clip_map(name: str, low: float, high: float) -> LinearSegmentedColormap:
    colours = plt.get_cmap(name)(np.linspace(low, high, 256))
    return LinearSegmentedColormap.from_list(f"{name} {low:g} to {high:g}", colours)


# Neither white, which looks like a gap, nor so dark that marks on it are lost.
MAGNITUDE = _clip_map("Blues", 0.06, 0.75)

_COLOURS = [to_hex(colour) for colour in sns.color_palette("colorblind", 10)]
_MARKERS = ["o", "s", "D", "^", "v", "P", "X", "p", "h", "<"]
_DASHES = ["-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1)), (0, (8, 2, 1, 2, 1, 2))]
CYCLE = [Style(_COLOURS[i], _MARKERS[i], _DASHES[i % len(_DASHES)]) for i in range(len(_COLOURS))]

_KNOWN = ("epikv", "vase-attnv", "streaming", "random", "vase-dkv", "snapkv")
POLICIES = {"full": Style(INK, "*", "-")} | dict(zip(_KNOWN, CYCLE, strict=False))
LAYERS = [Style(PURPLE, "o", "-"), Style(ORANGE, "s", (0, (4, 1.5))), *CYCLE[2:]]


def policy_style(name: str) -> Style:
    """Return how a policy looks: the same in every figure, whatever else is drawn.

    A label with parameters looks like its policy; an unknown name gets a look that depends on the name alone.

    Examples
    --------
    >>> policy_style("epikv(window=32)") == policy_style("epikv")
    True
    """
    base = name.split("(")[0]
    spare = CYCLE[len(_KNOWN) :]
    return POLICIES.get(base) or spare[sum(base.encode()) % len(spare)]


def distinct_styles(names: Sequence[str]) -> dict[str, Style]:
    """Return looks for the policies of one figure: known ones keep theirs, and no two look alike while looks last."""
    styles = {name: POLICIES[name.split("(")[0]] for name in names if name.split("(")[0] in POLICIES}
    free = [style for style in [*CYCLE[len(_KNOWN) :], *CYCLE] if style not in styles.values()]
    others = [name for name in names if name not in styles]
    return styles | {name: free[i % len(free)] if free else CYCLE[i % len(CYCLE)] for i, name in enumerate(others)}


def new_axes(ax: Axes | None) -> Axes:
    """Return the given axes, or those of a new figure."""
    return plt.subplots(figsize=SIZE, dpi=DPI, layout="constrained")[1] if ax is None else ax


def dress(ax: Axes, title: str, x: str, y: str, width: int = TITLE_WIDTH) -> Axes:
    """Give axes their title of lines up to ``width`` characters, labels, grid and spines."""
    title = title.replace("layer ", "layer\u00a0")  # a line must not end between the two
    ax.set_title(textwrap.fill(title, width, break_on_hyphens=False), loc="left", fontsize=9, fontweight="bold")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8.5, length=3, color=LINE)
    ax.grid(True, color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    sns.despine(ax=ax)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(LINE)
    return ax


def note(ax: Axes, text: str, at: tuple, shift: tuple = (0, 0), on_edge: bool = False, **look) -> None:
    """Write a small text at a point, moved by ``shift`` points; ``on_edge``: the height is a share of the axes."""
    coordinates = ("data", "axes fraction") if on_edge else "data"
    look = {"xycoords": coordinates, "fontsize": 7.5, "color": GREY} | look
    ax.annotate(text, at, xytext=shift, textcoords="offset points", **look)


def name_part(ax: Axes, part: str) -> Axes:
    """Write above a figure which part of a study it draws; an empty name leaves it as it is."""
    if part:
        ax.figure.suptitle(part, x=0.01, ha="left", fontsize=8.5, color=GREY)
    return ax


def log_axis(axis, steps: Sequence[float] = (1, 2, 5)) -> None:
    """Write plain numbers on a log axis: over less than a decade it would otherwise show one power of ten."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def spread(shares: pd.Series) -> str:
    """Return the smallest and the largest of some shares in percent.

    Examples
    --------
    >>> spread(pd.Series([0.25, 0.5, 0.31]))
    '25% to 50%'
    """
    low, high = f"{shares.min():.0%}", f"{shares.max():.0%}"
    return low if low == high else f"{low} to {high}"


def plain(piece: str) -> str:
    """Return a token's text that mathtext leaves alone.

    Examples
    --------
    >>> print(plain(" $5"))
    ␣\\$5
    """
    return printable(piece).replace("$", r"\$")
