"""The reader in a browser: the exported page, and the module with a model of the test's own."""

import base64

import numpy as np
import pytest
from steps import put, settle, struck, trait
from synthetic import HOSTILE, make_replay, make_run, make_trace, spans_of

from epiviz.widgets import TraceReader
from epiviz.widgets.data import STATIC, THRESHOLDS


def drag(page, label, start, stop, steps=6):
    """Drag a slider between two shares of its width; yield in the middle, before the release."""
    box = page.get_by_label(label, exact=True).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + stop * box["width"], y, steps=steps)
    settle(page)
    yield
    page.mouse.up()
    settle(page)


def count(page):
    """Return how many tokens are struck in all columns."""
    settle(page)
    return page.locator(".text .x").count()


# ---- struck tokens equal Python's


@pytest.mark.parametrize("name", ["epiphany score", "surprisal", "value range"])
def test_static_ranking_equals_python(trace, show, name):
    reader = TraceReader(trace, color_by=name)
    page = show(reader)
    assert "static ranking" in page.locator(".badge").text_content()
    for budget in (1, 2, 37, 128, 499, 500):
        reader.budget = budget
        put(page, budget=budget)
        assert count(page) == 500 - budget
        assert np.array_equal(struck(page), reader.struck())
        assert f"{budget} kept, {500 - budget} struck" in page.locator(".counts").text_content()


def test_replays_equal_python(trace, replays, show):
    reader = TraceReader(trace, replays)
    page = show(reader)
    rng = np.random.default_rng(0)
    for _ in range(25):
        controls = {
            "method": str(rng.choice(["a", "b"])),
            "budget": int(rng.choice([60, 100])),
            "step": int(rng.integers(0, 501)),
            "layer": int(rng.integers(-1, 4)),
            "head": int(rng.integers(2)),
            "threshold": int(rng.choice(THRESHOLDS)),
        }
        for name, value in controls.items():
            setattr(reader, name, value)
        put(page, **controls)
        assert np.array_equal(struck(page), reader.struck()), controls
        assert page.evaluate("document.querySelectorAll('.text .y').length") == reader.counts()["waiting"]
    assert page.locator(".badge").text_content() == "replay"


def test_runs_equal_python_side_by_side(show):
    runs = [make_run("full", seed=0), make_run("a", seed=1), make_run("b", seed=2, generated=300)]
    reader = TraceReader(runs)
    page = show(reader)
    assert page.locator(".badge").text_content() == "generated"
    for step in (0, 90, 196, 250, 320, 400):
        reader.step = step
        put(page, step=step)
        for column in range(3):
            assert np.array_equal(struck(page, column), reader.struck(column))
    assert page.locator("[data-split]").count() == 3
    page.get_by_role("button", name="parts at 150").first.click()
    for width in (1280, 1000, 800, 640):
        page.set_viewport_size({"width": width, "height": 800})
        tops = [mark.bounding_box()["y"] for mark in page.locator("[data-split]").all()]
        assert max(tops) - min(tops) < 2, width
    page.get_by_label("text", exact=True).select_option("b")
    assert page.locator("section:visible").count() == 1
    assert trait(page, "method") == "b"


def test_newest_token_of_a_run_is_never_struck(show):
    page = show(TraceReader(make_run()))
    put(page, threshold=10)
    assert not struck(page)[-1]


# ---- controls


def test_dragging_the_budget_is_local_until_the_release(trace, show):
    reader = TraceReader(trace, budget=250)
    page = show(reader)
    before = count(page)
    for _ in drag(page, "budget", 0.9, 0.3):
        during = count(page)
        assert during != before
        assert trait(page, "budget") == 250
    reader.budget = trait(page, "budget")
    assert reader.budget != 250
    assert count(page) == during == reader.struck().sum()


def test_the_numeric_box_takes_exact_budgets(trace, show):
    page = show(TraceReader(trace))
    box = page.get_by_label("budget in tokens")
    box.fill("123")
    box.press("Enter")
    assert (trait(page, "budget"), count(page)) == (123, 377)
    box.fill("99999")
    box.press("Enter")
    assert (trait(page, "budget"), box.input_value()) == (500, "500")


