"""The reader without a browser: what is packed, what is struck, traits, messages, fallback."""

import json
import re
import threading
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import traitlets
from synthetic import HOSTILE, make_replay, make_retention, make_run, make_trace, spans_of

from epiviz.text import join_bytes
from epiviz.widgets import TraceReader
from epiviz.widgets.data import ALL, NO_BUCKET, STATIC, THRESHOLDS, Score
from epiviz.widgets.looks import PALETTES, visible
from epiviz.widgets.page import style


@pytest.fixture(scope="module")
def trace():
    return make_trace()


@pytest.fixture(scope="module")
def replays(trace):
    return [make_replay(trace, policy, budget, seed=i) for i, (policy, budget) in enumerate(product("ab", (60, 100)))]


def unpacked(reader, name):
    dtype, shape, offset = reader._meta["arrays"][name]
    count = int(np.prod(shape))
    return np.frombuffer(reader._data, dtype=np.dtype(dtype).newbyteorder("<"), count=count, offset=offset).reshape(
        shape
    )


# ---- static ranking


def test_ranks_put_the_highest_first_and_ties_to_the_newer_token():
    score = Score("s", np.array([1, 3, np.nan, 3, -np.inf, np.nan], dtype=np.float32), "signed")
    assert score.ranks.tolist() == [2, 1, 5, 0, 3, 4]


@pytest.mark.parametrize("name", ["epiphany score", "surprisal", "value range"])
@pytest.mark.parametrize("budget", [1, 7, 128, 499, 500])
def test_static_ranking_strikes_all_but_the_best(trace, name, budget):
    reader = TraceReader(trace, color_by=name, budget=budget)
    values = np.nan_to_num(reader.data.columns[0].score(name).values, nan=-np.inf)
    best = sorted(range(500), key=lambda i: (values[i], i), reverse=True)[:budget]
    assert np.array_equal(np.flatnonzero(~reader.struck()), np.sort(best))
    assert reader.counts() == {"kept": budget, "struck": 500 - budget, "waiting": 0}


def test_without_a_score_nothing_is_ranked(trace):
    assert not TraceReader(trace, color_by="none", budget=3).struck().any()


def test_a_shallow_model_has_no_epiphany_score():
    assert TraceReader(make_trace(layers=1)).data.score_names == ["surprisal", "value range", "none"]


def test_budget_and_step_are_brought_into_range(trace):
    reader = TraceReader(trace)
    reader.budget = 0
    assert reader.budget == 1
    reader.budget = 10**6
    assert reader.budget == 500
    reader.step = -3
    assert reader.step == 0


# ---- colours


def test_signed_buckets_are_centred_on_zero():
    values = np.concatenate([np.linspace(-1, 4, 1000), [0.0, np.nan, np.inf, -np.inf]]).astype(np.float32)
    score = Score("s", values, "signed")
    low, high = score.clip
    assert low == -high
    assert score.buckets[-4:].tolist() == [4, NO_BUCKET, 8, 0]


def test_magnitude_buckets_end_at_the_percentiles():
    values = np.arange(1000, dtype=np.float32)
    score = Score("m", values, "magnitude")
    assert score.clip == (np.percentile(values, 1), np.percentile(values, 99))
    assert (score.buckets.min(), score.buckets.max()) == (0, 5)
    assert (np.diff(score.buckets.astype(int)) >= 0).all()


@pytest.mark.parametrize(("kind", "middle"), [("signed", 4), ("magnitude", 2)])
def test_constant_scores_have_one_colour(kind, middle):
    assert set(Score("c", np.zeros(5, np.float32), kind).buckets.tolist()) == {middle}


def test_stylesheet_and_fallback_share_their_colours():
    css = style()
    for kind, colours in PALETTES.items():
        block = re.search(rf'data-kind="{kind}"\] \{{(.*?)\}}', css, re.S)[1]
        for bucket, colour in enumerate(colours):
            value = re.search(rf"--b{bucket}: (.*?);", block)[1]
            assert value == "transparent" if colour == "ffffff" else f"#{colour}" in value


