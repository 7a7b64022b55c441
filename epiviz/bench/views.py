"""How fast the views are at 32k tokens, measured in a headless browser.

*Move to frame* is the time from the timestamp that the browser gave a pointer's movement to the first task after the
frame was painted that shows the move (``requestAnimationFrame``, then a message). The pointer is moved by the browser's
own input pipeline, so waiting for the next vertical sync is part of it, and 17 ms are the floor. What the compositor
does afterwards is not seen. *Script* is the time a function took.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from epiviz.bench.example import long_example
from epiviz.bench.machine import machine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MOVES = 20
VIEWPORT = {"width": 1280, "height": 800}
TARGETS = {  # name: (what, unit, the most it may be)
    "budget_p95": ("budget slider, move to frame, p95", "ms", 33),
    "step_p95": ("step slider, move to frame, p95", "ms", 33),
    "beside_p95": ("two readers side by side, step slider, p95", "ms", 50),
    "workbench_p95": ("workbench, step slider, p95", "ms", None),
    "build": ("build of the reader, until painted", "ms", 250),
    "timeline": ("timeline redraw, script, p95", "ms", 10),
    "kernel_bytes": ("sent to the kernel while dragging", "bytes", 0),
    "export_mb": ("exported file", "MB", 1.5),
    "opened": ("exported file, until painted", "ms", None),
}


class BrowserMissingError(RuntimeError):
    """There is no Chromium, or nothing to drive it with."""


def bench_views(tokens: int = 32_768, runs: int = 3, say: Callable[[str], None] = print) -> dict[str, object]:
    """Measure the views on a long trace with two scores, two methods and four budgets.

    Parameters
    ----------
    tokens : int
    runs : int
        Whatever else the machine does only makes a run slower, so the one counts that comes nearest to the targets.
        The others are told too.
    say : callable
        Gets a line after each run.

    Returns
    -------
    dict
        ``environment`` with the browser's version; ``example`` (what was shown); ``measured``: the quickest run, with
        the keys of :data:`TARGETS`, all ``moves`` in ms, and the ``load`` average of the machine's last minute;
        ``targets``; and ``runs``, all of them in order.

    Raises
    ------
    BrowserMissingError
        No Chromium was found; the message says how to get one.
    """
    from epiviz import signals
    from epiviz.widgets import TraceReader, Workbench

    trace, histories = long_example(tokens)
    scores = {
        "epiphany score": (signals.epiphany(trace), "signed", "z₁₀ − z₂₁"),
        "surprisal": (trace.surprisal, "magnitude", "nats"),
    }
    view = TraceReader(trace, histories, scores=scores)
    bench = Workbench(trace, histories, scores=scores)
    done = []
    with browser() as chromium, tempfile.TemporaryDirectory() as folder:
        version = chromium.version
        file = view.to_html(Path(folder) / "reader.html")
        for number in range(1, runs + 1):
            done.append(_measure(chromium, view, bench, file))
            say(f"run {number} of {runs}: step slider p95 {done[-1]['step_p95']:.1f} ms, load {done[-1]['load']:.1f}")
    death = histories[0].retention.death
    return {
        "environment": machine() | {"browser": f"Chromium {version}, headless, {VIEWPORT['width']} pixels wide"},
        "example": {
            "tokens": len(trace),
            "scores": len(scores),
            "methods": list(dict.fromkeys(history.policy for history in histories)),
            "budgets": sorted({history.budget.total for history in histories}),
            "events": int(histories[0].retention.events),
            "heads": death.shape[0] * death.shape[1],
        },
        "measured": min(done, key=_slowness),
        "targets": {name: most for name, (_, _, most) in TARGETS.items() if most is not None},
        "runs": done,
    }


def table(found: dict) -> str:
    """Return what :func:`bench_views` measured beside its targets, a line for each."""
    lines = []
    for name, (what, unit, most) in TARGETS.items():
        value = found["measured"][name]
        number = f"{value:,.2f}" if unit == "MB" else f"{value:,.0f}" if unit == "bytes" else f"{value:,.1f}"
        target = "" if most is None else f"target ≤ {most:g} {unit}" + ("" if value <= most else ", missed")
        lines.append(f"{what:<46}{number:>9} {unit:<6}{target}".rstrip())
    return "\n".join(lines)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a headless Chromium: the system's, or the one that playwright installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        raise BrowserMissingError("views are measured through playwright: pip install playwright") from error
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome") or playwright.chromium.executable_path
        if not Path(path).exists():
            raise BrowserMissingError(
                "there is no Chromium: install the system's (Debian: apt install chromium), or run "
                "`playwright install chromium`"
            )
        # As root, which containers often run as, Chromium starts without its sandbox or not at all.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield chromium
        finally:
            chromium.close()


def _slowness(run: dict) -> float:
    """How far a run is from its targets, over all of them."""
    return sum(run[name] / most for name, (_, _, most) in TARGETS.items() if most)


def _measure(chromium: Browser, view, bench, file: Path) -> dict[str, object]:
    found: dict[str, object] = {"load": os.getloadavg()[0], "moves": {}}
    moves: dict[str, list[float]] = found["moves"]
    page = chromium.new_page(viewport=VIEWPORT)
    _load(page, view)
    found["build"] = page.evaluate("bench.show('reader')")
    page.evaluate("document.querySelector('.scroller').scrollTop = 1e5")
    moves["budget"], sent = _drag(page, "budget")
    moves["step"], also = _drag(page, "step")
    page.evaluate("(method) => bench.model.set('beside', [method])", view.data.methods[1])
    moves["beside"], too = _drag(page, "step")
    found["timeline"] = float(np.percentile(page.evaluate("bench.timeline()"), 95))
    page.close()

    page = chromium.new_page(viewport=VIEWPORT)
    _load(page, bench)
    page.evaluate("bench.show('workbench')")
    moves["workbench"], last = _drag(page, "step")
    page.close()

    page = chromium.new_page(viewport=VIEWPORT)
    page.goto(file.as_uri())
    page.wait_for_selector(".epi .block")
    first_paint = "performance.getEntriesByName('first-contentful-paint').at(-1)?.startTime"
    found["opened"] = page.wait_for_function(first_paint).json_value()
    page.close()
    found |= {f"{name}_p95": float(np.percentile(times, 95)) for name, times in moves.items()}
    return found | {"kernel_bytes": sent + also + too + last, "export_mb": file.stat().st_size / 1e6}


def _load(page: Page, view) -> None:
    """Load the module of the views with a model that counts what it sends: ``window.bench``."""
    from epiviz.widgets.page import script, style
    from epiviz.widgets.view import CONTROLS

    page.set_content("<!doctype html><body></body>")
    page.add_style_tag(content=style())
    page.add_script_tag(type="module", content=script() + Path(__file__).with_suffix(".js").read_text("utf-8"))
    page.wait_for_function("Boolean(window.Bench)")
    state = {name: getattr(view, name) for name in (*CONTROLS, "_meta", "_view", "_task")}
    data = base64.b64encode(view._data).decode()
    page.evaluate("([state, data]) => { window.bench = new Bench(state, data); }", [state, data])


def _drag(page: Page, label: str) -> tuple[list[float], int]:
    """Drag a slider to and fro in even moves; return each move's time to its frame and the bytes sent meanwhile."""
    page.wait_for_selector("[data-behind]", state="detached")
    slider = page.get_by_label(label, exact=True)
    box = slider.bounding_box()
    stops = int(slider.get_attribute("max"))
    y = box["y"] + box["height"] / 2
    # A thumb's middle runs between half its width from both ends; each place is another stop of the slider.
    at = [place / min(stops, MOVES) for place in range(min(stops, MOVES) + 1)]
    there = (at + at[-2:0:-1]) * MOVES
    x = [box["x"] + 8 + share * (box["width"] - 16) for share in there[: MOVES + 1]]
    page.mouse.move(x[0], y)
    page.mouse.down()
    page.evaluate("bench.begin()")
    for number, place in enumerate(x[1:], start=1):
        page.mouse.move(place, y)
        page.evaluate("(number) => bench.moved(number)", number)
    times, sent = page.evaluate("[bench.frames, bench.model.sent]")
    page.mouse.up()
    return times, sent
