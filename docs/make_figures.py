"""Take the pictures of the README: `make figures`. Needs Chromium, or Playwright's own browser."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, sync_playwright

import epiviz as ev
from epiviz import frames

HERE = Path(__file__).parent
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LIMIT = ev.Budget(96, sinks=4, recent=24, buffer=24)


LOOK = {"viewport": {"width": 1280, "height": 860}, "device_scale_factor": 1.5, "color_scheme": "light"}
PROMPT = (
    "Anna, Ben and Carla share 84 marbles. Anna has twice as many as Ben, and Carla has 12 more than Ben. Explain step "
    "by step how to find how many each of them has, try it in two different ways, and check whether both ways agree."
)


def workbench(model: ev.Model) -> ev.Workbench:
    """The shipped trace under two policies, after some evictions, and a number of the text in every head."""
    trace = ev.Trace.load(HERE.parent / "data/traces/marbles.safetensors")
    replays = [ev.replay(model, trace, policy, LIMIT, compare=False) for policy in ("vase-attnv", "epikv")]
    twelve = np.searchsorted(trace.spans.offsets, trace.spans.text.rindex("12 more"), side="right") - 1
    return ev.Workbench(trace, replays, title="What does a cache of 96 tokens forget?", step=192, selected=int(twelve))


def side_by_side(model: ev.Model) -> ev.TraceReader:
    """What the model writes with its full cache and while slots leave it, at the step at which the texts part."""
    runs = [ev.generate(model, PROMPT, policy, LIMIT, max_new_tokens=160) for policy in ("full", "vase-attnv")]
    split = runs[0].prompt_length + int(frames.runs(runs, reference=runs[0])["same_tokens"].iloc[1])
    return ev.TraceReader(runs, title="Where do two texts part?", step=split)


def photograph(browser: Browser, view: ev.TraceReader | ev.Workbench, picture: Path) -> None:
    """Take a picture of a view as a file shows it."""
    with tempfile.TemporaryDirectory() as folder:
        page = browser.new_page(**LOOK)
        page.goto(view.to_html(Path(folder) / "view.html").as_uri())
        page.locator(".epi").wait_for()
        page.wait_for_timeout(500)  # maps are drawn after the text
        page.locator(".epi").screenshot(path=picture)
        page.close()


def main() -> None:
    """Take every picture."""
    model = ev.load("smollm2-135m")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        for take in (workbench, side_by_side):
            photograph(browser, take(model), HERE / "img" / f"{take.__name__}.png")
        browser.close()


if __name__ == "__main__":
    main()
