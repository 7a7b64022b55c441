"""Sheet: what a picture of a view is made of; texts in cells, samples of colours and lines, and framed plots.

Lengths are points, and y runs down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from epiviz.retention import Reason
from epiviz.widgets.data import CLIP
from epiviz.widgets.looks import PALETTES, visible
from epiviz.widgets.typeset import cells, families, glyph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Part = tuple[float, Callable]  # of a legend: its width, and what draws it at a place of axes

# The light theme of theme.css.
INK, MUTED, GONE, LATER, LINE = "#1b1b1f", "#62626b", "#767676", "#74747e", "#e3e3e6"
ALIVE, KEPT, LOST, ACCENT = "#7d6fb8", "#8b8b95", "#ececef", "#5b4aa0"
STRIKE, UNDERLINE = "#a4a4ac", "#7d7d88"
TINTS = {"static": "#8a4b00", "replay": "#14609c", "generated": "#24693c"}

SIZE = 9.0  # points
CELL, ROW = 0.602 * SIZE, 15.0  # points: a character of DejaVu Sans Mono, and a line
WIDE = 100  # cells of a picture of one text
BETWEEN = 14.0  # points between the parts of a legend

# Thickness, dash and the distance of a second line, for the reasons that the page underlines.
UNDERLINES = {
    Reason.SINK: (2.2, "-", 0.0),
    Reason.RECENT: (0.8, (0, (3, 2)), 0.0),
    Reason.PROMPT: (0.8, "-", 0.0),
    Reason.RESERVED: (0.7, "-", 1.8),
    Reason.SAMPLED: (1.3, (0, (1, 1.6)), 0.0),
}
NAMES = {
    Reason.SINK: "sink",
    Reason.RECENT: "recent",
    Reason.PROMPT: "prompt",
    Reason.RESERVED: "reserved value",
    Reason.SAMPLED: "sampled",
    Reason.TOP: "top score",
}


@dataclass(frozen=True)
class Block:
    """A part of the picture over its whole width: a height in points, and what draws it.

    ``draw`` gets the figure and a box (left, bottom, width, height) in points.
    """

    height: float
    draw: Callable[[Figure, tuple[float, float, float, float]], None]


def paper(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes over a box whose unit is a point, from the upper left corner."""
    left, bottom, width, height = box
    wide, high = figure.get_size_inches() * 72
    ax = figure.add_axes((left / wide, bottom / high, width / wide, height / high))
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.axis("off")
    return ax


def write_text(ax: Axes, x: float, y: float, text: str, **look) -> None:
    """Write a text whose middle line is at ``y``; dollar signs are dollar signs."""
    look = {"color": INK, "fontsize": SIZE, "va": "center_baseline", "fontfamily": families()} | look
    ax.text(x, y, text, parse_math=False, **look)


def known(text: str) -> str:
    """A text with everything invisible written out, in glyphs that there are."""
    return "".join(map(glyph, visible(text)))


def cut(text: str, width: int) -> str:
    return text if cells(text) <= width else text[: width - 1] + "…"


def pixel_columns(tokens: int, width: int) -> np.ndarray:
    """The first token of each pixel column, at most one column for a token."""
    return np.unique(np.linspace(0, tokens, min(width, tokens), endpoint=False).astype(np.int64))


def underline(ax: Axes, lines: list, reason: Reason) -> None:
    thickness, dash, second = UNDERLINES[reason]
    ax.add_collection(LineCollection(lines, colors=UNDERLINE, linewidths=thickness, linestyles=[dash]))
    if second:
        above = [[(x, y - second) for x, y in line] for line in lines]
        ax.add_collection(LineCollection(above, colors=UNDERLINE, linewidths=thickness, linestyles=[dash]))


def in_lines(parts: list[Part], room: float) -> list[list[Part]]:
    """Break the parts of a legend into lines of at most ``room`` points."""
    lines: list[list] = [[]]
    for part in parts:
        if lines[-1] and sum(width + BETWEEN for width, _ in [*lines[-1], part]) > room + BETWEEN:
            lines.append([])
        lines[-1].append(part)
    return lines


def print_lines(ax: Axes, lines: list[list[Part]], left: float, y: float) -> None:
    for row, line in enumerate(lines):
        x = left
        for width, mark in line:
            mark(ax, x, y + row * ROW)
            x += width + BETWEEN


def sample(text: str, colour: str, struck: bool = False, reason: Reason | None = None) -> Part:
    width = cells(text) * CELL

    def mark(ax, x, y):
        write_text(ax, x, y, text, color=colour)
        if struck:
            ax.add_collection(LineCollection([[(x, y), (x + width, y)]], colors=STRIKE, linewidths=0.8))
        if reason in UNDERLINES:
            underline(ax, [[(x, y + 5.5), (x + width, y + 5.5)]], reason)

    return width, mark


def ramp(score) -> list[Part]:
    """Name, unit, colours and ends of a scale."""
    low, high = (f"{end:.3g}".replace("-", "−") for end in score.clip)
    colours = [f"#{colour}" for colour in PALETTES[score.kind]]

    def mark(ax, x, y):
        for i, colour in enumerate(colours):
            ax.add_patch(Rectangle((x + 11 * i, y - 5), 11, 10, facecolor=colour, edgecolor=LINE, lw=0.4))

    name = known(f"{score.name} ({score.unit})" if score.unit else score.name)
    return [
        sample(name, INK),
        sample(f"≤ {low}", MUTED),
        (11 * len(colours), mark),
        sample(f"≥ {high}", MUTED),
        sample(f"percentiles {CLIP[0]}–{CLIP[1]}", MUTED),
    ]


AXIS = (44.0, 34.0)  # points for the labels on the left and below


def plot(title: str, height: float, paint: Callable[[Axes], None], legend=()) -> Block:
    """A titled plot with axes of its own, and a line of samples under it."""
    lines = in_lines(list(legend), WIDE * CELL - AXIS[0])
    under = ROW * len(lines)

    def draw_block(figure, box):
        left, bottom, width, high = box
        ax = paper(figure, box)
        write_text(ax, 0, 12, cut(title, int(width / CELL)), fontweight="bold")
        wide, tall = figure.get_size_inches() * 72
        place = (left + AXIS[0], bottom + AXIS[1] + under, width - AXIS[0] - 30, height)
        plot = figure.add_axes((place[0] / wide, place[1] / tall, place[2] / wide, place[3] / tall))
        plot.tick_params(labelsize=8, length=3, color=LINE, labelcolor=MUTED)
        for spine in plot.spines.values():
            spine.set_color(LINE)
        paint(plot)
        print_lines(ax, lines, AXIS[0], high - under + ROW / 2)

    return Block(24 + height + AXIS[1] + under, draw_block)


def swatch(text: str, colour: str) -> Part:
    def mark(ax, x, y):
        ax.add_patch(Rectangle((x, y - 4.5), 11, 9, facecolor=colour, edgecolor=LINE, lw=0.4))
        write_text(ax, x + 16, y, text, color=MUTED)

    return 16 + cells(text) * CELL, mark