def test_text_is_legible_on_every_background():
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5, on an exported page as in JupyterLab's themes."""

    def luminance(colour):
        colour = colour * 2 if len(colour) == 3 else colour
        channels = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    pairs = re.findall(r"--(\w+): light-dark\(#(\w+), #(\w+)\)", style())
    for theme, panels in ((0, ["fff"]), (1, ["161616", "212121", "1f1f23"])):
        inks = {name: colours[theme] for name, *colours in pairs if name in ("ink", "muted", "gone", "later", "accent")}
        assert len(inks) == 5
        for name, ink in inks.items():
            assert min(contrast(ink, panel) for panel in panels) >= 4.5, (name, theme)
        backgrounds = [colours[theme] for name, *colours in pairs if re.fullmatch(r"b\d|hit", name)]
        assert len(backgrounds) == 8 + 5 + 1
        assert min(contrast(inks["ink"], background) for background in backgrounds) >= 4.5


# ---- replays and runs


def test_replay_strikes_what_retention_says(trace, replays):
    reader = TraceReader(trace, replays)
    rng = np.random.default_rng(3)
    for replay in replays:
        for _ in range(25):
            step, layer, head = int(rng.integers(0, 501)), int(rng.integers(-1, 4)), int(rng.integers(2))
            threshold = int(rng.choice(THRESHOLDS))
            reader.set_trait("method", replay.policy)
            reader.set_trait("budget", replay.budget.total)
            reader.layer, reader.head, reader.threshold, reader.step = layer, head, threshold, step
            alive = replay.retention.alive(step)
            born = np.arange(500) < step
            if layer >= 0:
                expected = born & ~alive[layer, head]
            else:
                expected = born & ((~alive).mean(axis=(0, 1)) >= threshold / 100 - 1e-9)
            assert np.array_equal(reader.struck(), expected)
            assert reader.counts()["waiting"] == 500 - step


def test_replays_offer_the_static_ranking_too(trace, replays):
    reader = TraceReader(trace, replays, budget=60)
    assert reader.data.methods == ["a", "b", STATIC]
    assert reader.budget == 60
    reader.budget = 95
    assert reader.budget == 100
    reader.method = STATIC
    reader.budget = 77
    assert reader.counts()["kept"] == 77
    reader.method = "b"
    assert reader.budget == 60
    assert "replay" in repr(reader)


def test_replays_name_their_trace(trace, replays):
    assert TraceReader(replays).data.kind == TraceReader(replays[0]).data.kind == "replay"
    assert TraceReader(trace, replays[0]).data.kind == "replay"
    with pytest.raises(ValueError, match="another trace"):
        TraceReader(make_trace(seed=5), replays)


def test_equal_names_are_numbered(trace):
    twice = [make_replay(trace, "random", 60, seed=seed) for seed in (0, 1)]
    assert TraceReader(trace, twice).data.methods[:2] == ["random", "random #2"]


def test_run_covers_the_token_that_was_never_fed():
    run = make_run()
    reader = TraceReader(run, step=400, threshold=10)
    assert reader.data.kind == "generated"
    assert reader.struck().shape == (400,)
    assert not reader.struck()[-1]
    assert np.array_equal(reader.struck()[:-1], (~run.retention.alive(399)).mean(axis=(0, 1)) >= 0.1)
    reader.step = 100
    assert reader.waiting().sum() == 300


def test_runs_are_marked_where_they_part():
    runs = [make_run("full", seed=0), make_run("a", seed=1), make_run("b", seed=2, generated=300)]
    reader = TraceReader(runs)
    assert [column.divergence for column in reader.data.columns] == [(150,), (150,), (150,)]
    assert reader.data.methods == [ALL, "full", "a", "b"]
    assert [column.label for column in reader.data.columns] == ["full", "a", "b"]
    with pytest.raises(ValueError, match="at most 3"):
        TraceReader([*runs, runs[0]])


def test_equal_runs_do_not_part():
    reader = TraceReader([make_run(), make_run()])
    assert [column.divergence for column in reader.data.columns] == [(), ()]


def test_a_run_without_budget_is_the_full_cache():
    run = make_run()
    run.budget, run.retention = None, make_retention(399, 1000)
    reader = TraceReader(run)
    assert not reader.struck().any()
    assert reader.data.columns[0].note.startswith("full cache")


def test_scores_of_several_runs_are_lists():
    runs = [make_run("a"), make_run("b", generated=300)]
    arrays = [np.arange(400), np.arange(320)]
    reader = TraceReader(runs, scores={"age": (arrays, "magnitude", "tokens")})
    assert [len(column.scores[0].values) for column in reader.data.columns] == [400, 320]
    with pytest.raises(ValueError, match="one array per run"):
        TraceReader(runs, scores={"age": (arrays[:1], "magnitude", "tokens")})


