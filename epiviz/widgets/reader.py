"""TraceReader: the text of a trace or of generated runs, with what a cache keeps and loses.

This module knows traits, messages and files; what is shown lives in :mod:`epiviz.widgets.data`, how it is drawn in
``reader.js``. Every control is handled in the browser, Python hears of it when the control is released.
"""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import html
import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import anywidget
import numpy as np
import traitlets as t

from epiviz.widgets.data import (
    BADGES,
    NO_BUCKET,
    THRESHOLDS,
    Column,
    ReaderData,
    Scope,
    build,
    event_indices,
    printable,
)

HERE = Path(__file__).parent
CONTROLS = ("color_by", "method", "budget", "step", "layer", "head", "threshold", "selected", "column")
WIDGET_KEYWORDS = ("layout", "tabbable", "tooltip")

# The same colours as in reader.css; here for readers that run no script.
PALETTES = {
    "signed": ["e68d23", "fab35b", "fed095", "fce7ca", "ffffff", "e2e3ef", "c9c8e1", "ada6ce", "8a7eb3"],
    "magnitude": ["ffffff", "e1edf8", "ccdff1", "add0e6", "84bcdb", "5ba3d0"],
}
EVICTED = "color:#767676;text-decoration:line-through"
WAITING = "color:#a0a0a0"
FALLBACK_HEAD, FALLBACK_TAIL = 400, 100

PAGE = """<!doctype html>
<html lang="en" class="epi-page">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main id="epi-reader"><noscript>{fallback}</noscript></main>
<script type="application/json" id="epi-state">{state}</script>
<script type="application/octet-stream" id="epi-data">{data}</script>
<script type="module">{module}</script>
</body>
</html>
"""


