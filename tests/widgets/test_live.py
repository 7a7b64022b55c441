"""Live: the text and the evictions of a run while it is being written."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import traitlets
from tiny import byte_tokenizer, random_prompt, tiny_model

import epiviz as ev
import epiviz.widgets.live
from epiviz.text import byte_reader
from epiviz.widgets.data import THRESHOLDS, NotComputedError
from epiviz.widgets.live import has_front_end
from epiviz.widgets.stream import Stream

BUDGET = ev.Budget(16, sinks=2, recent=4, buffer=8)


@pytest.fixture(scope="module")
def model():
    tiny = tiny_model()
    return ev.Model(tiny.lm, byte_tokenizer(), tiny.name)


@pytest.fixture(autouse=True)
def nothing_writes_on():
    """A test that fails leaves no thread behind."""
    yield
    writing = epiviz.widgets.live._current
    if writing is not None:
        writing.stop()
        writing._ended.wait(60)


class Page:
    """What a page keeps of the messages: texts, ids and deaths, put together as the script does."""

    def __init__(self, prompt: int, capacity: int) -> None:
        self.prompt, self.pieces, self.ids, self.steps, self.dropped = prompt, [], [], [], []
        self.death = np.full((len(THRESHOLDS), capacity), -1)
        self.gaps = self.received = 0

    @property
    def at(self):
        return self.prompt + len(self.pieces), len(self.steps)

    def take(self, content, buffers):
        token, event = self.at
        self.gaps += content["token"] > token or content["event"] > event
        ids, lengths, gone = (np.frombuffer(buffers[i], dtype="<u4") for i in (0, 1, 3))
        ends = np.cumsum(lengths)
        self.received += len(ids)
        for i in range(token - content["token"], len(ids)):
            units = buffers[2][2 * (ends[i] - lengths[i]) : 2 * ends[i]]
            self.pieces.append(units.decode("utf-16-le", "surrogatepass"))
            self.ids.append(int(ids[i]))
        lost = np.split(gone, np.cumsum(content["lost"])[:-1]) if content["lost"] else []
        for i, step in enumerate(content["steps"]):
            if content["event"] + i < event:
                continue
            for row in range(len(THRESHOLDS)):
                self.death[row, lost[i * len(THRESHOLDS) + row].astype(int)] = len(self.steps)
            self.steps.append(step)
            self.dropped.append(content["dropped"][i])


def watched(view):
    """The messages a view sends, as a page would take them."""
    page, sent = Page(len(view._row.prompt), len(view._row.prompt) + view._new_tokens), []

    def send(content, buffers=None):
        if content.get("tell") == "live":
            sent.append(content)
            page.take(content, buffers)

    view.send = send
    return page, sent


def begin(model, prompt=(1, 2, 3), policy="snapkv", budget=BUDGET, new_tokens=60, seed=3, title=None, **options):
    """A live view that has not begun to write."""
    from epiviz.decode import prepare
    from epiviz.widgets.live import Live

    return Live(*prepare(model, [list(prompt)], policy, budget, new_tokens, seed, **options), title=title)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


# ---- the text


@pytest.mark.parametrize(("policy", "temperature"), [("full", None), ("vase-attnv", None), ("random", 1.5)])
def test_the_text_is_that_of_generate(model, policy, temperature):
    budget = None if policy == "full" else BUDGET
    options = {"max_new_tokens": 24, "seed": 5, "temperature": temperature}
    run = ev.generate(model, random_prompt(30), policy, budget, **options)
    for foreground in (True, False):
        view = ev.live(model, random_prompt(30), policy, budget, foreground=foreground, **options)
        assert view.result(60).tokens == run.tokens
        assert view.run.text == run.text and view.run.status == run.status
        assert np.array_equal(view.run.retention.death, run.retention.death)
        assert view.run.meter == run.meter


def test_a_hostile_title_is_literal_before_the_text_is_there(model):
    assert begin(model, title="<img src=x>")._fallback().startswith("<p>&lt;img src=x&gt;: reading")


def test_afterwards_it_is_the_reader_of_its_run(model):
    view = ev.live(model, random_prompt(30), "snapkv", BUDGET, 30, foreground=True)
    reader = ev.TraceReader(view.run)
    assert view.counts() == reader.counts()
    assert np.array_equal(view.struck(), reader.struck()) and view.struck().any()
    assert view.step == view.tokens == 60
    assert view._data == reader._data
    assert view.summary() == reader.summary()
    assert view._fallback() == reader._fallback()


# ---- what a page is told


def test_a_page_gets_the_text_and_the_deaths_bit_by_bit(model, monkeypatch):
    monkeypatch.setattr("epiviz.widgets.live.TELL_SECONDS", 0.0)
    view = begin(model, random_prompt(30), temperature=1.5)
    page, sent = watched(view)
    view._heard = True
    view._start(foreground=False)
    run = view.result(60)
    assert len(sent) == 60 and page.gaps == 0
    assert max(len(content["lost"]) for content in sent) <= len(THRESHOLDS)  # one event at most, in each
    written = len(page.pieces)
    assert written >= 57  # the last tokens may be a part of a character
    assert page.pieces == run.spans.pieces[30 : 30 + written]
    assert any("\ufffd" in piece for piece in page.pieces), "the random text holds bytes that are no characters"
    assert page.ids == run.tokens[:written]
    steps = run.retention.event_steps.tolist()
    assert len(steps) >= 3 and page.steps == steps[: len(page.steps)] and len(page.steps) >= len(steps) - 1
    story = view.data.stories[0]
    for row in range(len(THRESHOLDS)):
        told = page.death[row, : run.retention.tokens]
        expected = np.where(story.majority[row] < len(page.steps), story.majority[row], -1)
        assert np.array_equal(told, expected)
    assert page.dropped == view._meta["live"]["dropped"][: len(page.steps)]
    held = 30 + 59 - sum(view._meta["live"]["dropped"])
    assert held == run.retention.alive(89)[0, 0].sum()


def test_messages_are_batched_and_tell_only_what_is_new(model):
    view = begin(model, new_tokens=60)
    page, sent = watched(view)
    view._answer(view, {"ask": "live", "token": 3, "event": 0}, [])
    view._start(foreground=False)
    view.result(60)
    seconds = view._meta["live"]["seconds"]
    assert len(sent) <= seconds / 0.1 + 3
    assert page.received == len(page.pieces) > 0 and page.gaps == 0, "no token was sent twice"


def test_a_page_that_opens_late_gets_everything(model, monkeypatch):
    monkeypatch.setattr("epiviz.widgets.live.UNHEARD_SECONDS", 0.0)
    view = begin(model, random_prompt(30))
    first, sent = watched(view)
    view._start(foreground=False)
    view.result(60)
    assert {content["token"] for content in sent} == {30}, "nobody answered: each message holds the whole text"
    late, _ = watched(view)
    view._answer(view, {"ask": "live", "token": 30, "event": 0}, [])
    assert late.pieces[: len(first.pieces)] == first.pieces and np.array_equal(late.death, first.death)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_pieces_do_not_depend_on_how_many_tokens_come_at_once(model, size):
    text = "so 😀 and\n😀😀!"
    read = byte_reader(model.tokenizer)
    tokens = [*model.tokenizer(text).input_ids, 96, 95, 0]  # and bytes that are no character
    row = SimpleNamespace(prompt=[0], tokens=[], events=[])
    stream = Stream(row, read, len(tokens), heads=8)
    for start in range(0, len(tokens), size):
        row.tokens += tokens[start : start + size]
        stream.read()
    from epiviz.text import token_spans

    assert stream.pieces == token_spans(model.tokenizer, tokens).pieces[: len(stream.pieces)]
    assert "".join(stream.pieces).startswith(text) and len(stream.pieces) == len(tokens)


# ---- pause, stop, errors


def test_pause_holds_and_stop_keeps_what_is_written(model):
    view = begin(model, new_tokens=100_000)
    page, _ = watched(view)
    view._heard = True
    states = []
    view.observe(lambda change: states.append(change.new["state"]), "_live")
    view.pause()
    view._start(foreground=False)
    until(lambda: "paused" in states)
    assert len(view._row.tokens) == 1, "it holds after the first token"
    assert not view._ended.wait(0.2)
    assert len(view._row.tokens) == 1 and page.at[0] == view.tokens
    assert view.run is None and view.state == "paused" and "paused, 1 of 100000 tokens" in repr(view)
    for ask in (view.struck, view.counts, view._repr_mimebundle_, lambda: view.to_html("never.html")):
        if ask == view._repr_mimebundle_:
            assert "paused" in ask()[0]["text/html"]
        else:
            with pytest.raises(NotComputedError, match=r"result\(\) waits"):
                ask()
    with pytest.raises(TimeoutError, match=r"stop\(\) ends it"):
        view.result(0.01)
    view._answer(view, {"ask": "head", "story": 0, "layer": 0, "head": 0}, [])  # no answer yet, and no error
    view._answer(view, {"ask": "resume"}, [])
    until(lambda: len(view._row.tokens) >= 20)
    view._answer(view, {"ask": "stop"}, [])
    run = view.result(20)
    assert run.status == "stopped" and 20 <= len(run.tokens) < 100_000
    assert states[-3:] == ["writing", "stopping", "done"]
    assert run.tokens[:20] == ev.generate(model, [1, 2, 3], "snapkv", BUDGET, 20, seed=3).tokens
    assert view.counts()["kept"] > 0 and "cut" not in view.data.columns[0].note
    assert not model.lm.model.layers[0]._forward_hooks


def test_stop_ends_a_pause(model):
    view = begin(model)
    view.pause()
    view._start(foreground=False)
    view.stop()
    assert view.result(20).status == "stopped"
    assert view.state == "done"


def test_a_second_view_stops_the_first(model):
    first = begin(model, new_tokens=100_000)
    first._start(foreground=False)
    second = ev.live(model, [5, 6], "snapkv", BUDGET, 20, foreground=False)
    assert len(second.result(20).tokens) == 20
    assert first.result(20).status == "stopped"
    assert first.data.columns[0].note.endswith("another live view began")
    third = begin(model, new_tokens=100_000)
    third._start(foreground=False)
    assert len(ev.live(model, [5, 6], max_new_tokens=5, foreground=True).run.tokens) == 5
    assert third._ended.is_set()


def test_an_error_is_shown_and_raised(model):
    class Broken(type(ev.policies.get("random"))):
        def rank(self, slots, state, rng):
            raise FloatingPointError("the sky is not blue")

    view = begin(model, policy=Broken())
    view._start(foreground=False)
    with pytest.raises(FloatingPointError, match="the sky is not blue"):
        view.result(20)
    assert view.state == "failed" and view._task == {"error": "FloatingPointError: the sky is not blue"}
    assert view.run is None and "failed" in repr(view)
    view.stop()
    assert view.state == "failed"
    with pytest.raises(FloatingPointError):
        ev.live(model, [1, 2, 3], Broken(), BUDGET, 40, foreground=True)
    assert ev.live(model, [1, 2, 3], max_new_tokens=3, foreground=True).run.status == "length"


def test_ctrl_c_while_waiting_returns_the_partial_run(model):
    view = begin(model, new_tokens=100_000)
    view._start(foreground=False)
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    assert view.result().status == "stopped"


def test_bad_input_is_refused_at_once(model):
    for arguments, error, words in [
        (([[1, 2], [3]],), ValueError, "a batch of 2 prompts"),
        (([1], "snapkv"), ev.BudgetError, "needs a budget"),
        (([1], "snapvk", BUDGET), ev.UnknownPolicyError, "snapkv"),
        (([1], "full", None, 0), ValueError, "at least 1"),
    ]:
        with pytest.raises(error, match=words):
            ev.live(model, *arguments)
    with pytest.raises(ValueError, match="no tokenizer"):
        ev.live(replace(model, tokenizer=None), [1])


def test_a_selection_is_shown_as_attended(model):
    policy = ev.policies.get("seer-quest", block=8)
    view = begin(model, random_prompt(40), policy, ev.Budget(24, sinks=2, recent=4), 30)
    assert view.data.methods == [f"{policy.label} (attended)"] and view.data.score_names == ["none"]
    view._start(foreground=True)
    assert view.data.methods == [f"{policy.label} (attended)"] == [view.method]
    assert view.color_by == "attended" and view.data.stories[0].selects
    assert view._meta["live"]["budget"] is None


# ---- controls while it grows, and who calls


def test_controls_reach_as_far_as_the_text(model):
    view = begin(model, new_tokens=50)
    view.step, view.selected = 10**6, 10**6
    assert (view.step, view.selected) == (3, 2)
    view._row.tokens += [7] * 20
    view._stream.read()
    view.selected = 20
    view.step = 9
    assert view.selected == 20
    view.step, view._row.tokens[:] = 2, []
    view._stream.pieces.clear()
    view._start(foreground=True)
    assert view.step == 2, "a step that was chosen stays"
    with pytest.raises(traitlets.TraitError):
        view.color_by = "nothing"


def test_only_a_notebooks_page_counts_as_a_front_end(monkeypatch):
    assert not has_front_end()
    request = {"metadata": {}}
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda channel: request))
    import IPython

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert not has_front_end(), "papermill, nbclient and consoles send no id of a cell"
    request["metadata"]["cellId"] = "3f"
    assert has_front_end()
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())
    assert not has_front_end()