def test_layers_that_never_evict_do_not_count(trace):
    replay = make_replay(trace)
    death = replay.retention.death.copy()
    death[0] = replay.retention.events
    hybrid = SimpleNamespace(**vars(replay))
    hybrid.retention = type(replay.retention)(
        replay.retention.event_steps, death, replay.retention.reason, 20, evicts=(1, 2, 3)
    )
    reader = TraceReader(trace, hybrid, threshold=90)
    assert np.array_equal(reader.struck(), (~hybrid.retention.alive(500)[1:]).mean(axis=(0, 1)) >= 0.9)


# ---- packing


def test_packed_text_and_offsets_slice_like_a_browser_string():
    spans = join_bytes([b"a", b"\xf0\x9f", b"\x99\x82", "é漢".encode(), b"\n", b"\xff"])
    reader = TraceReader(make_trace(spans=spans))
    units, offsets = unpacked(reader, "c0.text"), unpacked(reader, "c0.offsets")
    pieces = [units[a:b].tobytes().decode("utf-16-le", "surrogatepass") for a, b in pairwise(offsets)]
    assert pieces == spans.pieces
    assert "".join(pieces) == spans.text


def lost_by(retention, share):
    """The event by which at least a share of the evicting heads had lost each token."""
    heads = np.sort(retention.death[retention.evicting].reshape(-1, retention.tokens), axis=0)
    return heads[int(np.ceil(share * len(heads))) - 1]


def test_packed_deaths_equal_the_retention(trace, replays):
    reader = TraceReader(trace, replays)
    for s, replay in enumerate(replays):
        retention = replay.retention
        death = unpacked(reader, f"s{s}.deaths").astype(np.int64)
        assert np.array_equal(np.where(death == 0xFFFF, retention.events, death), retention.death)
        majority = unpacked(reader, f"s{s}.majority").astype(np.int64)
        for row, threshold in enumerate(THRESHOLDS):
            expected = lost_by(retention, threshold / 100)
            assert np.array_equal(np.where(majority[row] == 0xFFFF, retention.events, majority[row]), expected)
        assert np.array_equal(unpacked(reader, f"s{s}.events"), retention.event_steps)


def test_heads_that_agree_are_shipped_once(trace):
    reader = TraceReader(trace, make_replay(trace, uniform=True))
    assert reader._meta["stories"][0]["uniform"]
    assert reader._meta["arrays"]["s0.majority"][1] == [1, 500]


def test_all_arrays_are_aligned_and_the_index_is_json(trace, replays):
    reader = TraceReader(trace, replays)
    assert all(offset % 8 == 0 for _, _, offset in reader._meta["arrays"].values())
    json.dumps(reader._meta, allow_nan=False)


def test_too_many_heads_are_fetched_on_demand(trace, replays, monkeypatch):
    monkeypatch.setattr("epiviz.widgets.data.SHIP_LIMIT", 1000)
    reader = TraceReader(trace, replays)
    assert "s0.deaths" not in reader._meta["arrays"]
    sent = []
    reader.send = lambda content, buffers=None: sent.append((content, buffers))
    reader._handle_custom_msg({"ask": "head", "story": 2, "layer": 3, "head": 1}, [])
    reader._handle_custom_msg({"ask": "token", "story": 1, "token": 40}, [])
    (head, (death, reason)), (token, (deaths, _)) = sent
    retention = replays[2].retention
    assert head == {"ask": "head", "tell": "head", "story": 2, "layer": 3, "head": 1}
    death = np.frombuffer(death, np.uint16).astype(int)
    assert np.array_equal(np.where(death == 0xFFFF, retention.events, death), retention.death[3, 1])
    assert np.array_equal(np.frombuffer(reason, np.uint8), retention.reason[3, 1])
    assert token["token"] == 40
    assert len(np.frombuffer(deaths, np.uint16)) == 8


def test_state_stays_small_at_32k_tokens():
    reader = TraceReader(make_trace(tokens=32_768, layers=4))
    assert len(reader._data) < 1.5e6


# ---- traits


def test_messages_from_the_browser_fire_observers(trace):
    reader = TraceReader(trace)
    seen = []
    reader.observe(lambda change: seen.append((change.name, change.new)), ["budget", "selected", "color_by"])
    reader.set_state({"budget": 12, "selected": 30, "color_by": "surprisal"})
    message = {"content": {"data": {"method": "update", "state": {"budget": 13}, "buffer_paths": []}}, "buffers": []}
    reader.comm.handle_msg(message)
    assert sorted(seen) == [("budget", 12), ("budget", 13), ("color_by", "surprisal"), ("selected", 30)]
    assert reader.counts()["kept"] == 13


