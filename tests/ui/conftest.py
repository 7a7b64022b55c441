"""Chromium for the views, and pages that report every request and every error."""

import base64
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from synthetic import make_replay, make_trace

from epiviz.widgets.page import script, style
from epiviz.widgets.view import CONTROLS

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def trace():
    return make_trace()


@pytest.fixture(scope="module")
def replays(trace):
    return [make_replay(trace, policy, budget, seed=budget) for policy in ("a", "b") for budget in (60, 100)]


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        executable = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(executable).exists() and "CI" not in os.environ:
            pytest.skip("no Chromium: install the system's, or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=executable, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """Return a function that opens a browser tab; at the end no tab may have asked the network or raised an error."""
    contexts, requests, errors = [], [], []

    def open_tab(**options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "about:", "blob:"))] == []
    assert errors == []


@pytest.fixture
def show(tab, tmp_path):
    """Return a function that exports a reader and opens the file."""

    def show(reader, **options):
        page = tab(**options)
        page.goto(reader.to_html(tmp_path / f"{len(list(tmp_path.iterdir()))}.html").as_uri())
        page.wait_for_selector(".epi")
        return page

    return show


HARNESS = """
class Model {
  constructor(state) { this.state = state; this.handlers = []; this.sent = []; this.saves = 0; }
  get(name) { return this.state[name]; }
  set(name, value) { this.state[name] = value; this.emit(`change:${name}`); }
  save_changes() { this.saves += 1; }
  send(content) { this.sent.push(content); }
  on(event, handler) { this.handlers.push([event, handler]); }
  off(event, handler) { this.handlers = this.handlers.filter(([e, h]) => e !== event || h !== handler); }
  emit(event, ...args) { for (const [e, h] of [...this.handlers]) if (e === event) h(...args); }
}
window.bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
window.start = (state, data) => {
  window.model = new Model({ ...state, _data: window.bytes(data) });
  window.view = () => {
    const el = document.body.appendChild(document.createElement("div"));
    return render({ model: window.model, el });
  };
};
"""


@pytest.fixture
def harness(tab):
    """Return a function that loads the module with a model of the test's own: ``window.model``, ``window.view()``."""

    def load(reader):
        page = tab(bypass_csp=True)
        page.set_content("<!doctype html><body></body>")
        page.add_style_tag(content=style())
        page.add_script_tag(type="module", content=script() + HARNESS)
        page.wait_for_function("Boolean(window.start)")
        state = {name: getattr(reader, name) for name in (*CONTROLS, "_meta", "_view", "_task")}
        page.evaluate("([s, d]) => window.start(s, d)", [state, base64.b64encode(reader._data).decode()])
        return page

    return load