class TraceReader(anywidget.AnyWidget):
    """Read a trace under a budget, replays of policies over it, or texts generated under eviction.

    The badge in the header says which of the three is on screen: a *static ranking* (a token is struck if its rank by
    the colour-by score is not below the budget: a thought experiment), a *replay*, or *generated* text.

    Parameters
    ----------
    source : Trace, Run, Replay, or a list of Runs or of Replays
        A list of up to three runs is read side by side.
    runs : Replay or list of Replays
        Replays of ``source``, if that is a trace.
    scores : mapping of name to (array, kind, unit), optional
        What to colour by. ``kind`` is "signed" or "magnitude", the array ``[tokens]`` (a list of arrays for a list of
        runs). Without it a trace offers its epiphany score, surprisal and value range.
    title : str, optional
    **controls
        Initial values of the traits below.

    Attributes
    ----------
    color_by, method : str
    budget, step : int
        Brought to the nearest value that can be shown.
    layer, head : int
        The head whose cache is shown; ``layer = -1`` means all heads.
    threshold : int
        With all heads: a token counts as evicted once this percentage of them has lost it (10, 25, 50, 75 or 90).
    selected, column : int
        The pinned token (-1: none) and the text it belongs to.
    data : ReaderData
        What is shown, as plain arrays.

    Examples
    --------
    >>> reader = TraceReader(trace, budget=128)                  # doctest: +SKIP
    >>> reader.observe(lambda change: print(change.new), "selected")  # doctest: +SKIP
    >>> reader.to_html("reader.html")                            # doctest: +SKIP
    """

    _esm = HERE / "reader.js"
    _css = HERE / "reader.css"
    _meta = t.Dict().tag(sync=True)
    _data = t.Bytes().tag(sync=True)

    color_by = t.Unicode().tag(sync=True)
    method = t.Unicode().tag(sync=True)
    budget = t.Int().tag(sync=True)
    step = t.Int().tag(sync=True)
    layer = t.Int(-1).tag(sync=True)
    head = t.Int(0).tag(sync=True)
    threshold = t.Int(50).tag(sync=True)
    selected = t.Int(-1).tag(sync=True)
    column = t.Int(0).tag(sync=True)

    def __init__(self, source, runs=(), *, scores: Mapping | None = None, title: str | None = None, **controls) -> None:
        _refuse_unknown(controls)
        self.data: ReaderData = build(source, runs, scores, title)
        meta, block = self.data.pack()
        initial = {
            "color_by": self.data.score_names[0],
            "method": self.data.methods[0],
            "budget": self._first_budget(controls.get("method", self.data.methods[0])),
            "step": self.data.tokens,
        }
        super().__init__(_meta=meta, _data=block, **(initial | controls))
        self.on_msg(self._answer)

    def _first_budget(self, method: str) -> int:
        computed = self.data.budgets(method)
        return computed[0] if computed else max(1, round(self.data.tokens / 4))

    # ---- traits

    @t.validate("color_by")
    def _valid_color(self, proposal) -> str:
        return _one_of("color_by", proposal.value, self.data.score_names)

    @t.validate("method")
    def _valid_method(self, proposal) -> str:
        return _one_of("method", proposal.value, self.data.methods)

    @t.validate("budget")
    def _valid_budget(self, proposal) -> int:
        return self.data.nearest_budget(self.method, proposal.value)

    @t.validate("step")
    def _valid_step(self, proposal) -> int:
        return _between(0, proposal.value, self.data.tokens)

    @t.validate("layer")
    def _valid_layer(self, proposal) -> int:
        return _between(-1, proposal.value, self.data.layers - 1)

    @t.validate("head")
    def _valid_head(self, proposal) -> int:
        return _between(0, proposal.value, max(0, self.data.heads - 1))

    @t.validate("threshold")
    def _valid_threshold(self, proposal) -> int:
        return min(THRESHOLDS, key=lambda threshold: abs(threshold - proposal.value))

    @t.validate("selected")
    def _valid_selected(self, proposal) -> int:
        return _between(-1, proposal.value, self.data.tokens - 1)

    @t.validate("column")
    def _valid_column(self, proposal) -> int:
        return _between(0, proposal.value, len(self.data.columns) - 1)

    @t.observe("method")
    def _refit_budget(self, change) -> None:
        self.budget = self.data.nearest_budget(change.new, self.budget)

    # ---- what is on screen, in numbers

    @property
    def scope(self) -> Scope:
        """The heads whose cache is shown."""
        return Scope(self.layer, self.head, self.threshold)

    def struck(self, column: int = 0) -> np.ndarray:
        """Return which tokens of a column are struck out under the current controls, bool ``[tokens]``."""
        return self.data.struck(self.method, self.budget, self.step, self.scope, self.color_by, column)

    def waiting(self, column: int = 0) -> np.ndarray:
        """Return which tokens of a column do not exist yet at the current step, bool ``[tokens]``."""
        step = self.data.tokens if self.data.shown(self.method) == "static" else self.step
        return np.arange(len(self.data.columns[column])) >= step

    def counts(self, column: int = 0) -> dict[str, int]:
        """Return how many tokens of a column are kept, struck and not there yet."""
        struck, waiting = int(self.struck(column).sum()), int(self.waiting(column).sum())
        return {"kept": len(self.data.columns[column]) - struck - waiting, "struck": struck, "waiting": waiting}

    # ---- messages

    def _answer(self, _widget, content: dict, _buffers) -> None:
        """Send the deaths and reasons of one head, or of one token in all heads: what was too big to ship."""
        story = self.data.stories[content["story"]]
        retention = story.retention
        part = np.s_[content["layer"], content["head"]] if content["ask"] == "head" else np.s_[:, :, content["token"]]
        death = event_indices(retention.death[part], retention.events)
        self.send({**content, "tell": content["ask"]}, [death.tobytes(), retention.reason[part].tobytes()])

    # ---- without a kernel

    def to_html(self, path: str | Path) -> Path:
        """Write the reader, in its current state, as one file that works offline; return its path."""
        module = self._source("reader.js") + "\nmount(document);\n"
        if "</script" in module:
            raise ValueError("reader.js must not contain the end tag of a script: it is embedded in a page")
        state = {name: getattr(self, name) for name in CONTROLS} | {"_meta": self._meta, "_offline": True}
        if not self.data.ships_heads():
            state["layer"] = -1  # single heads are too big for a file
        page = PAGE.format(
            title=html.escape(visible(self.data.title) or "epiviz"),
            css=self._source("reader.css"),
            fallback=self._fallback("The interactive reader needs JavaScript."),
            state=json.dumps(state).replace("<", "\\u003c"),
            data=base64.b64encode(gzip.compress(self._data, mtime=0)).decode(),
            module=module,
            digest=base64.b64encode(hashlib.sha256(module.encode()).digest()).decode(),
        )
        path = Path(path)
        path.write_text(page, encoding="utf-8", newline="")
        return path

    @staticmethod
    def _source(name: str) -> str:
        return (HERE / name).read_text(encoding="utf-8")

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return data | {"text/plain": repr(self), "text/html": self._fallback()}, metadata

    def __repr__(self) -> str:
        return f"TraceReader({visible(self.data.title)!r}, {self._summary()})"

    def _summary(self, column: int = 0) -> str:
        kind = BADGES[self.data.shown(self.method)]
        story = self.data.story(self.method, self.budget, column)
        budget = story.budget if story else self.budget
        counts = self.counts(column)
        text = f"{kind}, budget {budget}: {counts['kept']} kept, {counts['struck']} struck"
        return text + (f", {counts['waiting']} not there yet" if counts["waiting"] else "")

    def _fallback(self, note: str = "Run the notebook, or trust it, for the interactive reader.") -> str:
        """Return the beginning and the end of each text with inline styles only."""
        parts = [self._fallback_column(i, column) for i, column in enumerate(self.data.columns)]
        return (
            '<div style="font:15px/1.7 system-ui,sans-serif;max-width:60em;color:#1a1a1a;background:#fff;padding:12px">'
            f"<strong>{html.escape(visible(self.data.title))}</strong>{''.join(parts)}"
            f'<p style="font-size:12px;color:#5f5f5f">{note}</p></div>'
        )

    def _fallback_column(self, index: int, column: Column) -> str:
        length = len(column)
        struck, waiting = self.struck(index), self.waiting(index)
        score = column.score(self.color_by)
        cut = length > FALLBACK_HEAD + FALLBACK_TAIL
        head = range(FALLBACK_HEAD if cut else length)
        tail = range(length - FALLBACK_TAIL, length) if cut else range(0)

        def token(i: int) -> str:
            style = EVICTED if struck[i] else WAITING if waiting[i] else _background(score, i)
            text = html.escape(visible(column.spans.piece(i), keep="\n\t"))
            return f'<span style="{style}">{text}</span>' if style else text

        skipped = f'<p style="color:#5f5f5f">… {length - len(head) - len(tail)} tokens …</p>' if cut else ""
        body = [f'<div style="white-space:pre-wrap">{"".join(map(token, part))}</div>' for part in (head, tail)]
        label = " · ".join(filter(None, [column.label, column.note])) + " · " + self._summary(index)
        return f'<p style="font-size:12px;color:#5f5f5f">{html.escape(visible(label))}</p>{body[0]}{skipped}{body[1]}'


