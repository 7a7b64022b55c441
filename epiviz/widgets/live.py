"""Live: a text in the reader while a model writes it, and its cache while slots leave it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from dataclasses import replace
from html import escape

import numpy as np
import traitlets as t
from tqdm import tqdm

from epiviz.attended import Attended
from epiviz.decode import Run, decode, is_batch, prepare, progress_bar, to_run
from epiviz.policies import Budget, Policy
from epiviz.retention import Retention
from epiviz.text import byte_reader, token_spans
from epiviz.widgets.build import build
from epiviz.widgets.data import NotComputedError, ReaderData
from epiviz.widgets.looks import visible
from epiviz.widgets.stream import Stream
from epiviz.widgets.view import View

TELL_SECONDS = 0.1  # between two messages of new tokens
UNHEARD_SECONDS = 1.0  # the same while no page has answered: each message then holds the whole text
RATE_SECONDS = 4.0  # what tokens per second are measured over
HELD_AT_MOST = 0.05  # seconds between two looks whether a pause is over

_current: Live | None = None  # one view writes at a time


def live(
    model,
    prompt,
    policy: str | Policy = "full",
    budget: Budget | None = None,
    max_new_tokens: int = 512,
    seed: int = 0,
    *,
    positions: str = "absolute",
    sampling: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    raw: bool = False,
    stop_on_loop: bool = False,
    title: str | None = None,
    foreground: bool | None = None,
) -> Live:
    """Watch a model write while its cache is being evicted: the same text as :func:`epiviz.generate` writes.

    In a notebook the call returns at once and the text grows in its output, with the slots held, the tokens that were
    just evicted, tokens per second, and buttons to pause and to stop. Elsewhere (a script, papermill) the call returns
    when the text is written, with a progress bar meanwhile, and the view shows the whole text. A view that is still
    writing is stopped when another begins.

    Parameters
    ----------
    model, prompt, policy, budget, max_new_tokens, seed
        As in :func:`epiviz.generate`; one prompt, no batch. The model needs a tokenizer.
    positions, sampling, temperature, top_p, top_k, raw, stop_on_loop
        As in :func:`epiviz.generate`.
    title : str, optional
    foreground : bool, optional
        Return only when the text is written. By default True unless a notebook's page has sent the cell that calls:
        programs that execute notebooks send no id of the cell along.

    Returns
    -------
    Live

    Raises
    ------
    BudgetError, UnknownPolicyError, TypeError, ValueError
        Bad input; nothing has been computed then. What fails later is shown in the view and raised by ``result()``.

    Examples
    --------
    >>> view = live(model, "Why is the sky blue?", "snapkv", Budget(128))  # doctest: +SKIP
    >>> view.pause(); view.resume(); view.stop()                           # doctest: +SKIP
    >>> view.result().text                                                 # doctest: +SKIP
    """
    if is_batch(prompt):
        raise ValueError(f"a live view shows one text, got a batch of {len(prompt)} prompts; call generate() for those")
    if model.tokenizer is None:
        raise ValueError(f"the model {model.name!r} has no tokenizer, so there is no text to show; call generate()")
    session, sampler = prepare(
        model,
        [prompt],
        policy,
        budget,
        max_new_tokens,
        seed,
        positions=positions,
        sampling=sampling,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        raw=raw,
    )
    view = Live(session, sampler, title=title, stop_on_loop=stop_on_loop)
    view._start(not has_front_end() if foreground is None else foreground)
    return view


class Live(View):
    """A text that is being written, and afterwards the reader of its :class:`epiviz.Run`; made by :func:`epiviz.live`.

    Attributes
    ----------
    run : Run or None
        None while the text is being written.
    state : str
        "reading" the prompt, "writing", "paused", "stopping", then "done" or "failed".

    All traits of :class:`epiviz.TraceReader` work; single heads, reasons and counts are there once the text is written.
    """

    kind = "live"
    _live = t.Dict().tag(sync=True)  # what the model is doing

    def __init__(self, session, sampler, *, title: str | None = None, stop_on_loop: bool = False) -> None:
        self._session, self._sampler, self._stop_on_loop = session, sampler, stop_on_loop
        self._row, self._title = session.rows[0], title
        self._new_tokens = session.new_tokens
        self._limits = self._row.budget if session.policy.bounded else None
        shape = session.model.shape
        heads = len(shape.evicts) * shape.kv_heads
        self._stream = Stream(self._row, byte_reader(session.model.tokenizer), session.new_tokens, heads)
        self.run: Run | None = None
        self._error: Exception | None = None
        self._stop, self._go, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._go.set()
        self._sent, self._told = (0, 0), 0.0  # tokens and events, and when
        self._heard = False  # a page has answered
        self._pace: deque[tuple[float, int]] = deque()  # times and the tokens written by then
        self._begun, self._held = 0.0, 0.0  # when the first token came, and seconds of pauses since
        self._seconds: float | None = None  # that the writing took
        self._why = ""  # it was stopped, if not by the reader
        super().__init__(_before_writing(session, self._row), title=title)
        # A text has scores once it is written; until then a page has nothing to colour by.
        self.data = replace(self.data, columns=(replace(self.data.columns[0], scores=()),))
        self._first_step = self.step
        with self.hold_sync():
            self.color_by = self.data.score_names[0]
            self._meta, self._data = self._pack(self.data)
            self._live = {"state": "reading"}

    # ---- what the caller can do

    @property
    def state(self) -> str:
        """What the model is doing."""
        return self._live["state"]

    @property
    def tokens(self) -> int:
        """The length of the text so far."""
        return max(self.data.tokens, self._stream.seen)

    def pause(self) -> None:
        """Hold the model after its next token."""
        self._go.clear()

    def resume(self) -> None:
        """Let the model write on."""
        self._go.set()

    def stop(self) -> None:
        """End the text after the next token; what is written stays, with the status "stopped"."""
        with self._lock:
            if self.run is None and self._error is None:
                self._stop.set()
                self._live = {"state": "stopping"}

    def result(self, timeout: float | None = None) -> Run:
        """Return the run once the text is written; raise what kept it from being so.

        Ctrl-C meanwhile stops the model, and the partial run is returned.

        Raises
        ------
        TimeoutError
            It takes longer than ``timeout`` seconds.
        """
        try:
            ended = self._ended.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            ended = self._ended.wait()
        if not ended:
            raise TimeoutError(f"the text is still being written after {timeout} s; stop() ends it")
        if self._error is not None:
            raise self._error
        return self.run

    def wait(self, timeout: float | None = None) -> None:
        """Return when the text is written, as :meth:`result` does."""
        self.result(timeout)

    # ---- writing

    def _start(self, foreground: bool) -> None:
        global _current
        before, _current = _current, self
        if before is not None:
            before._why = "another live view began"
            before.stop()
        if foreground:
            self._write(before, foreground)
            self.result()
            return
        name = f"epiviz live {self._session.policy.label}"
        # A daemon: a kernel that ends does not wait for a text nobody will read.
        threading.Thread(target=self._write, args=(before, foreground), name=name, daemon=True).start()

    def _write(self, before: Live | None, foreground: bool) -> None:
        global _current
        session = self._session
        try:
            if before is not None:
                before._ended.wait()
            with session, progress_bar(session.new_tokens, session.policy.label, foreground, kind=tqdm) as bar:
                decode(
                    session,
                    self._sampler,
                    stop_on_loop=self._stop_on_loop,
                    stop=self._stop,
                    bar=bar,
                    on_token=self._begin if foreground else self._on_token,
                )
            self._finish(to_run(session, self._row))
        except Exception as error:  # shown in the view, and raised by result()
            with self._lock, self.hold_sync():
                self._error = error
                self._live = {"state": "failed"}
                self._task = {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._ended.set()
            if _current is self:
                _current = None
            self._session = self._sampler = None  # a view may live long; its cache need not

    def _begin(self, rows) -> None:
        if not self._begun:
            self._begun = time.monotonic()
            self._enter("writing")

    def _on_token(self, rows) -> None:
        self._begin(rows)
        now = time.monotonic()
        if now - self._told >= (TELL_SECONDS if self._heard else UNHEARD_SECONDS):
            self._tell(now)
        if not self._go.is_set():
            self._hold(now)

    def _hold(self, since: float) -> None:
        self._tell(since)
        self._enter("paused")
        while not self._go.wait(HELD_AT_MOST) and not self._stop.is_set():
            pass
        self._enter("writing")
        self._held += time.monotonic() - since
        with self._lock:
            self._pace.clear()

    def _enter(self, state: str) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._live = {"state": state}

    def _tell(self, now: float) -> None:
        """Send what is new to the pages; everything, until one has answered."""
        self._told = now
        with self._lock:
            self._pace.append((now, len(self._row.tokens)))
            while now - self._pace[0][0] > RATE_SECONDS and len(self._pace) > 2:
                self._pace.popleft()
            self._stream.read()
            self._send_from(*(self._sent if self._heard else (0, 0)))
            self._sent = self._stream.seen, len(self._stream.events)

    def _send_from(self, token: int, event: int) -> None:
        content, buffers = self._stream.message(token, event)
        rate = None
        if self._pace and self._pace[-1][0] > self._pace[0][0]:  # a pause may follow a message at once
            (start, before), (end, after) = self._pace[0], self._pace[-1]
            rate = (after - before) / (end - start)
        self.send(content | {"rate": rate}, buffers)

    def _finish(self, run: Run) -> None:
        if self._begun:
            self._seconds = time.monotonic() - self._begun - self._held
        data = build(run, title=self._title)
        if self._why and run.status == "stopped":
            column = replace(data.columns[0], note=f"{data.columns[0].note} · {self._why}")
            data = replace(data, columns=(column,))
        with self._lock, self.hold_sync():
            self.run, self.data = run, data
            self._stream.read()
            self._meta, self._data = self._pack(data)
            self._live = {"state": "done"}
        self.color_by, self.method, self.budget = data.score_names[0], data.methods[0], data.stories[0].budget
        if self.step == self._first_step:  # nobody has moved it
            self.step = data.tokens

    # ---- what a page gets to know

    def _pack(self, data: ReaderData, computes=()) -> tuple[dict, bytes]:
        meta, block = super()._pack(data, computes)
        return meta | {"live": self._known()}, block

    def _known(self) -> dict:
        """The numbers around the text: its limits, and what each eviction dropped once all is known."""
        limits = self._limits
        return {
            "limit": len(self._row.prompt) + self._new_tokens,
            "budget": None if limits is None else limits.total,
            "peak": None if limits is None else limits.peak,
            "dropped": self._dropped(),
            "seconds": self._seconds,
        }

    def _dropped(self) -> list[int]:
        if self.run is None:
            return []
        retention = self.run.retention
        one = retention.death[retention.evicting[0], 0]  # all heads that evict lose equally many
        return np.bincount(one, minlength=retention.events)[: retention.events].tolist()

    def _answer(self, widget, content: dict, buffers) -> None:
        match content["ask"]:
            case "pause":
                self.pause()
            case "resume":
                self.resume()
            case "live":
                with self._lock:
                    self._heard = True
                    self._send_from(content["token"], content["event"])
            case "stop":
                self.stop()
            case _ if self.run is not None:  # single heads are there once the text is
                super()._answer(widget, content, buffers)

    def struck(self, column: int = 0) -> np.ndarray:
        self._written()
        return super().struck(column)

    def waiting(self, column: int = 0) -> np.ndarray:
        self._written()
        return super().waiting(column)

    def _written(self) -> None:
        if self.run is None:
            raise NotComputedError(f"the text is not there ({self.summary()}); result() waits for it, stop() ends it")

    def summary(self, column: int = 0) -> str:
        if self.run is not None:
            return super().summary(column)
        return f"{self.state}, {len(self._row.tokens)} of {self._new_tokens} tokens"

    def _fallback(self) -> str:
        if self.run is not None:
            return super()._fallback()
        title = escape(visible(self.data.title))
        return f"<p>{title}: {self.summary()}; run the cell again to watch, or read its result.</p>"


def _before_writing(session, row) -> Run:
    """A run of nothing but its prompt, of which nothing is known yet."""
    shape = session.model.shape
    nothing = np.zeros((shape.layers, shape.kv_heads, 0))
    retention = Retention(
        np.zeros(0, np.int64), nothing.astype(np.int32), nothing.astype(np.uint8), len(row.prompt), shape.evicts
    )
    attended = None
    if session.policy.selects:
        count = nothing.astype(np.int32)
        attended = Attended(session.policy.block, 0, 0, shape.evicts, count, count, None)
    return Run(
        tokens=[],
        status="",
        retention=retention,
        meter=None,
        prompt_tokens=row.prompt,
        spans=token_spans(session.model.tokenizer, row.prompt),
        policy=session.policy.label,
        model=session.model.name,
        budget=row.budget,
        seed=session.seed,
        positions=session.positions,
        attended=attended,
    )


def has_front_end() -> bool:
    """Tell whether a notebook's page has sent the cell that is running.

    Pages of notebooks name the cell in what they send. Programs that execute notebooks, and consoles, do not.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and "cellId" in kernel.get_parent("shell").get("metadata", {})
