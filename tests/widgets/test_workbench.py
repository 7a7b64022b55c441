"""The linked views without a browser: what they are made of, and budgets that are computed when asked for."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import make_budget, make_replay, make_retention, make_run, make_trace
from tiny import random_prompt, tiny_model
from traitlets import TraitError

import epiviz as ev
from epiviz.widgets import HeadMap, LayerMap, Timeline, Workbench, page
from epiviz.widgets.data import NO_BUCKET, STATIC, LayerScore, NotComputedError


@pytest.fixture(scope="module")
def trace():
    return make_trace()


@pytest.fixture
def replays(trace):
    return [make_replay(trace, policy, budget, seed=budget) for policy in "abc" for budget in (60, 100)]


class Kernel:
    """A computation that tells how far it is and goes on when the test says so."""

    def __init__(self, trace):
        self.trace, self.asked, self.go_on, self.watched = trace, [], threading.Event(), threading.Event()

    def __call__(self, method, budget, watch):
        self.asked.append((method, budget))
        while not self.go_on.wait(0.01):
            watch(100)
            self.watched.set()
        if budget < 10:
            raise ValueError(f"{budget} is too small")
        return make_replay(self.trace, method, budget, seed=1)


def computing(trace, replays, go_on=True, **keywords):
    kernel = Kernel(trace)
    if go_on:
        kernel.go_on.set()
    return Workbench(trace, replays, compute=kernel, **keywords), kernel


# ---- what is shown


def test_every_script_and_style_is_joined():
    for folder, names in ((page.HERE / "js", page.SCRIPTS), (page.HERE / "css", page.STYLES)):
        assert sorted(file.stem for file in folder.iterdir()) == sorted(names)
    assert page.script().count("export default") == 1


@pytest.mark.parametrize(("view", "layers"), [(Workbench, 8), (LayerMap, 8), (Timeline, 4), (HeadMap, 4)])
def test_each_view_stands_alone(trace, replays, view, layers):
    shown = view(trace, replays, step=200)
    assert shown.data.layers == layers
    assert repr(shown).startswith(f"{view.__name__}('synthetic-0', replay, budget 60:")
    assert shown.counts()["waiting"] == 300
    assert shown._view == view.kind


def test_layer_scores_are_quantised_between_the_ends_of_their_scale(trace):
    shown = LayerMap(trace)
    assert [score.name for score in shown.data.layer_scores] == ["displacement", "value range"]
    for layer in (0, 7):
        assert np.array_equal(shown.data.layer_scores[0].values[layer], ev.signals.trace_zscore(trace, layer))
    score = LayerScore("s", np.array([[-4, -2, 0, 2, 4, np.nan, np.inf]], dtype=np.float32), "signed")
    low, high = score.clip
    assert low == -high
    assert score.levels[0].tolist()[2:] == [127, round(127 + 127 * 2 / high), 254, NO_BUCKET, 254]


def test_layer_scores_of_ones_own(trace):
    ages = np.tile(np.arange(500), (8, 1))
    shown = LayerMap(trace, layer_scores={"age": (ages, "magnitude", "tokens")})
    assert shown.layer_by == "age"
    assert shown.data.bands == ((2, 3), (5, 6)) and len(shown.data.reference) == 2
    with pytest.raises(ValueError, match=r"shape \(8, 3\).*8 layers and 500 tokens"):
        LayerMap(trace, layer_scores={"age": (ages[:, :3], "magnitude", "")})
    with pytest.raises(TypeError, match="a layer map shows a Trace, got SimpleNamespace"):
        LayerMap(make_run())


def test_replays_side_by_side_share_budget_and_step(trace, replays):
    shown = Workbench(trace, replays, beside=["c", "a", "b"], step=300)
    assert shown.beside == ["c", "b"] and shown.columns == 3
    for column, method in enumerate("acb"):
        story = next(s for s in shown.data.stories if (s.method, s.budget) == (method, 60))
        assert np.array_equal(shown.struck(column), story.struck(300, shown.scope, 500))
    shown.method = "c"
    assert shown.beside == ["b"]
    shown.method = STATIC
    assert shown.beside == []
    with pytest.raises(TraitError, match="beside must be one of"):
        shown.beside = [STATIC]


def test_a_replay_beside_has_the_nearest_budget_it_has(trace, replays):
    shown = Workbench(trace, [*replays, make_replay(trace, "d", 80)], budget=60, beside=["d"])
    assert "budget 80" in shown.summary(1)


def test_a_grid_gives_the_replays_of_its_trace(trace, replays):
    other = make_replay(make_trace(seed=3))
    grid = SimpleNamespace(cells=(), select=lambda: [*replays, other])
    assert len(Workbench(trace, grid).data.stories) == len(replays)
    with pytest.raises(ValueError, match="no replay of the trace"):
        Workbench(make_trace(seed=4), grid)


def test_replays_without_their_trace_have_its_layers(trace, replays):
    for source in (replays, replays[0]):
        assert len(Workbench(source).data.layer_scores) == 2


def test_a_run_has_no_layers(trace):
    assert Workbench(make_run()).data.layer_scores == ()


def test_traits_drive_several_views(trace, replays):
    import ipywidgets

    slider, views = ipywidgets.IntSlider(max=500), [Timeline(trace, replays), HeadMap(trace, replays)]
    for view in views:
        ipywidgets.link((slider, "value"), (view, "step"))
    slider.value = 240
    assert [view.counts()["waiting"] for view in views] == [260, 260]
    views[1].step = 90
    assert views[0].step == slider.value == 90


# ---- budgets at will


def test_a_missing_budget_is_computed_in_the_background(trace, replays):
    shown, kernel = computing(trace, replays, go_on=False)
    before = shown.counts()
    shown.budget = 77
    assert kernel.watched.wait(20)
    assert shown._task["method"] == "a" and shown._task["budget"] == 77
    assert "a at 77 slots is being computed" in repr(shown) and "being computed" in shown._fallback()
    with pytest.raises(NotComputedError, match=r"computed are the budgets \[60, 100\].*wait\(\)"):
        shown.struck()
    with pytest.raises(ValueError, match="still being computed"):
        shown.to_html("never.html")
    with pytest.raises(TimeoutError, match="a at 77 slots"):
        shown.wait(timeout=0.05)
    kernel.go_on.set()
    shown.wait(20)
    expected = make_retention(500, 77, seed=1)
    assert np.array_equal(shown.story().retention.death, expected.death)
    assert shown._task == {} and kernel.asked == [("a", 77)]
    assert [story["budget"] for story in shown._meta["stories"] if story["method"] == "a"] == [60, 100, 77]
    shown.budget = 60
    assert shown.counts() == before and kernel.asked == [("a", 77)]
    shown.budget = 77
    assert kernel.asked == [("a", 77)]


def test_stop_goes_back_to_what_is_there(trace, replays):
    shown, kernel = computing(trace, replays, go_on=False, beside=["b"])
    shown.budget = 90
    assert kernel.watched.wait(20)
    shown._handle_custom_msg({"ask": "stop"}, [])
    shown.wait(20)
    assert (shown.budget, shown.beside, shown._task) == (100, ["b"], {})
    assert len(shown.data.stories) == len(replays)


def test_a_computed_budget_beyond_the_text_is_not_computed_again(trace):
    shown, kernel = computing(trace, [make_replay(trace, "a", 1000)])
    shown.wait(20)
    assert (shown.budget, kernel.asked) == (1000, [])
    shown.budget = 5000
    assert shown.budget == 1000


def test_the_last_wish_counts(trace, replays):
    shown, kernel = computing(trace, replays, go_on=False)
    for budget in (70, 71, 72):
        shown.budget = budget
    kernel.go_on.set()
    shown.wait(20)
    assert shown.data.budgets("a")[-2:] == [72, 100]
    assert kernel.asked[-1] == ("a", 72)
    assert not shown._missing()


def test_methods_side_by_side_are_computed_one_after_the_other(trace, replays):
    shown, kernel = computing(trace, replays, methods="abcde", beside=["d", "e"])
    shown.wait(20)
    shown.budget = 75
    shown.wait(20)
    assert kernel.asked == [("d", 60), ("e", 60), ("a", 75), ("d", 75), ("e", 75)]
    assert [shown.story(column).budget for column in range(3)] == [75, 75, 75]


def test_an_error_is_shown_and_raised(trace, replays):
    shown, _ = computing(trace, replays)
    shown.budget = 9
    with pytest.raises(ValueError, match="9 is too small"):
        shown.wait(20)
    assert shown.budget == 60
    assert shown._task == {"error": "a at 9 slots: 9 is too small"}
    shown.budget = 61
    shown.wait(20)
    assert shown._task == {} and shown.budget == 61


def test_without_replays_a_workbench_begins_with_the_static_ranking(trace):
    shown, kernel = computing(trace, (), methods=["x", "y"])
    assert shown.method == STATIC and shown.data.methods == ["x", "y", STATIC]
    shown.method, shown.budget = "y", 80
    shown.wait(20)
    assert kernel.asked[-1] == ("y", 80) and shown.story().budget == 80


def test_what_a_page_cannot_compute_is_left_out(trace, replays, tmp_path):
    shown, _ = computing(trace, replays, methods=["a", "z"])
    assert "z" in shown.data.methods
    page = shown.to_html(tmp_path / "page.html").read_text()
    assert '"methods": ["a", "b", "c", "static ranking"]' in page and '"computes": []' in page


def test_a_model_computes_what_a_replay_would():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(20), tokens=random_prompt(80, 9), progress=False)
    shape = {"sinks": 2, "recent": 6, "buffer": 8}
    first = ev.replay(model, trace, "streaming", ev.Budget(30, **shape), seed=5, progress=False)
    shown = Workbench(trace, [first], model=model)
    assert {"streaming", "snapkv", "vase-attnv"} <= set(shown.data.methods)
    assert not {"full", "seer-quest"} & set(shown.data.methods)
    shown.method, shown.budget = "random", 40
    shown.wait(60)
    expected = ev.replay(model, trace, "random", ev.Budget(40, **shape), seed=5, progress=False)
    assert np.array_equal(shown.story().retention.death, expected.retention.death)
    shown.budget = 7
    with pytest.raises(ev.BudgetError, match="cannot hold 2 sinks \\+ 6 recent"):
        shown.wait(60)


def test_only_traces_can_be_computed(replays):
    with pytest.raises(TypeError, match="replay a Trace at other budgets"):
        Workbench(make_run(), compute=print)


# ---- selections attend, they do not evict


def test_a_selection_says_attended(trace):
    attended = SimpleNamespace(tokens=500, share=lambda: np.full(500, 0.5))
    replay = make_replay(trace, "seer-quest")
    replay.retention, replay.attended = make_retention(500, 1000), attended
    replay.budget = make_budget(64)
    shown = Workbench(trace, [replay, make_replay(trace, "a", 60)], step=400)
    assert shown.summary() == "replay, 64 of 400 attended, 100 not there yet"
    assert "evict" not in shown._fallback()
