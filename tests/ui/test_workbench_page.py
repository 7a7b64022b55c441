"""The workbench in a browser: its views against Retention, linked by pointer and keyboard, and budgets at will."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest
from steps import put, settle, struck, trait
from synthetic import HOSTILE, make_budget, make_replay, make_retention, make_trace, spans_of

from epiviz.retention import Reason
from epiviz.widgets import HeadMap, LayerMap, Timeline, Workbench
from epiviz.widgets.data import NO_BUCKET, THRESHOLDS

PIXELS = """(canvas) => {
  const { width, height } = canvas;
  const words = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
  return [width, height, Array.from(words)];
}"""


SMALL = {"width": 480, "height": 700}  # fewer pixels to read back


def pixels(page, selector="canvas"):
    settle(page)
    width, height, words = page.locator(selector).first.evaluate(PIXELS)
    return np.array(words, dtype=np.uint32).reshape(height, width)


# ---- what is drawn equals Python's


def test_struck_tokens_equal_python(trace, replays, show):
    bench = Workbench(trace, replays, beside=["b"])
    page = show(bench)
    rng = np.random.default_rng(0)
    for _ in range(20):
        method, other = rng.permutation(["a", "b"]).tolist()
        controls = {
            "method": method,
            "beside": [other],
            "budget": int(rng.choice([60, 100])),
            "step": int(rng.integers(0, 501)),
            "layer": int(rng.integers(-1, 4)),
            "head": int(rng.integers(2)),
            "threshold": int(rng.choice(THRESHOLDS)),
        }
        for name, value in controls.items():
            setattr(bench, name, value)
        bench.beside = [other]
        put(page, **controls)
        for column in (0, 1):
            assert np.array_equal(struck(page, column), bench.struck(column)), (controls, column)
            tally = page.locator(".tally").nth(column).text_content()
            assert f"{bench.counts(column)['kept']} kept, {bench.counts(column)['struck']} struck" in tally


def states(retention, shape, layer=-1, head=0, x=0.0, y=0.0, size=1.0):
    """What each pixel of a timeline stands for, if it shows the given stretch of the text."""
    (height, width), n = shape, retention.tokens
    tokens = np.floor((x + size * np.arange(width) / width) * n).astype(int)
    rows = []
    for row in range(height):
        step = int((y + size * (row + 0.5) / height) * n)  # the last step that has come by the middle of the row
        alive = retention.alive(step)
        held = alive[layer, head] if layer >= 0 else (~alive).mean(axis=(0, 1)) < 0.5
        rows.append(np.where(np.arange(n) >= step, "later", np.where(held, "held", "evicted"))[tokens])
    return np.array(rows)


@pytest.mark.parametrize("layer", [-1, 2])
def test_the_timeline_is_the_retention(show, layer):
    trace = make_trace(tokens=120)
    replay = make_replay(trace, budget=40, buffer=16)
    page = show(Timeline(trace, replay, layer=layer, head=1), viewport=SMALL)
    drawn = pixels(page)
    assert drawn.shape[1] > 120
    state = states(replay.retention, drawn.shape, layer, 1)
    colours = [np.unique(drawn[state == name]) for name in ("later", "held", "evicted")]
    assert all(len(found) == 1 for found in colours) and len(np.unique(colours)) == 3


def test_zooming_shows_a_part_of_the_timeline_and_of_the_layers(show):
    trace = make_trace(tokens=120)
    replay = make_replay(trace, budget=40, buffer=16)
    page = show(Workbench(trace, replay, selected=30, step=60), viewport=SMALL)
    numbers = lambda gutter: [  # noqa: E731
        int(mark.split()[-1]) for mark in page.locator(f".timeline .gutter.{gutter} span").all_text_contents()
    ]
    whole, layers = pixels(page, ".timeline canvas"), pixels(page, ".layers canvas")
    colours = {name: whole[states(replay.retention, whole.shape) == name][0] for name in ("later", "held", "evicted")}
    plot = page.locator(".timeline .plot")
    plot.focus()
    for key in "++":
        page.keyboard.press(key)
    size = 1.6**-2
    x, y = (30.5 / 120) * (1 - size), 0.5 * (1 - size)  # the selected token and the step stay where they were
    drawn = pixels(page, ".timeline canvas")
    expected = states(replay.retention, drawn.shape, x=x, y=y, size=size)
    for name, colour in colours.items():
        assert ((drawn == colour) == (expected == name)).mean() > 0.999
    assert min(numbers("below")) >= 120 * x and max(numbers("below")) <= 120 * (x + size)
    assert min(numbers("left")) >= 120 * y and max(numbers("left")) <= 120 * (y + size)
    assert not np.array_equal(pixels(page, ".layers canvas"), layers)
    page.keyboard.press("End")  # what is selected stays in sight
    assert trait(page, "selected") == 119 and max(numbers("below")) >= 110
    page.keyboard.press("0")
    assert np.array_equal(pixels(page, ".timeline canvas"), whole) and np.array_equal(
        pixels(page, ".layers canvas"), layers
    )
    plot.hover()
    page.mouse.wheel(0, -300)  # scrolls the page
    assert np.array_equal(pixels(page, ".timeline canvas"), whole)
    plot.dispatch_event("wheel", {"deltaY": -300, "ctrlKey": True, "bubbles": True, "cancelable": True})
    assert not np.array_equal(pixels(page, ".timeline canvas"), whole)
    page.get_by_role("button", name="the whole text").click()
    assert np.array_equal(pixels(page, ".timeline canvas"), whole)


def test_many_tokens_in_a_pixel_show_the_share_that_is_held(show):
    trace = make_trace(tokens=4000, layers=2)
    replay = make_replay(trace, budget=400, buffer=200, layers=2)
    drawn = pixels(show(Timeline(trace, replay, layer=0), viewport=SMALL))
    width = drawn.shape[1]
    alive = replay.retention.alive(3999)[0, 0]
    edges = np.arange(width + 1) * 4000 // width
    share = np.add.reduceat(alive, edges[:-1]) / np.diff(edges)
    red = (drawn[-1] & 255).astype(int)  # from the colour of evicted to that of held
    inner = slice(0, width - 5)  # the last pixels are not all born
    rank = np.corrcoef(share[inner], red[inner])[0, 1]
    assert abs(rank) > 0.999


@pytest.mark.parametrize("tokens", [200, 3000])
def test_the_layer_map_shows_the_strongest_score(show, tokens):
    layers = LayerMap(make_trace(tokens=tokens))
    page = show(layers, viewport=SMALL)
    score = layers.data.layer_scores[0]
    drawn = pixels(page)
    assert drawn.shape[0] == 8
    width = drawn.shape[1]
    starts = np.arange(width) * tokens // width
    ends = np.maximum(starts + 1, (np.arange(width) + 1) * tokens // width)
    colours = {}
    for layer in range(8):
        row = score.levels[layer].astype(int)
        assert (row != NO_BUCKET).all()
        for x, (start, end) in enumerate(zip(starts, ends, strict=True)):
            strongest = row[start:end][np.argmax(abs(row[start:end] - 127))]
            colours.setdefault(int(strongest), set()).add(int(drawn[layer, x]))
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) > 0.8 * len(colours) > 40
    assert page.locator(".badge").is_hidden()  # nothing is ranked or evicted here
    put(page, layer_by="value range")
    assert not np.array_equal(pixels(page), drawn)


def test_the_head_map_is_the_retention(trace, replays, show):
    replay = replays[0]
    page = show(HeadMap(trace, replays))
    names = {Reason.SINK: "sink", Reason.RECENT: "recent", Reason.RESERVED: "reserved value", Reason.TOP: "top score"}
    for token, step in [(2, 500), (30, 500), (95, 200), (95, 95), (300, 310), (498, 500), (60, 130), (60, 500)]:
        put(page, selected=token, step=step)
        titles = page.evaluate(
            "Array.from(document.querySelectorAll('.grid-of-heads .cell'), (c) => [c.title, c.className])"
        )
        alive = replay.retention.alive(step)[:, :, token]
        faced = replay.retention.fired(step) and token < replay.retention.event_steps[replay.retention.fired(step) - 1]
        for title, look in titles:
            where, fate = title.split(": ")
            layer, head = (int(part.split()[-1]) for part in where.split(","))
            reason = names.get(Reason(replay.retention.reason[layer, head, token]))
            if token >= step:
                expected = "not there yet"
            elif not alive[layer, head]:
                expected = f"evicted at step {replay.retention.death_steps()[layer, head, token]}"
            else:
                expected = f"kept as {reason}" if faced else "held"
            assert (fate, "held" in look) == (expected, bool(alive[layer, head])), (token, step)
        if token < step:
            assert f"({alive.sum()} of 8)" in page.locator(".caption").first.text_content()


# ---- linked


def test_a_click_on_the_timeline_selects_and_moves_the_step(trace, replays, show):
    page = show(Workbench(trace, replays))
    box = page.locator(".timeline .plot").bounding_box()
    at = lambda x, y: (box["x"] + x * box["width"], box["y"] + y * box["height"])  # noqa: E731
    page.mouse.click(*at(0.3, 0.7))
    settle(page)
    stops = {20, 500, *replays[0].retention.event_steps.tolist()}
    assert abs(trait(page, "selected") - 150) <= 2
    assert trait(page, "step") in stops and abs(trait(page, "step") - 350) <= 17
    assert page.locator("[data-pin]").count() == 1 and page.locator(".card").is_visible()
    page.mouse.move(*at(0.5, 0.9))
    page.mouse.down()
    page.mouse.move(*at(0.5, 0.4), steps=4)
    settle(page)
    assert f"step {trait(page, 'step')}" not in page.locator(".counts").text_content()  # on screen, not in the model
    page.mouse.up()
    settle(page)
    assert abs(trait(page, "step") - 200) <= 17 and abs(trait(page, "selected") - 250) <= 2


def test_a_click_on_a_head_shows_its_cache(trace, replays, show):
    bench = Workbench(trace, replays, selected=60)
    page = show(bench)
    cell = page.locator(".grid-of-heads .cell[title^='layer 2, head 1']")
    cell.click()
    bench.layer, bench.head = 2, 1
    assert np.array_equal(struck(page), bench.struck())
    assert (trait(page, "layer"), trait(page, "head")) == (2, 1)
    cell.click()
    assert trait(page, "layer") == -1


def test_hovering_over_the_text_moves_the_lines(trace, replays, show):
    page = show(Workbench(trace, replays))
    page.locator(".block > span").nth(44).hover()
    line = page.locator(".timeline .pointed")
    assert line.evaluate("(line) => parseFloat(line.style.left)") == pytest.approx(100 * 44.5 / 500)
    assert "token 44 " in page.locator(".timeline .readout").text_content()
    assert "of 8)" in page.locator(".heads .caption").first.text_content()
    page.locator(".layers .plot").hover()
    assert "layer 4: " in page.locator(".layers .readout").text_content()
    assert page.locator(".card").is_hidden()


def test_everything_works_by_keyboard(trace, replays, show):
    page = show(Workbench(trace, replays, selected=100))
    page.locator(".timeline .plot").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    assert trait(page, "selected") == 101
    assert trait(page, "step") == replays[0].retention.event_steps[-1]
    assert "token 101" in page.locator(".timeline .live").text_content()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")  # past the choice of the score
    for key in ("ArrowDown", "ArrowDown", "Home"):
        page.keyboard.press(key)
    assert (trait(page, "layer"), trait(page, "selected")) == (1, 0)
    page.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert (trait(page, "layer"), trait(page, "head")) == (2, 1)
    page.keyboard.press("Enter")
    assert trait(page, "layer") == -1
    page.locator(".timeline .plot").focus()
    page.keyboard.press("Escape")
    assert trait(page, "selected") == -1


def test_choosing_what_stands_beside(trace, replays, show):
    bench = Workbench(trace, [*replays, make_replay(trace, "c", 60)])
    page = show(bench)
    page.get_by_label("beside", exact=True).select_option("c")
    assert trait(page, "beside") == ["c"]
    page.get_by_label("beside as well").select_option("b")
    bench.beside = ["c", "b"]
    for column in range(3):
        assert np.array_equal(struck(page, column), bench.struck(column))
    assert page.locator(".timeline .strip").count() == 3
    page.locator(".scroller").focus()
    page.keyboard.press("d")
    settle(page)
    at = int(page.locator(".timeline .readout").text_content().split("token ")[1].split(" ")[0])
    assert len({bool(bench.struck(column)[at]) for column in range(3)}) == 2
    page.get_by_label("beside", exact=True).select_option("")
    assert trait(page, "beside") == ["b"]


# ---- what is shown is honest and harmless


def test_a_selection_is_attended_and_never_evicted(trace, show):
    replay = make_replay(trace, "seer-quest")
    replay.retention, replay.budget = make_retention(500, 1000), make_budget(64)
    replay.attended = SimpleNamespace(tokens=500, share=lambda: np.full(500, 0.25))
    page = show(Workbench(trace, replay, step=400, selected=30))
    words = page.locator(".epi").inner_text() + page.locator(".card").inner_text()
    assert "64 of 400 attended" in words and "seer-quest (attended)" in page.locator(".epi").text_content()
    assert "evicted" not in words.lower() and "struck" not in words.lower()
    titles = page.evaluate("Array.from(document.querySelectorAll('.cell'), (cell) => cell.title).join()")
    assert "held" in titles and "evicted" not in titles


def test_hostile_text_is_literal(show):
    trace = make_trace(spans=spans_of(HOSTILE), prompt=2)
    replay = make_replay(trace, "<img src=x onerror=alert(1)>", budget=12, buffer=1)
    other = make_replay(trace, "]]>\u202e", budget=12, buffer=1, seed=1)
    page = show(Workbench(trace, [replay, other], beside=[other.policy], title="</script><b>"))
    for column in page.locator(".text").all():
        units = column.evaluate("({ textContent: t }) => Array.from({ length: t.length }, (_, i) => t.charCodeAt(i))")
        assert np.array(units, dtype="<u2").tobytes() == trace.spans.text.encode("utf-16-le", "surrogatepass")
    for token in range(len(HOSTILE)):
        put(page, selected=token)
        shown = page.locator(".timeline .readout").text_content()
        assert f"token {token}" in shown
    put(page, selected=0)
    assert HOSTILE[0] in page.locator(".timeline .readout").text_content()
    assert "hacked" not in page.title()
    assert page.locator(".epi :is(script, img)").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violations_in_the_workbench(trace, replays, show, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = show(Workbench(trace, replays, selected=60, step=300), color_scheme=scheme, bypass_csp=True)
    found = Axe().run(page).response["violations"]
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []


@pytest.mark.parametrize("width", [1280, 800])
def test_the_workbench_fits_its_page(trace, replays, show, width):
    page = show(Workbench(trace, replays, beside=["b"]), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".plot").evaluate_all("(plots) => Math.min(...plots.map((p) => p.clientWidth))") > 200


# ---- budgets at will


def test_asking_waiting_and_stopping(trace, replays, harness):
    bench = Workbench(trace, replays, compute=lambda *_: None, methods=["a", "b", "z"])
    page = harness(bench)
    page.evaluate("void window.view()")
    box = page.get_by_label("budget in slots")
    box.fill("77")
    box.press("Enter")
    settle(page)
    assert page.evaluate("window.model.get('budget')") == 77
    assert page.locator(".counts").text_content() == "computing a at 77 slots …"
    page.evaluate("window.model.set('_task', { method: 'a', budget: 77, done: 125, total: 500 })")
    settle(page)
    assert page.get_by_label("computing").evaluate("(bar) => bar.value") == 0.25
    page.get_by_label("step", exact=True).press("ArrowLeft")  # the page goes on working
    settle(page)
    assert page.evaluate("window.model.get('step')") < 500
    page.get_by_role("button", name="Stop").click()
    settle(page)
    assert page.evaluate("window.model.sent.at(-1)") == {"ask": "stop"}
    assert page.evaluate("window.model.get('budget')") == 60
    assert page.get_by_role("button", name="Stop").is_hidden()
    page.evaluate("window.model.set('_task', { error: 'a at 5 slots: too small' })")
    settle(page)
    assert page.get_by_text("a at 5 slots: too small").is_visible()
    page.get_by_label("method").select_option("z")
    settle(page)
    assert page.locator(".counts").text_content() == "computing z at 60 slots …"


def test_a_new_history_appears(trace, replays, harness):
    bench = Workbench(trace, replays, compute=lambda method, budget, _: make_replay(trace, method, budget))
    page = harness(bench)
    page.evaluate("void window.view()")
    box = page.get_by_label("budget in slots")
    box.fill("77")
    box.press("Enter")
    bench.budget = 77
    bench.wait(20)
    page.evaluate(
        """([meta, data]) => {
          Object.assign(window.model.state, { _meta: meta, _data: window.bytes(data) });
          window.model.emit("change:_data");
        }""",
        [bench._meta, base64.b64encode(bench._data).decode()],
    )
    settle(page)
    assert np.array_equal(struck(page), bench.struck())
    assert "budget 77, step 500" in page.locator(".counts").text_content()
    page.get_by_label("budget", exact=True).press("ArrowLeft")
    assert page.evaluate("window.model.get('budget')") == 60