def visible(text: str, keep: str = "") -> str:
    """Return ``text`` with control characters, bidi marks and lone surrogates written out, except those in ``keep``.

    Examples
    --------
    >>> visible("a\\u202eb\\x00\\n", keep="\\n")
    'a⟨U+202E⟩b⟨U+0000⟩\\n'
    """
    return printable("".join(c if c in keep or not _is_invisible(c) else f"⟨U+{ord(c):04X}⟩" for c in text))


def _is_invisible(character: str) -> bool:
    kind = unicodedata.category(character)
    # A zero-width joiner or variation tag holds an emoji sequence together; writing it out would tear it apart.
    return kind in ("Cc", "Cs") or (kind == "Cf" and character not in "\u200c\u200d" and ord(character) < 0xE0000)


def _background(score, index: int) -> str:
    if score is None or score.buckets[index] == NO_BUCKET:
        return ""
    colour = PALETTES[score.kind][score.buckets[index]]
    return "" if colour == "ffffff" else f"background:#{colour}"


def _between(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))


def _one_of(name: str, value: str, known: list[str]) -> str:
    if value not in known:
        raise t.TraitError(f"{name} must be one of {known}, got {value!r}")
    return value


def _refuse_unknown(controls: dict) -> None:
    known = (*CONTROLS, *WIDGET_KEYWORDS)
    for name in controls:
        if name not in known:
            close = difflib.get_close_matches(name, (*known, "scores", "title", "runs"), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are scores, title, {', '.join(known)}"
            raise TypeError(f"TraceReader got an unknown keyword {name!r}; {hint}")
