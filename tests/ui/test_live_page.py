"""A text that is being written, in a page: messages in, spans, struck tokens and slots held out."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import HARNESS
from steps import settle
from synthetic import make_run, spans_of

from epiviz.retention import Retention
from epiviz.widgets import TraceReader
from epiviz.widgets.data import THRESHOLDS, Scope, Story
from epiviz.widgets.page import script, style
from epiviz.widgets.stream import Stream
from epiviz.widgets.view import CONTROLS

RUN = make_run(generated=300, prompt=20, shared=150)
LIMIT = 420  # tokens, of which the run writes 320


def state_of(reader, phase, dropped):
    live = {"limit": LIMIT, "budget": 100, "peak": 132, "dropped": dropped, "seconds": 12.5 if dropped else None}
    state = {name: getattr(reader, name) for name in (*CONTROLS, "_task")}
    return state | {"_meta": reader._meta | {"live": live}, "_view": "live", "_live": {"state": phase}}


def text(data):
    return base64.b64encode(data).decode()


def before():
    """The reader of the run before its first token."""
    old = RUN.retention
    nothing = Retention(np.zeros(0, np.int64), old.death[:, :, :0], old.reason[:, :, :0], 20, old.evicts)
    known = {"tokens": [], "spans": spans_of(RUN.spans.pieces[:20]), "retention": nothing, "status": ""}
    return TraceReader(SimpleNamespace(**(vars(RUN) | known)))


def messages(size=7):
    """The run in messages of ``size`` tokens."""
    old, pieces = RUN.retention, dict(enumerate(RUN.spans.pieces))
    row = SimpleNamespace(prompt=RUN.prompt_tokens, tokens=[], events=[])
    where = {token: i for i, token in enumerate([*RUN.prompt_tokens, *RUN.tokens])}
    stream = Stream(row, lambda ids: [pieces[where[i]].encode() for i in ids], 400, old.death[:, :, 0].size)
    steps = old.event_steps.tolist()
    for start in range(0, len(RUN.tokens), size):
        row.tokens += RUN.tokens[start : start + size]
        while len(row.events) < len(steps) and steps[len(row.events)] <= 20 + len(row.tokens) - 1:
            event = len(row.events)
            gone = [[np.flatnonzero(head == event) for head in layer] for layer in old.death]
            row.events.append((steps[event], SimpleNamespace(numpy=lambda gone=gone: np.array(gone)), None))
        seen = stream.seen, len(stream.events)
        stream.read()
        content, buffers = stream.message(*seen)
        yield content | {"rate": 23.4}, [text(part) for part in buffers]


DROPPED = [32] * RUN.retention.events


@pytest.fixture
def live(tab):
    def load(**options):
        page = tab(bypass_csp=True, **options)
        page.set_content(
            "<!doctype html><html lang='en'><title>live</title><main><h1>a notebook</h1><h2>live</h2></main></html>"
        )
        page.add_style_tag(content=style())
        page.add_script_tag(type="module", content=script() + HARNESS)
        page.wait_for_function("Boolean(window.start)")
        reader = before()
        page.evaluate("([s, d]) => window.start(s, d)", [state_of(reader, "writing", []), text(reader._data)])
        page.evaluate("void window.view()")  # what it returns closes it
        page.evaluate("document.querySelector('main').append(document.body.lastElementChild)")
        return page

    return load


def tell(page, *told):
    page.evaluate(
        "(told) => told.forEach(([c, b]) => window.model.emit('msg:custom', c, b.map(window.bytes)))", list(told)
    )
    settle(page)


def finish(page):
    reader = TraceReader(RUN)
    state = state_of(reader, "done", DROPPED)
    page.evaluate(
        """([state, data]) => {
        const { step, ...rest } = state;
        Object.assign(model.state, rest, { _data: window.bytes(data) });
        for (const name of ["_meta", "_data", "_live"]) model.emit(`change:${name}`);
        }""",
        [state, text(reader._data)],
    )
    settle(page)
    return reader


def shown(page):
    spans = page.evaluate(
        "Array.from(document.querySelectorAll('.block > span'), (s) => [s.textContent, s.classList.contains('x')])"
    )
    return [piece for piece, _ in spans], np.array([struck for _, struck in spans])


def sent(page, ask):
    return [message for message in page.evaluate("window.model.sent") if message["ask"] == ask]


def test_a_text_grows_and_its_tokens_are_struck(live):
    page = live()
    assert sent(page, "live") == [{"ask": "live", "token": 20, "event": 0}]
    story = Story("epikv", 100, RUN.retention)
    told = list(messages())
    for upto in (1, 17, 33):
        tell(page, *told[:upto])  # what is here already is sent again, and ignored
        pieces, struck = shown(page)
        tokens = 20 + 7 * upto
        assert pieces == RUN.spans.pieces[:tokens]
        assert page.get_by_label("step", exact=True).get_attribute("aria-valuetext") == f"step {tokens} of {tokens}"
        events = int(np.searchsorted(RUN.retention.event_steps, tokens - 1, side="right"))
        for threshold in (THRESHOLDS[0], 50):
            page.evaluate("(threshold) => window.model.set('threshold', threshold)", threshold)
            settle(page)
            expected = story.struck(
                RUN.retention.event_steps[events - 1] if events else 0, Scope(-1, 0, threshold), 320
            )
            assert np.array_equal(shown(page)[1], expected[:tokens])
        numbers = page.locator(".pulse .numbers").text_content()
        held = max(20, tokens - 1) - 32 * events
        assert numbers == f"{7 * upto} of 400 tokens · 23.4 tokens/s · {held} of 132 slots held"
    assert struck.any() and events >= 3
    assert f"{events} evictions, the last at step" in page.locator(".eviction").text_content()
    assert f"slots held: {held} at step {tokens - 1}, budget 100, at most 132" in page.get_by_role("img").get_attribute(
        "aria-label"
    )


def test_what_was_missed_is_asked_for(live):
    page = live()
    told = list(messages())
    tell(page, told[3], told[4])
    assert len(shown(page)[0]) == 20
    page.wait_for_timeout(2100)
    tell(page, told[5])
    assert sent(page, "live") == [{"ask": "live", "token": 20, "event": 0}] * 2
    tell(page, *told[:6])
    assert len(shown(page)[0]) == 62


def test_the_newest_evictions_flash(live):
    page = live(reduced_motion="reduce")
    told = list(messages())
    first, second = [i for i, (content, _) in enumerate(told) if content["steps"]][:2]
    tell(page, *told[: first + 1])
    lost = np.flatnonzero(Story("epikv", 100, RUN.retention).death(Scope()) == 0)
    flashing = "Array.from(document.querySelectorAll('.block > span'), (s) => 'flash' in s.dataset)"
    assert np.array_equal(np.flatnonzero(page.evaluate(flashing)), lost)
    page.wait_for_timeout(1700)
    assert page.locator("[data-flash]").count() == len(lost), "without motion they stay marked"
    assert page.locator("[data-flash]").first.evaluate("(span) => getComputedStyle(span).animationName") == "none"
    tell(page, *told[first + 1 : second + 1])
    assert not np.intersect1d(np.flatnonzero(page.evaluate(flashing)), lost).size
    page.emulate_media(reduced_motion="no-preference")
    third = next(i for i in range(second + 1, len(told)) if told[i][0]["steps"])
    tell(page, *told[second + 1 : third + 1])
    assert page.locator("[data-flash]").count() > 0
    page.wait_for_function("!document.querySelector('[data-flash]')", timeout=5000)


def test_pause_and_stop_are_asked_for(live):
    page = live()
    page.get_by_role("button", name="Pause").click()
    page.evaluate("window.model.set('_live', { state: 'paused' })")
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Stop").click()
    page.evaluate("window.model.set('_live', { state: 'stopping' })")
    page.locator(".pulse b", has_text="stopping").wait_for()
    assert page.get_by_role("button", name="Stop").is_disabled()
    assert [message["ask"] for message in page.evaluate("window.model.sent")] == ["live", "pause", "resume", "stop"]
    page.evaluate("window.model.set('_task', { error: 'ValueError: no' })")
    page.evaluate("window.model.set('_live', { state: 'failed' })")
    page.locator(".error", has_text="ValueError: no").wait_for()
    assert page.get_by_role("button", name="Stop").count() == 0


def test_a_step_that_is_looked_at_stays(live):
    page = live()
    told = list(messages())
    tell(page, *told[:20])
    page.locator(".block > span").nth(30).click()
    assert page.evaluate("[window.model.get('selected'), window.model.get('step')]") == [30, 20], "the end is no choice"
    assert "held by" in page.locator(".card").text_content()
    page.get_by_label("step", exact=True).press("ArrowLeft")
    chosen = page.evaluate("window.model.get('step')")
    assert chosen < 160
    tell(page, *told[20:])
    finish(page)
    assert page.evaluate("window.model.get('step')") == chosen


def test_in_the_end_it_is_the_reader_of_the_run(live):
    page = live()
    tell(page, *list(messages())[:-2])
    assert page.get_by_label("layer", exact=True).is_disabled()
    reader = finish(page)
    pieces, struck = shown(page)
    assert pieces == RUN.spans.pieces and np.array_equal(struck, reader.struck())
    assert page.evaluate("window.model.get('step')") == 320
    assert page.locator(".pulse b").text_content() == "written"
    assert page.locator(".pulse .numbers").text_content() == "300 tokens · 24 tokens/s · 127 of 132 slots held"
    assert "reserved value" in page.locator("footer").text_content()
    page.get_by_label("layer", exact=True).select_option("2")
    settle(page)
    reader.layer = 2
    assert np.array_equal(shown(page)[1], reader.struck())
    found = Axe().run(page).response["violations"]
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []
