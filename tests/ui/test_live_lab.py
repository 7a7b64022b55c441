"""A text that is being written in a real JupyterLab: it grows, pauses and stops while the kernel stays free."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from lab import SLOW, SOON, Notebook, jupyterlab, notebook_of
from playwright.sync_api import TimeoutError as TooLate
from playwright.sync_api import expect

TESTS = Path(__file__).parents[1]
READY = "print('ready')"
WATCH = f"""
import sys
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
import epiviz as ev
from tiny import byte_tokenizer, tiny_model

model = ev.Model(tiny_model().lm, byte_tokenizer(), "tiny")
budget = ev.Budget(24, sinks=2, recent=4, buffer=8)
view = ev.live(model, [1, 2, 3], "snapkv", budget, 100_000, temperature=1.5)
view
"""
MEANWHILE = "print('meanwhile', view.state, view.run)"
AFTERWARDS = """
run = view.result()
again = ev.generate(model, [1, 2, 3], "snapkv", budget, len(run.tokens), temperature=1.5)
print("afterwards", run.status, len(run.tokens), run.text == again.text, view.counts()["struck"], view.step)
"""


@pytest.fixture
def notebook(tmp_path, browser):
    with jupyterlab(tmp_path) as lab:
        notebook = Notebook(browser, lab, lab.write("live.ipynb", notebook_of(READY, WATCH, MEANWHILE, AFTERWARDS)))
        for _ in range(12):  # a request that is sent before the page has found its kernel is lost
            notebook.run(0)
            with suppress(TooLate):
                notebook.cells.nth(0).locator(".jp-OutputArea-output", has_text="ready").wait_for(timeout=15_000)
                break
        yield notebook
        notebook.close()


def test_a_text_grows_pauses_and_stops(notebook):
    page = notebook.page
    view = page.locator(".epi-reader")
    numbers, phase = view.locator(".pulse .numbers"), view.locator(".pulse b")

    def written():
        return int(numbers.text_content().split()[0].replace(",", ""))

    notebook.run(1)
    view.wait_for(timeout=SLOW)
    expect(phase).to_have_text("writing", timeout=SLOW)
    view.locator(".eviction", has_text=re.compile(r"\d+ evictions, the last at step")).wait_for(timeout=SOON)
    expect(numbers).to_have_text(re.compile(r"tokens/s · \d+ of 32 slots held"))
    before = written()
    notebook.run(2)
    assert "meanwhile writing None" in notebook.printed(2, "meanwhile")
    page.wait_for_function("(before) => parseInt(document.querySelector('.numbers').textContent) > before", arg=before)
    assert view.locator(".block > span").count() > before
    assert view.locator(".text .x").count() > 0

    view.get_by_role("button", name="Pause").click()
    expect(phase).to_have_text("paused", timeout=SOON)
    page.wait_for_timeout(300)
    held = written()
    page.wait_for_timeout(700)
    assert written() == held
    view.get_by_role("button", name="Resume").click()
    page.wait_for_function("(held) => parseInt(document.querySelector('.numbers').textContent) > held", arg=held)

    view.get_by_role("button", name="Stop").click()
    expect(phase).to_have_text("written", timeout=SOON)
    notebook.run(3)
    status, tokens, same, struck, step = notebook.printed(3, "afterwards").split()[1:]
    assert (status, same) == ("stopped", "True")
    assert int(tokens) >= held and int(step) == 3 + int(tokens) == view.locator(".block > span").count()
    assert int(struck) == len(notebook.struck(view))
    assert view.get_by_label("layer", exact=True).is_enabled()