def test_arrow_keys_move_the_budget_by_one_token(trace, show):
    page = show(TraceReader(trace, budget=100))
    page.get_by_label("budget", exact=True).press("ArrowRight")
    assert (trait(page, "budget"), count(page)) == (101, 399)


def test_the_step_slider_stops_at_events(trace, replays, show):
    page = show(TraceReader(trace, replays))
    stops = {20, 500, *replays[0].retention.event_steps.tolist()}
    seen = set()
    for share in (0.1, 0.35, 0.6, 0.8):
        for _ in drag(page, "step", 0.97, share):
            pass
        seen.add(trait(page, "step"))
    assert len(seen) > 2
    assert seen <= stops


def test_playing_moves_the_step(trace, replays, show):
    page = show(TraceReader(trace, replays))
    page.get_by_role("button", name="play the evictions").click()
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="pause").click()
    assert trait(page, "step") < 500


def test_reduced_motion_stops_playing(trace, replays, show):
    page = show(TraceReader(trace, replays), reduced_motion="reduce")
    assert page.get_by_role("button", name="play the evictions").is_disabled()


def test_switching_the_method_shows_its_budgets_and_the_static_ranking(trace, replays, show):
    reader = TraceReader(trace, replays)
    page = show(reader)
    page.get_by_label("method").select_option("b")
    reader.method = "b"
    assert count(page) == reader.struck().sum()
    page.get_by_label("method").select_option(STATIC)
    assert "thought experiment" in page.locator(".badge").text_content()
    assert page.get_by_label("step", exact=True).is_hidden()
    assert count(page) == 500 - trait(page, "budget")


def test_ties_signed_zeros_and_gaps_rank_like_python(show):
    rng = np.random.default_rng(0)
    values = rng.choice(np.array([-2.5, -0.0, 0.0, 1e-30, 7, np.nan, np.inf, -np.inf], dtype=np.float32), size=400)
    reader = TraceReader(make_trace(tokens=400), scores={"s": (values, "signed", "")})
    page = show(reader)
    for budget in range(1, 400, 23):
        reader.budget = budget
        put(page, budget=budget)
        assert np.array_equal(struck(page), reader.struck())


def test_colouring_by_nothing_ranks_nothing(trace, show):
    page = show(TraceReader(trace))
    page.get_by_label("colour by").select_option("none")
    assert count(page) == 0
    assert page.get_by_label("budget", exact=True).is_disabled()
    assert page.locator(".block > [class*=b]").count() == 0


def test_values_out_of_range_are_brought_into_it(trace, replays, show):
    page = show(TraceReader(trace, replays))
    put(page, method="x", budget=95, step=10**6, layer=77, head=77, threshold=60, column=9, color_by="y")
    reader = TraceReader(trace, replays, method="a", budget=100, layer=3, head=1, color_by="none")
    assert np.array_equal(struck(page), reader.struck())


def test_the_minimap_follows_the_colours(trace, show):
    page = show(TraceReader(trace, budget=500))
    pixels = "Array.from(document.querySelector('canvas').getContext('2d').getImageData(0, 2, 1000, 1).data).join()"
    seen = set()
    for name in ("epiphany score", "surprisal", "none"):
        put(page, color_by=name)
        seen.add(page.evaluate(pixels))
    assert len(seen) == 3
    put(page, color_by="epiphany score")
    assert page.evaluate(pixels) in seen


def test_heads_that_agree_need_no_choice(trace, show):
    page = show(TraceReader(trace, make_replay(trace, uniform=True)))
    assert page.get_by_label("layer").is_disabled()


# ---- card, search, keyboard


def test_hovering_shows_a_card_and_a_click_pins_it(trace, replays, show):
    page = show(TraceReader(trace, replays))
    page.locator(".block > span").nth(13).hover()
    card = page.locator(".card")
    assert "13 of 500" in card.text_content()
    page.locator(".block > span").nth(13).click()
    assert trait(page, "selected") == 13
    page.locator(".block > span").nth(20).hover()
    assert "13 of 500" in card.text_content()
    alive = replays[0].retention.alive(500)[:, :, 13]
    assert f"({alive.sum()} of 8)" in card.text_content()
    page.keyboard.press("Escape")
    assert trait(page, "selected") == -1
    assert card.is_hidden()


