"""Pictures of views: which part is drawn, what stands in it, and no browser, pyplot or missing glyph in the way."""

import threading

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.image import imread
from synthetic import HOSTILE, make_replay, make_run, make_trace, spans_of

from epiviz.widgets import HeadMap, LayerMap, Timeline, TraceReader, Workbench
from epiviz.widgets.data import NotComputedError, Scope, Story
from epiviz.widgets.images import lives
from epiviz.widgets.looks import PALETTES
from epiviz.widgets.png import draw
from epiviz.widgets.typeset import MISSING, cells, glyph, lay_out

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's word for a glyph that is missing


@pytest.fixture(scope="module")
def trace():
    return make_trace()


@pytest.fixture(scope="module")
def replays(trace):
    return [make_replay(trace, policy, 60, seed=seed) for seed, policy in enumerate("ab")]


def words(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def told(figure):
    return " ".join(words(figure))


# ---- lines of cells


@pytest.mark.parametrize("width", [7, 40])
def test_lines_hold_the_text_in_order(width):
    spans = spans_of(["The", " sum", " of", "\n", "\n", "two", " 漢字", "かな", "\t", "x" * 50, " e\u0301nd", "", "."])
    pieces = lay_out(spans, width)
    rows = {}
    for piece in pieces:
        assert piece.cell >= 0 and piece.cell + piece.width <= width
        rows.setdefault(piece.row, []).append(piece)
    for row in rows.values():
        ends = [piece.cell + piece.width for piece in row if not piece.line_end]
        starts = [piece.cell for piece in row if not piece.line_end]
        assert starts == sorted(starts) and all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    drawn = {token: "".join(p.text for p in pieces if p.token == token).strip() for token in range(len(spans))}
    wanted = ["".join(map(glyph, piece.strip())) for piece in spans.pieces]
    assert [drawn[token] for token in range(len(spans))] == wanted
    assert sum(piece.line_end for piece in pieces) == 2


def test_lines_break_at_blanks_if_they_can():
    pieces = lay_out(spans_of(["ab", "cd", " efg", "hi", " jk"]), 8)
    assert [(piece.text, piece.row, piece.cell) for piece in pieces] == [
        ("ab", 0, 0),
        ("cd", 0, 2),
        (" ", 0, 4),
        ("efg", 1, 0),
        ("hi", 1, 3),
        (" jk", 1, 5),
    ]


def test_missing_glyphs_are_squares():
    assert glyph("a") == "a" and glyph("\U0010fffd") == MISSING
    assert cells("a\u200db漢") == 4


# ---- what stands in a picture


def test_a_reader_is_drawn_as_it_stands():
    trace = make_trace(260)
    replays = [make_replay(trace, policy, 60) for policy in "ab"]
    reader = TraceReader(trace, replays, method="b", step=200, selected=150)
    figure = draw(reader, rows=60)
    text = told(figure)
    for part in ("synthetic-0", "replay", "b, budget 60, step 200 of 260:", "epiphany score", "percentiles 1–99"):
        assert part in text
    counts = reader.counts()
    assert f"{counts['kept']} kept, {counts['struck']} struck, {counts['waiting']} not there yet" in text
    for part in ("evicted", "by 50 % of the heads", "sink", "reserved value", "the whole text"):
        assert part in words(figure)
    body = figure.axes[1]
    strikes = next(part for part in body.collections if isinstance(part, LineCollection))
    struck, pieces = reader.struck(), lay_out(trace.spans, 100)
    assert len(strikes.get_segments()) == sum(struck[piece.token] for piece in pieces) > 50
    score = reader.data.columns[0].score("epiphany score")
    coloured = {patch.get_facecolor()[:3] for patch in body.patches if patch.get_fill()}
    known = [tuple(int(c[i : i + 2], 16) / 255 for i in (0, 2, 4)) for c in PALETTES["signed"]]
    assert coloured <= set(known) and len(coloured) >= 4
    shown = ~struck & ~reader.waiting() & (score.buckets != 4) & (score.buckets != 255)
    patches = sum(patch.get_fill() for patch in body.patches)
    assert patches == sum(shown[piece.token] for piece in pieces)


def test_a_long_text_is_cut_around_a_token(trace, replays):
    reader = TraceReader(trace, replays, step=500)
    for token, options in [(499, {}), (250, {"around": 250}), (0, {"around": 0})]:
        figure = draw(reader, rows=8, **options)
        line = next(text for text in words(figure) if text.startswith("tokens "))
        first, last = int(line.split()[1]), int(line.split()[3])
        assert first <= token <= last and last - first < 200 and line.endswith("of 500")
    reader.selected = 100
    line = next(text for text in words(draw(reader, rows=8)) if text.startswith("tokens "))
    assert int(line.split()[1]) <= 100 <= int(line.split()[3])


def test_replays_and_texts_stand_side_by_side(trace, replays):
    figure = draw(TraceReader(trace, replays, method="a", beside=["b"]), rows=6)
    assert "a, budget 60" in told(figure) and "b, budget 60" in told(figure)
    runs = [make_run("epikv"), make_run("snapkv", seed=1), make_run("h2o", seed=2)]
    figure = draw(TraceReader(runs), rows=6, around=160)
    assert {"generated", "evicted"} <= set(words(figure))
    assert all(f"{run.policy}, budget 100" in told(figure) for run in runs)
    alone = draw(TraceReader(runs, method="snapkv"), rows=6)
    assert "snapkv, budget 100" in told(alone) and "h2o, budget" not in told(alone)
    static = draw(TraceReader(trace, budget=40), rows=6)
    assert "static ranking" in told(static) and "ranked by epiphany score, budget 40 of 500 tokens" in told(static)
    assert "beyond the budget" in words(static)


@pytest.mark.parametrize("view", [Workbench, Timeline, LayerMap, HeadMap])
def test_every_view_has_a_picture(trace, replays, view, tmp_path):
    shown = view(trace, replays, method="a", step=300, selected=290, title="a title")
    path = shown.to_png(tmp_path / "view.png", rows=5, dpi=60)
    pixels = imread(path)
    assert pixels.shape[0] > 80 and pixels.shape[1] > 400 and np.ptp(pixels) > 0.5
    text = told(draw(shown, rows=5))
    assert "a title" in text and "step 300 of 500" in text
    assert ("Timeline · a, budget 60" in text) == (view in (Workbench, Timeline))
    assert ("Layers · displacement" in text) == (view in (Workbench, LayerMap))
    alive = replays[0].retention.alive(300)[:, :, 290]
    assert (f"held by {alive.sum()} of {alive.size} heads" in text) == (view in (Workbench, HeadMap))


def test_a_token_beyond_a_shorter_text_has_no_heads():
    figure = draw(HeadMap([make_run("a"), make_run("b", seed=1, generated=300)], selected=390, column=1))
    assert "Heads · token 390 at step 400: not there yet, or never fed back · b" in told(figure)


def test_the_timeline_counts_who_is_held(replays):
    story = Story("a", 60, replays[0].retention)
    image = lives(story, story.death(Scope()), 500, 500, 500)
    for row in (99, 250, 480):
        held = ~story.struck(row, Scope(), 500)[:row]
        assert np.array_equal(image[row, :row], held) and np.isnan(image[row, row:]).all()
    coarse = lives(story, story.death(Scope()), 500, 50, 500)
    assert np.allclose(coarse[480, :48], image[480, :480].reshape(48, 10).mean(axis=1))


# ---- in the way


def test_hostile_text_is_drawn_literally(tmp_path):
    reader = TraceReader(make_trace(spans=spans_of([*HOSTILE, *HOSTILE[-9:]])), title="$x$ <b> \u202e漢")
    path = reader.to_png(tmp_path / "hostile.png", dpi=60)
    assert path.stat().st_size > 5000
    text = told(draw(reader, rows=130))
    for part in ("<script>", "⟨U+202E⟩", "⟨U+0000⟩", "$x^2$", "⟨U+D83D⟩"):
        assert part in text.replace(" ", "")


def test_bad_requests_name_what_would_do(trace, tmp_path):
    reader = TraceReader(trace)
    with pytest.raises(ValueError, match=r"around must be a token, 0 … 499, got 500"):
        reader.to_png(tmp_path / "no.png", around=500)
    with pytest.raises(ValueError, match=r"rows must lie in 1 … 1000, got 0"):
        reader.to_png(tmp_path / "no.png", rows=0)
    gate = threading.Event()
    waiting = TraceReader(trace, compute=lambda method, budget, watch: gate.wait(), methods=["a"], method="a")
    with pytest.raises(NotComputedError, match="a at 125 slots is not computed"):
        waiting.to_png(tmp_path / "no.png")
    waiting.stop()
    gate.set()
    assert not list(tmp_path.iterdir())


def test_pictures_leave_pyplot_alone(trace, tmp_path):
    before = plt.get_fignums(), plt.rcParams["text.hinting"]
    TraceReader(trace, title="t").to_png(tmp_path / "a.png", rows=2, dpi=40)
    assert (plt.get_fignums(), plt.rcParams["text.hinting"]) == before
