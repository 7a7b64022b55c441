"""Typeset: a text in lines of cells, as a terminal would break it, with the glyphs that the fonts at hand have."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from epiviz.text import Spans
from epiviz.widgets.looks import visible

# The first is part of matplotlib; the others draw scripts that it lacks, on machines that have them.
WANTED = (
    *("DejaVu Sans Mono", "DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Emoji", "Segoe UI Symbol"),
)
MISSING = "□"
TAB = "    "
_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


@dataclass(frozen=True)
class Piece:
    """A part of a token on one line, in cells from the left."""

    token: int
    row: int
    cell: int
    width: int
    text: str
    line_end: bool = False  # stands for a line break: shown only if the token has something to show


def lay_out(spans: Spans, width: int) -> list[Piece]:
    """Break a text into lines of ``width`` cells, at blanks where that is possible.

    Invisible characters are written out. A token of several lines gives several pieces; one of no characters gives
    none.
    """
    texts = [visible(piece, keep="\n\t").replace("\t", TAB) for piece in spans.pieces]
    owners = [token for token, text in enumerate(texts) for _ in text]
    row = cell = 0
    made: list[Piece] = []
    for match in _PARTS.finditer("".join(texts)):
        part = match[0]
        if part == "\n":
            made.append(Piece(owners[match.start()], row, min(cell, width - 1), 1, "", line_end=True))
            row, cell = row + 1, 0
            continue
        if cell + cells(part) > width and cell and not part.isspace():
            row, cell = row + 1, 0
        for at, character in enumerate(part, match.start()):
            size = cells(character)
            if cell + size > width:
                if part.isspace():
                    continue  # blanks at the end of a line
                row, cell = row + 1, 0
            made.append(Piece(owners[at], row, cell, size, glyph(character)))
            cell += size
    return list(_joined(made))


def _joined(characters: list[Piece]) -> Iterator[Piece]:
    """Join what stands side by side, except wide characters: no font keeps to the cells with those."""
    last: Piece | None = None
    for one in characters:
        beside = last is not None and (last.token, last.row, last.cell + last.width) == (one.token, one.row, one.cell)
        if beside and max(one.width, last.width / max(1, len(last.text))) <= 1 and not (one.line_end or last.line_end):
            last = Piece(one.token, one.row, last.cell, last.width + one.width, last.text + one.text)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def cells(text: str) -> int:
    """Return how many cells a text takes: wide characters two, marks on others none.

    Examples
    --------
    >>> cells("ab"), cells("漢字"), cells("e\\u0301")
    (2, 4, 1)
    """
    return sum(_cells(character) for character in text)


@cache
def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


@cache
def families() -> list[str]:
    """The fonts at hand, in the order in which a glyph is looked for."""
    known = set(font_manager.get_font_names())
    return [name for name in WANTED if name in known]


@cache
def _fonts() -> list[FT2Font]:
    return [font_manager.get_font(font_manager.findfont(name, fallback_to_default=False)) for name in families()]


@cache
def glyph(character: str) -> str:
    """Return the character, or an empty square if no font has it ("" for a mark or joiner that none has)."""
    if any(font.get_char_index(ord(character)) for font in _fonts()):
        return character
    return MISSING if _cells(character) else ""