def test_the_column_is_one_on_screen(trace, replays):
    reader = TraceReader(trace, replays, beside=["b"], column=1)
    assert reader.column == 1
    reader.beside = []
    assert reader.column == 0


def test_unknown_names_are_refused_with_the_known_ones(trace):
    reader = TraceReader(trace)
    with pytest.raises(traitlets.TraitError, match="surprisal"):
        reader.color_by = "colour"
    with pytest.raises(traitlets.TraitError, match="static ranking"):
        reader.method = "snapkv"


@pytest.mark.parametrize(("name", "hint"), [("colour_by", "did you mean 'color_by'"), ("zzz", "known: beside, budget")])
def test_unknown_keywords_are_refused(trace, name, hint):
    with pytest.raises(TypeError, match=hint):
        TraceReader(trace, **{name: 1})


def test_parts_that_do_not_fit_are_refused(trace):
    run = make_run()
    for wrong in ([trace, trace], 3, [run, trace]):
        with pytest.raises(TypeError, match="one Trace, one Run"):
            TraceReader(wrong)
    with pytest.raises(TypeError, match="only its replays"):
        TraceReader(trace, [run])
    with pytest.raises(TypeError, match="one list"):
        TraceReader(run, [run])
    with pytest.raises(ValueError, match="empty"):
        TraceReader([])
    with pytest.raises(ValueError, match=r"shape \(3,\).*500 tokens"):
        TraceReader(trace, scores={"s": (np.zeros(3), "signed", "")})
    with pytest.raises(ValueError, match="kind must be one of"):
        TraceReader(trace, scores={"s": (np.zeros(500), "sequential", "")})
    with pytest.raises(ValueError, match="must be"):
        TraceReader(trace, scores={"s": np.zeros(500)})


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_traces(tokens):
    reader = TraceReader(make_trace(tokens=tokens, prompt=1))
    assert reader.counts()["kept"] == 1


# ---- without a kernel


def test_mime_bundle_has_widget_html_and_one_plain_line(trace):
    data, _ = TraceReader(trace, budget=128)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"] == (
        "TraceReader('synthetic-0', static ranking · a thought experiment, budget 128: 128 kept, 372 struck)"
    )
    html = data["text/html"]
    assert html.count("line-through") == 372
    assert "128 kept, 372 struck" in html


def test_fallback_names_the_budget_of_each_run():
    html = TraceReader([make_run("a", budget=100), make_run("b", budget=60)])._fallback()
    assert "generated, budget 100" in html
    assert "generated, budget 60" in html


def test_fallback_shows_both_ends_of_a_long_text():
    html = TraceReader(make_trace(tokens=2000))._fallback()
    assert "… 1500 tokens …" in html


def test_a_hostile_method_is_literal_in_the_fallback(trace):
    started = threading.Event()
    compute = lambda method, budget, _: started.wait() and make_replay(trace, method, budget)  # noqa: E731
    reader = TraceReader(trace, compute=compute, methods=["<img src=x>"], method="<img src=x>")
    html = reader._fallback()
    started.set()
    reader.wait(20)
    assert html.startswith("<p>&lt;img src=x&gt; at ")


def test_hostile_text_is_literal_in_the_fallback():
    trace = make_trace(spans=spans_of(HOSTILE), prompt=1)
    trace.name = "<b>\ud800"
    html = TraceReader(trace)._fallback()
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;document" in html
    assert "⟨U+202E⟩" in html
    assert "⟨U+0000⟩" in html
    assert "⟨U+D83D⟩" in html
    assert "👩‍👩‍👧‍👦" in html
    html.encode()


def test_visible_keeps_letters_and_writes_out_the_rest():
    assert visible("añ漢\u200d\n") == "añ漢\u200d⟨U+000A⟩"


def test_html_page_holds_the_state_and_no_address(trace, replays, tmp_path):
    path = TraceReader(trace, replays, budget=60, step=200, title="</script><b>").to_html(tmp_path / "page.html")
    page = path.read_text()
    state = json.loads(re.search(r'id="epi-state">(.*?)</script>', page, re.S)[1])
    assert (state["budget"], state["step"], state["method"]) == (60, 200, "a")
    assert page.count("</script>") == 3
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")


def test_budget_of_a_replay_may_be_missing(trace):
    replay = make_replay(trace)
    replay.budget, replay.policy, replay.retention = None, "full", make_retention(500, 1000)
    reader = TraceReader(trace, [replay, make_replay(trace, "a", 60)])
    assert (reader.method, reader.budget) == ("full", 500)
