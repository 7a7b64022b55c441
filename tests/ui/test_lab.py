"""The views in a real JupyterLab with a real kernel."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from lab import SLOW, SOON, Notebook, jupyterlab, notebook_of
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from playwright.sync_api import expect

SYNTHETIC = Path(__file__).parents[1] / "widgets"
REPOSITORY = Path(__file__).parents[2]
SHOW = f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(SYNTHETIC)!r}]
from synthetic import make_replay, make_trace
from epiviz.widgets import TraceReader

trace = make_trace()
seen = []
reader = TraceReader(trace, budget=250)
reader.observe(lambda change: seen.append(change.new), "budget")
reader
"""
READ = "print('read back', reader.budget, reader.counts()['struck'], len(seen))"
SET = "reader.budget = 7"
BENCH = """
import time
from epiviz.widgets import Workbench

def compute(method, budget, watch):
    for seen in range(0, 500, 5):
        watch(seen)
        time.sleep(0.2 if budget == 90 else 0)
    return make_replay(trace, method, budget)

bench = Workbench(trace, [make_replay(trace, "a", 60), make_replay(trace, "b", 60)], compute=compute)
bench
"""
BUSY = "print('while computing', bench.budget)"
TOLD = "print('told', bench.budget, bench.step, bench.selected, bench.counts()['struck'], bench.data.budgets('a'))"
SLIDER = """
import ipywidgets as widgets

mine = widgets.IntSlider(400, 0, 500, description="mine")
for view in (reader, bench):
    widgets.jslink((mine, "value"), (view, "step"))
widgets.jslink((reader, "selected"), (bench, "selected"))
mine
"""
LINKED = "print('linked', mine.value, reader.step, bench.step, reader.selected, bench.selected)"

# appended to notebook 01
STATE = """
asked = globals().get("asked", 0) + 1
print("state", asked, bench.method, bench.budget, bench.step, bench.selected, bench.counts()["struck"])
"""
MOVE = """
moves = globals().get("moves", 0) + 1
draw = np.random.default_rng(moves)
bench.method = str(draw.choice(names))
bench.budget = int(draw.choice(bench.data.budgets(bench.method)))
bench.step = int(draw.integers(len(recorded) // 2, len(recorded) + 1))
bench.layer, bench.head = int(draw.integers(-1, bench.data.layers)), int(draw.integers(bench.data.heads))
print("move", moves, bench.struck().nonzero()[0].tolist())
"""
MOVES = 20


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def open_notebook(lab, browser):
    """Return a function that puts a notebook into the lab and opens it."""
    tabs = []

    def open_notebook(name, content, trusted=False):
        tabs.append(Notebook(browser, lab, lab.write(name, content, trusted)))
        return tabs[-1]

    yield open_notebook
    for tab in tabs:
        tab.close()


def numbers(text):
    return [int(number) for number in re.findall(r"-?\d+", text)]


def test_dragging_in_jupyterlab_reaches_python(open_notebook):
    sources = (SHOW, READ, SET, READ, BENCH, BUSY, TOLD, SLIDER, LINKED)
    notebook = open_notebook("reader.ipynb", notebook_of(*sources))
    page, run = notebook.page, notebook.run
    run(0)
    reader = page.locator(".epi-reader:not(.epi-workbench)")
    reader.wait_for(timeout=SLOW)
    counts = reader.locator(".counts")
    expect(counts).to_contain_text("250 struck", timeout=SOON)
    assert len(notebook.struck(reader)) == 250

    with notebook.drag(reader.get_by_label("budget", exact=True), 0.88, 0.5):
        expect(counts).not_to_contain_text("250 struck", timeout=SOON)
        during = len(notebook.struck(reader))
        assert during != 250
    run(1)
    budget, counted, changes = numbers(notebook.printed(1))
    assert counted == during == 500 - budget
    assert changes == 1  # one message per release, none while dragging
    run(2)
    expect(counts).to_contain_text("7 kept, 493 struck", timeout=SOON)

    # letters typed into the text are the reader's, not JupyterLab's command mode
    reader.locator(".block > span").nth(20).click()
    for key in ("Escape", "e", "d", "d", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
        page.wait_for_timeout(50)
    assert notebook.cells.count() == len(sources)
    run(3)
    assert "read back 7 493" in notebook.printed(3)

    # a budget that was not computed: the kernel works in the background, and Stop goes back
    run(4)
    bench = page.locator(".epi-workbench")
    bench.wait_for(timeout=SOON)
    bench.scroll_into_view_if_needed()
    counts = bench.locator(".counts")
    box = bench.get_by_label("budget in slots")
    box.fill("90")
    box.press("Enter")
    expect(counts).to_contain_text("computing a at 90 slots", timeout=SOON)
    page.wait_for_function("document.querySelector('.epi-workbench progress').value > 0.02", timeout=SOON)
    run(5)  # the kernel is free for other cells meanwhile
    notebook.printed(5, "while computing 90")
    bench.get_by_role("button", name="Stop").click()
    expect(counts).to_contain_text("budget 60", timeout=SOON)
    box.fill("75")
    box.press("Enter")
    expect(counts).to_contain_text("budget 75, step 500", timeout=SOON)

    plot = bench.locator(".timeline .plot")
    plot.scroll_into_view_if_needed()
    plot.click(position={"x": plot.bounding_box()["width"] * 0.3, "y": plot.bounding_box()["height"] * 0.6})
    notebook.settled()
    run(6)
    budget, step, selected, counted, *budgets = numbers(notebook.printed(6))
    assert (budget, budgets) == (75, [60, 75])
    assert 250 < step < 350 and 140 < selected < 160
    assert counted == len(notebook.struck(bench))

    # a slider of the author's drives both views without the kernel, and one view another
    run(7)
    mine = notebook.cells.nth(7).get_by_role("slider")
    mine.wait_for(timeout=SOON)
    mine.press("ArrowLeft")
    expect(bench.locator(".counts")).to_contain_text("step 399", timeout=SOON)
    page.keyboard.press("Escape")
    reader.locator(".block > span").nth(40).click()
    expect(bench.locator(".heads .readout")).to_contain_text("at step 399", timeout=SOON)
    run(8)
    assert numbers(notebook.printed(8)) == [399, 399, 399, 40, 40]


def the_tour(folder):
    """Notebook 01 as the smoke tests run it, with two cells more that tell what is on screen."""
    path = REPOSITORY / "notebooks" / "01_first_look.ipynb"
    parameters = {
        "trace": str(REPOSITORY / "tests/fixtures/count.safetensors"),
        "others": "random",
        "budget": 64,
        "out_dir": str(folder / "tour"),
    }
    notebook = parameterize_notebook(load_notebook_node(str(path)), parameters)
    notebook.cells += [nbformat.v4.new_code_cell(source.strip()) for source in (STATE, MOVE)]
    return notebook


def code_cell(notebook, text):
    """The number of the code cell that contains a text, among the code cells."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (found,) = [number for number, source in enumerate(sources) if text in source]
    return found


def test_the_tour_of_notebook_01(lab, open_notebook):
    content = the_tour(lab.folder)
    shows, state, move = (code_cell(content, text) for text in ("ev.Workbench(", "asked =", "moves ="))
    notebook = open_notebook("tour.ipynb", content)
    page = notebook.page
    notebook.run_all()
    bench = page.locator(".epi-workbench")
    bench.wait_for(timeout=SLOW)
    notebook.printed(move, "move 1")
    moves = 1

    # every number of struck tokens is Python's
    def same_as_python():
        told = numbers(notebook.printed(move, f"move {moves} "))
        assert told[0] == moves
        for _ in range(100):  # the page draws when the message has come
            if notebook.struck(bench) == told[1:]:
                break
            page.wait_for_timeout(50)
        assert notebook.struck(bench) == told[1:]
        return told[1:]

    found = [same_as_python()]
    notebook.cells.nth(move).locator(".jp-InputArea-editor").click()
    while moves < MOVES:
        moves += 1
        page.keyboard.press("Control+Enter")
        found.append(same_as_python())
    assert sum(map(bool, found)) > MOVES / 3 and len(set(map(tuple, found))) > MOVES / 4

    # run again: one view, in its first state
    notebook.run(shows)
    expect(bench.locator(".counts")).to_contain_text("budget 64, step 83", timeout=SOON)
    assert bench.count() == 1
    assert bench.locator(".badge").text_content() == "replay"

    # the slider, another method, keys
    bench.scroll_into_view_if_needed()
    with notebook.drag(bench.get_by_label("budget", exact=True), 0.02, 0.98):
        expect(bench.locator(".counts")).to_contain_text("budget 128", timeout=SOON)
    bench.get_by_label("method", exact=True).select_option("random")
    bench.get_by_label("layer", exact=True).select_option("5")  # so late, one head has lost what most still hold
    bench.locator(".block > span").nth(60).click()
    for key in ("Escape", "]", "]", "e", "Enter"):
        page.keyboard.press(key)
    notebook.settled()
    notebook.run(state)
    told = notebook.printed(state, "state 2 ")
    budget, step, selected, counted = numbers(told)[1:]
    assert "random" in told and budget == 128
    assert step > 83 and selected >= 60
    assert counted == len(notebook.struck(bench)) > 0
    bench.get_by_label("method", exact=True).select_option("static ranking")
    expect(bench.locator(".badge")).to_contain_text("thought experiment")
    bench.get_by_label("method", exact=True).select_option("epikv")

    # a second view of the same widget moves with the first
    bench.locator("header").first.click(button="right")
    page.locator('.lm-Menu-item[data-command="notebook:create-output-view"]').click()
    second = page.locator(".jp-LinkedOutputView .epi-workbench")
    second.wait_for(timeout=SOON)
    second.get_by_label("method", exact=True).select_option("random")
    first = page.locator(".jp-Notebook .epi-workbench")
    expect(first.get_by_label("method", exact=True)).to_have_value("random", timeout=SOON)
    assert notebook.struck(first) == notebook.struck(second)


def test_an_executed_notebook_opens_without_a_kernel(open_notebook):
    executed = nbclient.NotebookClient(notebook_of(SHOW), timeout=180, kernel_name="python3").execute()
    assert executed.metadata["widgets"]

    untrusted = open_notebook("untrusted.ipynb", executed)
    fallback = untrusted.page.locator(".jp-RenderedHTML", has_text="Run the notebook, or trust it")
    fallback.wait_for(timeout=SOON)
    assert "budget 250: 250 kept, 250 struck" in fallback.text_content()
    assert untrusted.page.locator(".epi").count() == 0

    trusted = open_notebook("trusted.ipynb", executed, trusted=True)
    reader = trusted.page.locator(".epi-reader")
    reader.wait_for(timeout=SOON)
    assert len(trusted.struck(reader)) == 250
    with trusted.drag(reader.get_by_label("budget", exact=True), 0.88, 0.5):
        expect(reader.locator(".counts")).not_to_contain_text("250 struck", timeout=SOON)
    assert trusted.page.locator(".jp-RenderedHTML", has_text="Run the notebook, or trust it").count() == 0
