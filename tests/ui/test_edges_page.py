"""Views at their edges: texts of different lengths, what is not there yet, a kernel that is gone, paper."""

from types import SimpleNamespace

import numpy as np
import pytest
from steps import put, settle, trait
from synthetic import make_budget, make_replay, make_retention, make_run, make_trace

from epiviz.widgets import Timeline, TraceReader, Workbench


@pytest.fixture(scope="module")
def runs():
    return [make_run("a"), make_run("b", seed=1, generated=300)]


# ---- texts that come and go


def test_the_keyboard_and_the_search_keep_to_the_texts_on_screen(runs, trace, replays, show):
    page = show(TraceReader(runs, method="b"))
    page.locator(".scroller").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-cur]").is_visible()

    page = show(TraceReader(trace, replays, beside=["b"]))
    page.get_by_label("search the text").fill("seven")
    settle(page)
    found = page.locator(".text .hit").count()
    page.locator("section").nth(1).locator(".block > span").nth(5).click()
    page.keyboard.press("Escape")
    put(page, beside=[])
    assert page.locator(".found").text_content() == f"{found // 2} found"
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-cur]").is_visible()
    put(page, beside=["b"])
    assert page.locator(".text .hit").count() == found


def test_a_shorter_text_ends_in_its_timeline(runs, show):
    page = show(Timeline(runs, selected=390, column=1))
    assert page.locator(".readout").text_content() == ""  # the second text has 320 tokens
    shorter = page.locator(".plot").nth(1)
    newest = """(canvas) => {
      const { width, height } = canvas;
      const { data } = canvas.getContext("2d").getImageData(0, height - 1, width, 1);
      return new Uint32Array(data.buffer).findLastIndex((colour, x, row) => colour !== row[width - 1]) / width;
    }"""
    assert shorter.locator("canvas").evaluate(newest) == pytest.approx(320 / 400, abs=0.01)
    box = shorter.bounding_box()
    page.mouse.click(box["x"] + 0.95 * box["width"], box["y"] + 9)
    assert (trait(page, "column"), trait(page, "selected")) == (1, 319)


def test_panels_tell_of_the_text_that_is_pointed_at(runs, show):
    page = show(Workbench(runs))
    page.get_by_role("button", name="parts at 150").click()
    page.locator("section[aria-label='b'] .block > span").nth(160).hover()
    piece, other = (run.spans.piece(160) for run in reversed(runs))
    assert piece != other
    assert page.locator(".timeline .readout").text_content().startswith(f"“{piece}” · token 160")


def test_a_token_out_of_range_is_brought_into_it(trace, replays, show):
    page = show(Workbench(trace, replays))
    put(page, selected=10**6)
    assert "token 499 " in page.locator(".timeline .readout").text_content()
    assert page.locator("[data-pin]").count() == 1


def test_the_legend_of_a_timeline_follows_the_method(trace, show):
    selection = make_replay(trace, "seer")
    selection.retention, selection.budget = make_retention(500, 1000), make_budget(64)
    selection.attended = SimpleNamespace(tokens=500, share=lambda: np.full(500, 0.25))
    page = show(Timeline(trace, [selection, make_replay(trace, "epikv", 60, uniform=True)]))
    assert "evicted" not in page.locator(".legend").text_content()
    put(page, method="epikv")
    assert "evicted" in page.locator(".legend").text_content()


# ---- what is not there


def test_a_timeline_never_shows_another_heads_picture(trace, replays, harness, monkeypatch):
    monkeypatch.setattr("epiviz.widgets.data.SHIP_LIMIT", 1000)
    page = harness(Timeline(trace, replays))
    page.evaluate("void window.view()")
    assert page.locator("canvas").is_visible()
    page.evaluate("window.model.set('layer', 2)")
    settle(page)
    assert not page.locator("canvas").is_visible()
    assert page.locator(".note").text_content() == "loading this head …"


def test_from_a_head_that_is_not_in_the_file_there_is_a_way_back(trace, replays, show, monkeypatch):
    monkeypatch.setattr("epiviz.widgets.data.SHIP_LIMIT", 1000)
    page = show(Workbench(trace, replays, selected=60))
    assert page.get_by_label("layer", exact=True).is_disabled()
    page.locator(".grid-of-heads .cell").nth(3).click()
    settle(page)
    assert "too big for this file" in page.locator(".counts").text_content()
    page.get_by_label("layer", exact=True).select_option("-1")
    settle(page)
    assert "kept" in page.locator(".counts").text_content()


def test_a_kernel_that_died_while_it_computed(trace, replays, harness):
    page = harness(Workbench(trace, replays, compute=lambda *_: None, methods=["a"]))
    page.evaluate("""() => {
      const { setTimeout } = window;
      window.setTimeout = (act, wait) => setTimeout(act, wait > 5000 ? 50 : wait);
      window.addEventListener("error", (event) => event.preventDefault());
      window.model.send = window.model.save_changes = () => { throw new Error("Cannot send"); };
      window.model.state._task = { method: "a", budget: 77, done: 10, total: 500 };
      window.view();
    }""")
    box = page.get_by_label("budget in slots")
    box.fill("77")
    box.press("Enter")
    page.get_by_text("no news of a at 77 slots from the kernel").wait_for(timeout=5000)
    page.get_by_role("button", name="Stop").click()
    settle(page)
    assert page.locator(".counts").text_content().startswith("budget 60, step 500")


def test_computed_budgets_beyond_the_text_are_not_computed_again(trace, harness):
    bench = Workbench(trace, make_replay(trace, "a", 1000), compute=lambda *_: None, methods=["a"])
    page = harness(bench)
    page.evaluate("void window.view()")
    page.evaluate("window.model.set('budget', 2000)")
    settle(page)
    page.evaluate("window.model.set('budget', 1000)")
    settle(page)
    assert "budget 1,000, step 500: 500 kept" in page.locator(".counts").text_content()


def test_a_view_that_is_built_outside_the_page(trace, replays, harness):
    page = harness(Workbench(trace, replays, selected=400))
    page.evaluate("document.body.appendChild = (el) => (window.el = el); void window.view()")
    page.evaluate("void document.body.append(window.el)")
    page.locator(".card").wait_for(timeout=5000)
    assert "400 of 500" in page.locator(".card").text_content()


# ---- pointers and paper


def test_the_wheel_scrolls_the_page_over_every_plot(trace, replays, show):
    page = show(Workbench(trace, replays), viewport={"width": 480, "height": 500})
    page.locator(".timeline .plot").press("+")  # a part of the text makes no difference
    for plot in (".map", ".timeline .plot", ".layers .plot"):
        page.locator(plot).hover()
        before = page.evaluate("scrollY")
        page.mouse.wheel(0, -40 if before else 40)
        page.wait_for_function("(before) => scrollY !== before", arg=before, timeout=5000)


def test_only_the_first_button_moves_the_step(trace, replays, show):
    page = show(Timeline(trace, replays))
    page.locator(".plot").click(button="right", position={"x": 90, "y": 60})
    assert (trait(page, "step"), trait(page, "selected")) == (500, -1)


def test_a_printed_page_holds_the_whole_text(show):
    page = show(TraceReader(make_trace(tokens=1500)))
    page.emulate_media(media="print")
    shown, whole = page.locator(".scroller").evaluate("(box) => [box.clientHeight, box.scrollHeight]")
    assert shown == whole > 2000