def test_a_character_of_several_tokens_lists_all_of_them(trace, show):
    page = show(TraceReader(trace))
    put(page, selected=31)
    text = page.locator(".card").text_content()
    assert f"{trace.tokens[31]} + {trace.tokens[32]}" in text
    assert trace.spans.piece(31) == "" and "🙂" in text


def test_search_counts_and_walks(trace, show):
    page = show(TraceReader(trace))
    expected = trace.spans.text.lower().count("seven")
    page.locator(".scroller").focus()
    page.keyboard.press("/")
    page.keyboard.type("SEVEN")
    settle(page)
    assert page.locator(".found").text_content() == f"{expected} found"
    assert page.locator(".text .hit").count() == expected
    page.keyboard.press("Enter")
    assert page.locator(".found").text_content() == f"1 of {expected}"
    page.keyboard.press("Enter")
    assert page.locator(".found").text_content() == f"2 of {expected}"


def test_keyboard_walk(trace, replays, show):
    reader = TraceReader(trace, replays)
    page = show(reader)
    text = page.locator(".scroller")
    text.focus()

    def at():
        card = page.locator(".card").text_content()
        return int(card.split("position")[1].split(" of")[0].split("–")[-1].replace(",", ""))

    def press(key):
        page.keyboard.press(key)
        settle(page)

    press("ArrowRight")
    press("ArrowRight")
    assert at() == 2
    press("ArrowLeft")
    assert at() == 1
    top = page.locator("[data-cur]").bounding_box()["y"]
    press("ArrowDown")
    assert page.locator("[data-cur]").bounding_box()["y"] > top
    press("ArrowUp")
    assert abs(page.locator("[data-cur]").bounding_box()["y"] - top) < 3
    press("End")
    assert at() == 499
    press("Home")
    press("e")
    ranks = reader.data.columns[0].scores[0].ranks
    assert ranks[at()] < 5
    assert text.get_attribute("aria-activedescendant") == page.locator("[data-cur]").get_attribute("id")
    press("Enter")
    assert trait(page, "selected") == at()
    press("Escape")
    press("[")
    events = replays[0].retention.event_steps
    assert trait(page, "step") == events[-1]
    press("[")
    assert trait(page, "step") == events[-2]
    press("Home")
    press("n")
    reader.step = int(events[-1])
    after = reader.struck()
    reader.step = int(events[-2])
    changed = np.flatnonzero(reader.struck() != after)
    assert at() in changed
    assert f"step {events[-2]}" in page.locator(".counts").text_content()
    press("]")
    assert f"step {events[-1]}" in page.locator(".live").text_content()


def test_the_minimap_jumps(show):
    page = show(TraceReader(make_trace(tokens=3000)))
    box = page.locator(".map").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + 8)
    page.wait_for_timeout(150)
    middle = page.evaluate("""() => {
      const box = document.querySelector(".scroller").getBoundingClientRect();
      const spans = [...document.querySelectorAll(".block > span")];
      return spans.findIndex((span) => span.getBoundingClientRect().top > box.top + box.height / 2);
    }""")
    assert abs(middle - 2700) < 100


# ---- text


@pytest.mark.parametrize("kind", ["words", "hostile"])
def test_the_text_is_the_source(trace, show, kind):
    source = trace if kind == "words" else make_trace(spans=spans_of(HOSTILE), prompt=2)
    page = show(TraceReader(source, title="<i>&amp;</script>\u202e"))
    units = page.evaluate("""() => {
      const text = document.querySelector(".text").textContent;
      return Array.from({ length: text.length }, (_, i) => text.charCodeAt(i));
    }""")
    assert np.array(units, dtype="<u2").tobytes() == source.spans.text.encode("utf-16-le", "surrogatepass")
    pieces = page.evaluate("Array.from(document.querySelectorAll('.block > span'), (span) => span.textContent.length)")
    assert pieces == np.diff(source.spans.utf16_offsets).tolist()
    assert "hacked" not in page.title()
    assert page.locator(".text :is(script, img, i)").count() == 0


