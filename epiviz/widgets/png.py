"""PNG: a view as a picture, drawn with matplotlib from what the page shows; no browser, no pyplot."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from epiviz.retention import Reason
from epiviz.widgets import images
from epiviz.widgets.data import BADGES, NO_BUCKET, Score, Story
from epiviz.widgets.looks import PALETTES
from epiviz.widgets.sheet import (
    ACCENT,
    CELL,
    GONE,
    INK,
    KEPT,
    LATER,
    LINE,
    LOST,
    MUTED,
    NAMES,
    ROW,
    SIZE,
    STRIKE,
    TINTS,
    UNDERLINES,
    WIDE,
    Block,
    Part,
    cut,
    in_lines,
    known,
    paper,
    pixel_columns,
    print_lines,
    ramp,
    sample,
    underline,
    write_text,
)
from epiviz.widgets.typeset import Piece, cells, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from epiviz.widgets.view import View

WIDTHS = {1: WIDE, 2: 58, 3: 42}  # cells of a text, by the number of texts side by side
MARGIN, GAP = 16.0, 20.0  # points
ROWS = 28
LONGEST = 1000  # rows; a longer picture would be one that no program opens


def write(view: View, path: str | Path, rows: int | None, around: int | None, dpi: int) -> Path:
    """Draw a view into a file; see :meth:`epiviz.TraceReader.to_png`."""
    rows = ROWS if rows is None else rows
    if not 1 <= rows <= LONGEST:
        raise ValueError(f"rows must lie in 1 … {LONGEST}, got {rows}; around= chooses the part of the text")
    if around is not None and not 0 <= around < view.data.tokens:
        raise ValueError(f"around must be a token, 0 … {view.data.tokens - 1}, got {around}")
    path = Path(path)
    with mpl.rc_context({"text.hinting": "none"}):  # a hinted font does not keep to the cells
        draw(view, rows, around).savefig(path, format="png", dpi=dpi)
    return path


def draw(view: View, rows: int = ROWS, around: int | None = None) -> Figure:
    """Return a view as a figure."""
    token = around if around is not None else view.selected if view.selected >= 0 else max(0, view.step - 1)
    token = min(token, view.data.tokens - 1)
    columns = _columns(view)
    texts = [Text(view, column, rows, token, WIDTHS[len(columns)]) for column in columns]
    blocks = [_head(view)]
    if view.kind in ("reader", "live", "workbench"):
        blocks += [_texts(texts), _legend(view, texts)]
    if view.kind in ("timeline", "workbench"):
        blocks += [images.timeline(text) for text in texts if text.story is not None]
    if view.data.layer_scores and view.kind in ("layers", "workbench"):
        blocks.append(images.layers(view, token))
    if view.kind in ("heads", "workbench"):
        blocks += [images.heads(text, token) for text in texts if text.story is not None]
    width = len(texts) * texts[0].width * CELL + (len(texts) - 1) * GAP + 2 * MARGIN
    height = sum(block.height for block in blocks) + 2 * MARGIN
    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    top = height - MARGIN
    for block in blocks:
        top -= block.height
        block.draw(figure, (MARGIN, top, width - 2 * MARGIN, block.height))
    return figure


def _columns(view: View) -> list[int]:
    """The texts on screen; of several generated ones a chosen one stands alone."""
    columns = range(view.columns)
    if view.data.kind != "generated" or view.columns < 2:
        return list(columns)
    chosen = [i for i in columns if view.data.columns[i].label == view.method]
    return chosen or list(columns)


# ---- head and captions


def _head(view: View) -> Block:
    kind = view.data.shown(view.method)

    def paint(figure, box):
        ax = paper(figure, box)
        title = cut(known(view.data.title), int(box[2] / CELL / 1.2) - len(BADGES[kind]) - 4)
        write_text(ax, 0, 8, title, fontsize=1.2 * SIZE, fontweight="bold")
        x = 1.2 * CELL * (cells(title) + 1.5)
        write_text(ax, x, 8, BADGES[kind], color=TINTS[kind])
        if view.kind in ("timeline", "layers", "heads"):
            write_text(ax, 0, 8 + ROW, cut(_caption(view, 0), int(box[2] / CELL)), color=MUTED)

    return Block(24 + (ROW if view.kind in ("timeline", "layers", "heads") else 0), paint)


def _caption(view: View, column: int) -> str:
    """Method, budget, step and counts of a column."""
    text, story = view.data.text(column), view.story(column)
    counts = view.counts(column)
    if story is None:
        what = f"ranked by {view.color_by}, budget {view.budget:,} of {len(text):,} tokens"
    else:
        attended = " attended, nothing evicted" if story.selects else ""
        what = f"{story.method}, budget {story.budget:,}{attended}, step {min(view.step, len(text)):,} of {len(text):,}"
    waiting = f", {counts['waiting']:,} not there yet" if counts["waiting"] else ""
    return known(f"{what}: {counts['kept']:,} kept, {counts['struck']:,} struck{waiting}")


# ---- text


class Text:
    """A column of a view, broken into lines, and the part of it that is drawn."""

    def __init__(self, view: View, column: int, rows: int, token: int, width: int) -> None:
        self.view, self.column = view, column
        self.source = view.data.text(column)
        self.story: Story | None = view.story(column)
        self.score: Score | None = self.source.score(view.color_by)
        self.struck, self.waiting = view.struck(column), view.waiting(column)
        self.width = width
        self.captions = textwrap.wrap(_caption(view, column), width) + textwrap.wrap(known(self.source.note), width)
        pieces = lay_out(self.source.spans, self.width)
        places = [piece.row for piece in pieces if piece.token <= token]
        last = pieces[-1].row if pieces else 0
        first = max(0, min((max(places, default=0)) - rows // 2, last + 1 - rows))
        self.pieces = [piece for piece in pieces if first <= piece.row < first + rows]
        self.first, self.rows = first, min(rows, last + 1)
        shown = [piece.token for piece in self.pieces]
        self.tokens = (min(shown), max(shown)) if shown else (0, 0)
        self.whole = self.rows == last + 1

    @property
    def reasons(self) -> np.ndarray:
        """Why each token was kept, uint8 ``[tokens]``; 0 where it faced no eviction by the step."""
        reasons = np.zeros(len(self.source), dtype=np.uint8)
        story, view = self.story, self.view
        if story is None:
            return reasons
        steps = story.retention.event_steps
        fired = np.searchsorted(steps, view.step, side="right")
        faced = min(steps[fired - 1], story.retention.tokens) if fired else 0
        told = story.retention.reason[view.layer, view.head] if view.layer >= 0 else story.main_reason
        reasons[:faced] = np.where(self.struck[:faced], 0, told[:faced])
        return reasons

    def background(self, token: int) -> str | None:
        if self.score is None or self.struck[token] or self.waiting[token]:
            return None
        bucket = self.score.buckets[token]
        colour = "ffffff" if bucket == NO_BUCKET else PALETTES[self.score.kind][bucket]
        return None if colour == "ffffff" else f"#{colour}"


MAP = 22.0  # points: the strip of the whole text, with what is left free below it


def _texts(texts: list[Text]) -> Block:
    captions = max(len(text.captions) for text in texts)
    height = captions * ROW + MAP + 8 + (max(text.rows for text in texts) + 1) * ROW

    def paint(figure, box):
        left, bottom, _, _ = box
        for i, text in enumerate(texts):
            width = text.width * CELL
            _paint_text(paper(figure, (left + i * (width + GAP), bottom, width, height)), text, captions)

    return Block(height, paint)


def _paint_text(ax: Axes, text: Text, captions: int) -> None:
    for line, told in enumerate(text.captions):
        write_text(ax, 0, 6 + line * ROW, told, color=MUTED)
    _paint_map(ax, text, captions * ROW)
    top = captions * ROW + MAP + 8
    reasons = text.reasons
    strikes, marks = [], {}
    for piece in text.pieces:
        _paint_piece(ax, text, piece, top + (piece.row - text.first) * ROW, reasons, strikes, marks)
    ax.add_collection(LineCollection(strikes, colors=STRIKE, linewidths=0.8))
    for reason, lines in marks.items():
        underline(ax, lines, reason)
    first, last = text.tokens
    part = "the whole text" if text.whole else f"tokens {first:,} to {last:,} of {len(text.source):,}"
    write_text(ax, 0, top + text.rows * ROW + 9, part, color=MUTED, fontsize=SIZE * 0.9)


def _paint_piece(ax, text: Text, piece: Piece, y: float, reasons, strikes: list, marks: dict) -> None:
    token = piece.token
    x, width = piece.cell * CELL, piece.width * CELL
    colour, struck = text.background(token), text.struck[token]
    shown = "↵" if piece.line_end and (struck or colour) else piece.text
    if not shown:
        return
    if colour:
        ax.add_patch(Rectangle((x, y + 0.5), width, ROW - 1, color=colour, lw=0))
    if token == text.view.selected and text.column == text.view.column:
        ax.add_patch(Rectangle((x, y + 0.5), width, ROW - 1, fill=False, edgecolor=INK, lw=1.2))
    ink = GONE if struck else LATER if text.waiting[token] else MUTED if piece.line_end else INK
    write_text(ax, x, y + ROW / 2, shown, color=ink)
    if struck:
        strikes.append([(x, y + ROW / 2), (x + width, y + ROW / 2)])
    elif reasons[token] in UNDERLINES and not piece.line_end:
        marks.setdefault(Reason(reasons[token]), []).append([(x, y + ROW - 2.2), (x + width, y + ROW - 2.2)])
    if token in text.source.divergence:
        ax.add_collection(LineCollection([[(x, y + 1), (x, y + ROW - 1)]], colors=ACCENT, linewidths=2))


def _paint_map(ax: Axes, text: Text, top: float) -> None:
    """The whole text as a strip: the strongest colour above, the share that is kept below, and the part drawn."""
    n, width = len(text.source), text.width * CELL
    edges = pixel_columns(n, round(2 * width))
    seen = np.add.reduceat(~text.waiting, edges, dtype=np.int64)
    kept = np.add.reduceat(~text.waiting & ~text.struck, edges, dtype=np.int64) / np.maximum(1, seen)
    image = np.ones((44, len(edges), 3))
    split = 0
    if text.score is not None:
        split = 24
        image[: split - 2] = _strongest(text, edges)
    rows = np.arange(44 - split)[:, None] >= (44 - split) * (1 - kept)
    image[split:] = np.where(rows[..., None], to_rgb(KEPT), to_rgb(LOST))
    image[split:, seen == 0] = 1
    ax.imshow(image, extent=(0, width, top + MAP - 4, top), aspect="auto", interpolation="nearest", zorder=0)
    if not text.whole:
        first, last = (width * token / n for token in (text.tokens[0], text.tokens[1] + 1))
        ax.add_patch(Rectangle((first, top - 1.5), max(2, last - first), MAP - 1, fill=False, edgecolor=ACCENT, lw=1.2))
    ax.set_xlim(0, width)  # imshow sets limits of its own
    ax.set_ylim(ax.get_position().height * ax.figure.get_size_inches()[1] * 72, 0)


def _strongest(text: Text, edges: np.ndarray) -> np.ndarray:
    score = text.score
    palette = np.array([to_rgb(f"#{colour}") for colour in PALETTES[score.kind]])
    neutral = 4 if score.kind == "signed" else 0
    away = np.where((score.buckets == NO_BUCKET) | text.struck | text.waiting, 0, score.buckets.astype(int) - neutral)
    high, low = np.maximum.reduceat(away, edges), np.minimum.reduceat(away, edges)
    return palette[np.where(high >= -low, high, low) + neutral]


# ---- legend


def _legend(view: View, texts: list[Text]) -> Block:
    """What colours and lines mean."""
    lines = in_lines(_legend_parts(view, texts), len(texts) * (texts[0].width * CELL + GAP) - GAP)

    def paint(figure, box):
        ax = paper(figure, box)
        ax.add_collection(LineCollection([[(0, 2), (box[2], 2)]], colors=LINE, linewidths=0.8))
        print_lines(ax, lines, 0, 6 + ROW / 2)

    return Block(10 + len(lines) * ROW, paint)


def _legend_parts(view: View, texts: list[Text]) -> list[Part]:
    """Widths in points, and what draws them at a place."""
    stories = [text.story for text in texts if text.story is not None]
    parts = [] if texts[0].score is None else ramp(texts[0].score)
    if not stories:
        return [*parts, sample("beyond the budget", GONE, struck=True)]
    if any(not story.selects for story in stories):
        whose = f"layer {view.layer}, head {view.head}" if view.layer >= 0 else f"{view.threshold} % of the heads"
        uniform = all(story.uniform for story in stories)
        parts += [sample("evicted", GONE, struck=True)]
        parts += [] if uniform else [sample(f"by {whose}", MUTED)]
    parts += [sample("not there yet", LATER)]
    seen = set(np.concatenate([np.unique(story.main_reason) for story in stories]).tolist())
    why = [reason for reason in NAMES if reason in seen]
    if why:
        parts += [sample("kept as", MUTED), *(sample(NAMES[reason], MUTED, reason=reason) for reason in why)]
    return parts
