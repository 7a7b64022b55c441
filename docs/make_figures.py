"""Take the pictures of the README: `make figures`. Needs Chromium, or Playwright's own browser."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import epiviz as ev

HERE = Path(__file__).parent


def main() -> None:
    """Photograph the reader on the shipped trace at a budget of 120 tokens."""
    trace = ev.Trace.load(HERE.parent / "data/traces/marbles.safetensors")
    page_file = Path(tempfile.mkdtemp()) / "reader.html"
    ev.TraceReader(trace, budget=120, title="What would a budget of 120 tokens drop?").to_html(page_file)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 980, "height": 760}, device_scale_factor=1.5)
        page.goto(page_file.as_uri())
        reader = page.locator(".epi-reader")
        reader.wait_for()
        page.wait_for_timeout(500)  # the minimap is drawn after the text
        reader.screenshot(path=HERE / "img/first_look.png")
        browser.close()


if __name__ == "__main__":
    main()