def test_bidi_marks_have_no_effect_and_are_written_out(show):
    page = show(TraceReader(make_trace(spans=spans_of(HOSTILE), prompt=2)))
    marks = page.evaluate("Array.from(document.querySelectorAll('[data-mark]'), (mark) => mark.dataset.mark)")
    assert marks == ["U+202E", "U+202C", "U+0000", "U+D83D", "U+DC00", "U+000D", "U+2067", "U+2069", "U+200F"]


def test_blocks_run_in_the_direction_of_their_first_letters(show):
    page = show(TraceReader(make_trace(spans=spans_of([" مرحبا\n"] * 600 + ["hello\n"] * 600), prompt=2)))
    direction = "(blocks) => blocks.map((block) => block.matches(':dir(rtl)'))"
    assert page.locator(".block").evaluate_all(direction) == [True] * 4 + [False] * 3


def test_long_texts_stay_in_one_piece(show):
    trace = make_trace(spans=spans_of(["no line break "] * 2000))
    page = show(TraceReader(trace))
    assert page.locator(".block").count() == 4
    assert page.locator(".text").text_content() == trace.spans.text


# ---- several views, messages


def test_two_views_share_nothing_but_the_model(trace, harness):
    page = harness(TraceReader(trace, budget=100))
    page.evaluate("window.closers = [window.view(), window.view()]")
    assert count(page) == 800
    page.get_by_label("budget in tokens").first.fill("10")
    settle(page)
    assert count(page) == 890  # only the first view, only on screen
    assert page.evaluate("[window.model.saves, window.model.get('budget')]") == [0, 100]
    page.get_by_label("budget in tokens").first.press("Enter")
    settle(page)
    assert count(page) == 980
    assert page.evaluate("[window.model.saves, window.model.get('budget')]") == [1, 10]
    page.evaluate("window.closers[0]()")
    assert page.locator(".epi-reader").count() == 1
    page.evaluate("window.model.set('budget', 400)")
    settle(page)
    assert count(page) == 100
    page.evaluate("window.closers[1]()")
    assert page.evaluate("window.model.handlers.length") == 0


def test_heads_that_were_not_shipped_are_asked_for(trace, replays, harness, monkeypatch):
    monkeypatch.setattr("epiviz.widgets.data.SHIP_LIMIT", 1000)
    reader = TraceReader(trace, replays)
    answers = []
    reader.send = lambda content, buffers=None: answers.append((content, buffers))
    page = harness(reader)
    page.evaluate("void window.view()")

    def answer():
        reader._handle_custom_msg(page.evaluate("window.model.sent.at(-1)"), [])
        content, buffers = answers[-1]
        page.evaluate(
            "([content, buffers]) => window.model.emit('msg:custom', content, buffers.map(window.bytes))",
            [content, [base64.b64encode(buffer).decode() for buffer in buffers]],
        )
        settle(page)

    page.get_by_label("layer").select_option("2")
    settle(page)
    assert page.locator(".counts").text_content() == "loading this head …"
    assert page.locator('.epi-reader[aria-busy="true"]').count() == 1
    answer()
    reader.layer = 2
    assert np.array_equal(struck(page), reader.struck())
    assert page.locator('.epi-reader[aria-busy="true"]').count() == 0
    page.locator(".block > span").nth(13).hover()
    assert "% of heads" in page.locator(".card").text_content()
    answer()
    alive = replays[0].retention.alive(500)[:, :, 13]
    assert f"({alive.sum()} of 8)" in page.locator(".card").text_content()
    page.get_by_label("layer").select_option("-1")
    page.get_by_label("layer").select_option("2")
    assert page.evaluate("window.model.sent.length") == 2  # the second time it is at hand


# ---- looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_overflows(trace, replays, show, scheme, width):
    page = show(TraceReader(trace, replays), viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(forced_colors="active")
    assert (
        page.locator(".text .x").first.evaluate("(span) => getComputedStyle(span).textDecorationLine") == "line-through"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violations(trace, replays, show, scheme):
    from axe_playwright_python.sync_playwright import Axe

    for reader in (
        TraceReader(trace),
        TraceReader(trace, replays),
        TraceReader([make_run("a"), make_run("b", seed=1)]),
    ):
        page = show(reader, color_scheme=scheme, bypass_csp=True)
        found = Axe().run(page).response["violations"]
        assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []
