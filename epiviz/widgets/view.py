"""View: the traits, messages and files that all views share.

What is shown lives in :mod:`epiviz.widgets.data`, how it is drawn in ``js/``. Every control is handled in the browser,
Python hears of it when the control is released.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import ClassVar

import anywidget
import numpy as np
import traitlets as t

from epiviz.choices import nearest
from epiviz.widgets import fallback, page
from epiviz.widgets.build import build, is_trace, replays_of
from epiviz.widgets.data import BADGES, MAX_COLUMNS, STATIC, THRESHOLDS, ReaderData, Scope, Story, event_indices
from epiviz.widgets.looks import visible
from epiviz.widgets.pack import pack

CONTROLS = (
    "color_by",
    "layer_by",
    "method",
    "beside",
    "budget",
    "step",
    "layer",
    "head",
    "threshold",
    "selected",
    "column",
)  # fmt: skip
KEYWORDS = ("scores", "layer_scores", "title", "model", "compute", "methods", "layout", "tabbable", "tooltip")
LARGE = 1.5e6  # bytes of a page above which its size is printed


class View(anywidget.AnyWidget):
    """What all views share; see :class:`epiviz.TraceReader` for its parameters and attributes."""

    kind: ClassVar[str]  # the key of the view in js/workbench.js
    shows_layers: ClassVar[bool] = False

    _esm = page.script()
    _css = page.style()
    _view = t.Unicode().tag(sync=True)
    _meta = t.Dict().tag(sync=True)
    _data = t.Bytes().tag(sync=True)
    _task = t.Dict().tag(sync=True)

    color_by = t.Unicode().tag(sync=True)
    layer_by = t.Unicode().tag(sync=True)
    method = t.Unicode().tag(sync=True)
    beside = t.List(t.Unicode()).tag(sync=True)
    budget = t.Int().tag(sync=True)
    step = t.Int().tag(sync=True)
    layer = t.Int(-1).tag(sync=True)
    head = t.Int(0).tag(sync=True)
    threshold = t.Int(50).tag(sync=True)
    selected = t.Int(-1).tag(sync=True)
    column = t.Int(0).tag(sync=True)

    def __init__(
        self,
        source,
        runs=(),
        *,
        scores: Mapping | None = None,
        layer_scores: Mapping | None = None,
        title: str | None = None,
        model=None,
        compute=None,
        methods: Iterable | None = None,
        **controls,
    ) -> None:
        _refuse_unknown(type(self).__name__, controls)
        self._lock = threading.RLock()  # of the data, which grows from another thread
        self._background, self._computes = None, ()
        if model is not None or compute is not None:
            runs = replays_of(runs, source)
            compute = self._prepare(source, runs, model, compute, methods)
        layers = (layer_scores or True) if self.shows_layers else False
        self.data: ReaderData = build(
            source,
            runs,
            scores,
            title,
            layer_scores=layers,
            on_demand=self._computes,
        )
        if compute is not None:
            from epiviz.widgets.compute import Background

            self._background = Background(compute, self._progress, self._found, self._ended)
        meta, block = self._pack(self.data, self._computes)
        unread = self.data.kind == "replay" and not self.data.stories
        method = controls.get("method", STATIC if unread else self.data.methods[0])
        initial = {
            "color_by": self.data.score_names[0],
            "layer_by": next((score.name for score in self.data.layer_scores), ""),
            "method": method,
            "budget": self._first_budget(method),
            "step": self.data.tokens,
        }
        super().__init__(_view=self.kind, _meta=meta, _data=block, **(initial | controls))
        self.on_msg(self._answer)
        self.observe(lambda _: self._compute_missing(), ["method", "beside", "budget"])
        self._compute_missing()

    def _prepare(self, trace, replays, model, compute, methods):
        """Settle what can be computed, and how."""
        from epiviz.widgets.compute import on_demand, replayer

        if not is_trace(trace):
            raise TypeError(f"model= and compute= replay a Trace at other budgets, got {type(trace).__name__}")
        if compute is not None:
            if methods is None:
                methods = dict.fromkeys(str(found.policy) for found in replays)
            self._computes = tuple(map(str, methods))
            return compute
        known = on_demand(methods)
        self._computes = tuple(known)
        return replayer(model, trace, known, replays)

    def _pack(self, data: ReaderData, computes=()) -> tuple[dict, bytes]:
        """Return what a page gets to know of ``data``."""
        return pack(data, computes)

    def _first_budget(self, method: str) -> int:
        computed = self.data.budgets(method) or self.data.budgets(self.data.methods[0])
        return computed[0] if computed else max(1, round(self.data.tokens / 4))

    # ---- traits

    @t.validate("color_by")
    def _valid_color(self, proposal) -> str:
        return _one_of("color_by", proposal.value, self.data.score_names)

    @t.validate("layer_by")
    def _valid_layer_by(self, proposal) -> str:
        names = [score.name for score in self.data.layer_scores]
        return _one_of("layer_by", proposal.value, names) if names else ""

    @t.validate("method")
    def _valid_method(self, proposal) -> str:
        return _one_of("method", proposal.value, self.data.methods)

    @t.validate("beside")
    def _valid_beside(self, proposal) -> list[str]:
        others = [name for name in self.data.methods if name != STATIC] if self.data.kind == "replay" else []
        names = [_one_of("beside", name, others) for name in proposal.value]
        return [name for name in dict.fromkeys(names) if name != self.method][: MAX_COLUMNS - 1]

    @t.validate("budget")
    def _valid_budget(self, proposal) -> int:
        if self.method in self._computes:
            return _between(1, proposal.value, max([self.data.tokens, *self.data.budgets(self.method)]))
        return self.data.nearest_budget(self.method, proposal.value)

    @t.validate("step")
    def _valid_step(self, proposal) -> int:
        return _between(0, proposal.value, self.tokens)

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
        return _between(-1, proposal.value, self.tokens - 1)

    @t.validate("column")
    def _valid_column(self, proposal) -> int:
        return _between(0, proposal.value, max(len(self.data.columns), self.columns) - 1)

    @t.observe("method", "beside")
    def _keep_column(self, _change) -> None:
        self.column = self.column  # the validator brings it to one that is on screen

    @t.observe("method")
    def _refit(self, change) -> None:
        self.beside = [] if change.new == STATIC else [name for name in self.beside if name != change.new]
        self.budget = self.budget  # the validator brings it to one that the method can show

    # ---- what is on screen, in numbers

    @property
    def tokens(self) -> int:
        """The length of the longest text."""
        return self.data.tokens

    @property
    def scope(self) -> Scope:
        """The heads whose cache is shown."""
        return Scope(self.layer, self.head, self.threshold)

    @property
    def columns(self) -> int:
        """The number of texts, or of replays side by side."""
        return len(self.data.columns) if self.data.kind == "generated" else 1 + len(self.beside)

    def story(self, column: int = 0) -> Story | None:
        """Return the eviction history behind a column; None for a static ranking.

        Raises
        ------
        NotComputedError
            It is still being computed.
        """
        return self.data.story(*self._shown(column), column)

    def struck(self, column: int = 0) -> np.ndarray:
        """Return which tokens of a column are struck out under the current controls, bool ``[tokens]``."""
        method, budget = self._shown(column)
        return self.data.struck(method, budget, self.step, self.scope, self.color_by, column)

    def waiting(self, column: int = 0) -> np.ndarray:
        """Return which tokens of a column do not exist yet at the current step, bool ``[tokens]``."""
        step = self.data.tokens if self.data.shown(self.method) == "static" else self.step
        return np.arange(len(self.data.text(column))) >= step

    def counts(self, column: int = 0) -> dict[str, int]:
        """Return how many tokens of a column are kept, struck and not there yet."""
        struck, waiting = int(self.struck(column).sum()), int(self.waiting(column).sum())
        return {"kept": len(self.data.text(column)) - struck - waiting, "struck": struck, "waiting": waiting}

    def _shown(self, column: int) -> tuple[str, int]:
        """The method and the budget of a column."""
        if column == 0 or self.data.kind == "generated":
            return self.method, self.budget
        method = self.beside[column - 1]
        return method, self.budget if method in self._computes else self.data.nearest_budget(method, self.budget)

    # ---- budgets that are computed when they are asked for

    def wait(self, timeout: float | None = None) -> None:
        """Return when everything that was asked for is computed; raise the error that kept it from being so.

        Raises
        ------
        TimeoutError
            It takes longer than ``timeout`` seconds.
        """
        if self._background is not None:
            self._background.wait(timeout)

    def stop(self) -> None:
        """Stop computing, and go back to a budget that is there."""
        if self._background is not None:
            self._background.stop()
            self._go_back()

    def _missing(self) -> list[str]:
        shown = [] if self.method == STATIC else [self.method, *self.beside]
        return [name for name in shown if name in self._computes and self.budget not in self.data.budgets(name)]

    def _compute_missing(self) -> None:
        if self._background is None:
            return
        missing = self._missing()
        if missing:
            self._background.start(missing[0], self.budget)
        else:
            self._background.stop()

    def _progress(self, method: str, budget: int, done: int) -> None:
        self._task = {"method": method, "budget": budget, "done": done, "total": self.data.tokens}

    def _found(self, method: str, budget: int, replay) -> None:
        with self._lock:
            if budget in self.data.budgets(method):
                return
            story = Story(method, budget, replay.retention)
            self.data = replace(self.data, stories=(*self.data.stories, story))
            meta, block = self._pack(self.data, self._computes)
            with self.hold_sync():
                self._meta, self._data = meta, block

    def _ended(self, method: str, budget: int, error: Exception | None) -> None:
        self._task = {} if error is None else {"error": f"{method} at {budget} slots: {error}"}
        if error is not None:
            self._go_back()
        elif self._missing():
            self._compute_missing()

    def _go_back(self) -> None:
        """Show what is computed, because what was asked for will not be."""
        ready = [name for name in (self.method, *self.beside) if name == STATIC or self.data.budgets(name)]
        method = ready[0] if ready else next(n for n in self.data.methods if n == STATIC or self.data.budgets(n))
        budget = self.budget if method == STATIC else self.data.nearest_budget(method, self.budget)
        beside = [name for name in ready[1:] if budget in self.data.budgets(name) or name not in self._computes]
        with self.hold_trait_notifications():
            self.beside, self.method, self.budget = beside, method, budget

    # ---- messages

    def _answer(self, _widget, content: dict, _buffers) -> None:
        """Send the deaths and reasons of one head, or of one token in all heads: what was too big to ship."""
        if content["ask"] == "stop":
            self.stop()
            return
        retention = self.data.stories[content["story"]].retention
        part = np.s_[content["layer"], content["head"]] if content["ask"] == "head" else np.s_[:, :, content["token"]]
        death = event_indices(retention.death[part], retention.events)
        self.send({**content, "tell": content["ask"]}, [death.tobytes(), retention.reason[part].tobytes()])

    # ---- without a kernel

    def to_html(self, path: str | Path) -> Path:
        """Write the view, in its current state, as one file that works offline; return its path.

        What is not computed yet is left out. A page of more than 1.5 MB has its size printed.
        """
        if missing := self._missing():
            raise ValueError(f"{missing[0]} at {self.budget} slots is still being computed; wait() returns when it is")
        data = replace(self.data, on_demand=())
        meta, block = self._pack(data)
        state = {name: getattr(self, name) for name in CONTROLS} | {"_meta": meta, "_view": self.kind}
        if not data.ships_heads():
            state["layer"] = -1  # single heads are too big for a file
        path = Path(path)
        note = "The interactive view needs JavaScript."
        page.write(path, visible(data.title), fallback.write(self, note), state, block)
        size = path.stat().st_size
        if size > LARGE:
            print(f"{path} has {size / 1e6:.1f} MB")
        return path

    def to_png(self, path: str | Path, *, rows: int | None = None, around: int | None = None, dpi: int = 150) -> Path:
        """Draw the view, in its current state, into a picture; no browser is needed. Return its path.

        Parameters
        ----------
        path : str or path
        rows : int, optional
            Lines of text; 28 by default.
        around : int, optional
            A token of the part that is drawn; by default the selected one, else the newest at the step. A strip over
            the text shows all of it, and which part this is.
        dpi : int
            Pixels per inch.

        Notes
        -----
        Colours are those of the light theme. Characters that neither matplotlib's fonts nor a few common ones of the
        system have (Chinese and Japanese ones, most emoji) are drawn as empty squares, and scripts that run from right
        to left are drawn letter by letter: :meth:`to_html` shows both properly.

        Raises
        ------
        NotComputedError
            What is shown is still being computed.
        ValueError
            ``rows`` or ``around`` is out of range.
        """
        from epiviz.widgets import png  # here, because a reader that is not drawn need not wait for matplotlib

        return png.write(self, path, rows, around, dpi)

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return data | {"text/plain": repr(self), "text/html": self._fallback()}, metadata

    def _fallback(self) -> str:
        if missing := self._missing():
            return f"<p>{escape(visible(missing[0]))} at {self.budget} slots is being computed.</p>"
        return fallback.write(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({visible(self.data.title)!r}, {self.summary()})"

    def summary(self, column: int = 0) -> str:
        """Return what a column shows, in a line."""
        kind = BADGES[self.data.shown(self.method)]
        if missing := self._missing():
            return f"{kind}, {missing[0]} at {self.budget} slots is being computed"
        story = self.story(column)
        counts = self.counts(column)
        waiting = f", {counts['waiting']} not there yet" if counts["waiting"] else ""
        if story is not None and story.selects:
            attended = min(story.budget, counts["kept"])
            return f"{kind}, {attended} of {counts['kept']} attended{waiting}"
        budget = story.budget if story else self.budget
        return f"{kind}, budget {budget}: {counts['kept']} kept, {counts['struck']} struck{waiting}"


def _between(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))


def _one_of(name: str, value: str, known: list[str]) -> str:
    if value not in known:
        raise t.TraitError(f"{name} must be one of {known}, got {value!r}")
    return value


def _refuse_unknown(view: str, controls: dict) -> None:
    known = (*CONTROLS, *KEYWORDS)
    for name in controls:
        if name not in known:
            raise TypeError(f"{view} got an unknown keyword {name!r}; {nearest(name, (*known, 'runs'))}")
