"""What readers see that run no script: the beginning and the end of each text, with inline styles only."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from epiviz.widgets.data import NO_BUCKET
from epiviz.widgets.looks import PALETTES, visible

if TYPE_CHECKING:
    from epiviz.widgets.view import View

EVICTED = "color:#767676;text-decoration:line-through"
WAITING = "color:#74747e"
FALLBACK_HEAD, FALLBACK_TAIL = 400, 100
NOTE = "Run the notebook, or trust it, for the interactive view."


def write(view: View, note: str = NOTE) -> str:
    """Return the texts of a view as they look under its controls."""
    columns = "".join(_column(view, i) for i in range(view.columns))
    return (
        '<div style="font:15px/1.7 system-ui,sans-serif;max-width:60em;color:#1a1a1a;background:#fff;padding:12px">'
        f"<strong>{html.escape(visible(view.data.title))}</strong>{columns}"
        f'<p style="font-size:12px;color:#5f5f5f">{note}</p></div>'
    )


def _column(view: View, index: int) -> str:
    column = view.data.text(index)
    length = len(column)
    struck, waiting = view.struck(index), view.waiting(index)
    score = column.score(view.color_by)
    cut = length > FALLBACK_HEAD + FALLBACK_TAIL
    head = range(FALLBACK_HEAD if cut else length)
    tail = range(length - FALLBACK_TAIL, length) if cut else range(0)

    def token(i: int) -> str:
        style = EVICTED if struck[i] else WAITING if waiting[i] else _background(score, i)
        text = html.escape(visible(column.spans.piece(i), keep="\n\t"))
        return f'<span style="{style}">{text}</span>' if style else text

    skipped = f'<p style="color:#5f5f5f">… {length - len(head) - len(tail)} tokens …</p>' if cut else ""
    body = [f'<div style="white-space:pre-wrap">{"".join(map(token, part))}</div>' for part in (head, tail)]
    label = " · ".join(filter(None, [column.label, column.note])) + " · " + view.summary(index)
    return f'<p style="font-size:12px;color:#5f5f5f">{html.escape(visible(label))}</p>{body[0]}{skipped}{body[1]}'


def _background(score, index: int) -> str:
    if score is None or score.buckets[index] == NO_BUCKET:
        return ""
    colour = PALETTES[score.kind][score.buckets[index]]
    return "" if colour == "ffffff" else f"background:#{colour}"
