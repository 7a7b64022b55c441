"""Figures are tested by what they draw: lines, collections, titles and labels."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from epiviz import frames, palette, plots, signals


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def steps(synthetic_trace):
    return frames.displacements(synthetic_trace)


@pytest.fixture
def trend(synthetic_trace):
    return frames.positional_trend(synthetic_trace, draws=20)


@pytest.fixture
def table():
    return pd.DataFrame(
        {
            "policy": ["full", "epikv", "random"],
            "evictions": [0, 4, 5],
            "mean_slots": [90.0, 50.0, 52.0],
            "peak_slots": [120, 60, 60],
            "attended_slots": [90.0, 50.0, 52.0],
            "kv_mib": [8.0, 4.0, 4.0],
            "state_mib": [0.0, 1.0, 4.0],
        }
    )


@pytest.fixture
def kept():
    parts = [("full", 12, 1.0), ("epikv", 12, 0.5), ("random", 8, 0.25)]
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "policy": policy,
                    "position": np.arange(n),
                    "part": ["prompt"] * 4 + ["generated"] * (n - 4),
                    "kept": [1.0] * 4 + [share] * (n - 4),
                }
            )
            for policy, n, share in parts
        ],
        ignore_index=True,
    )


def title(ax):
    """The title as one line of text."""
    return ax.get_title(loc="left").replace("\n", " ").replace("\xa0", " ")


def every_figure(trace, trend, table, kept):
    steps = frames.displacements(trace)
    heads = frames.value_heads(trace)
    return {
        "displacement": lambda ax=None: plots.displacement(steps, ax=ax),
        "displacement of a token": lambda ax=None: plots.displacement(steps, 60, ax=ax),
        "zscores": lambda ax=None: plots.zscores(steps, 60, ax=ax),
        "score": lambda ax=None: plots.score(frames.scores(trace), ax=ax),
        "positional_trend": lambda ax=None: plots.positional_trend(steps, trend, ax=ax),
        "trend_by_layer": lambda ax=None: plots.trend_by_layer(trend, (2, 3), ax=ax),
        "band_anatomy": lambda ax=None: plots.band_anatomy(frames.band_anatomy(trace, draws=20), ax=ax),
        "score_anatomy": lambda ax=None: plots.score_anatomy(frames.score_anatomy(trace, draws=20), ax=ax),
        "value_ranges": lambda ax=None: plots.value_ranges(frames.value_ranges(trace), ax=ax),
        "head_map": lambda ax=None: plots.head_map(heads, "median", "median value range", ax=ax),
        "value_tail": lambda ax=None: plots.value_tail(frames.value_tail(trace), ax=ax),
        "sink_ranks": lambda ax=None: plots.sink_ranks(frames.sink_ranks(trace), ax=ax),
        "carriers": lambda ax=None: plots.carriers(frames.carriers(trace, draws=20), ax=ax),
        "kept_share": lambda ax=None: plots.kept_share(kept, ax=ax),
        "meter": lambda ax=None: plots.meter(table, 48, ax=ax),
    }


def test_every_figure_has_its_size_and_says_what_it_shows(synthetic_trace, trend, table, kept):
    for name, draw in every_figure(synthetic_trace, trend, table, kept).items():
        ax = draw()
        assert ax.figure.get_size_inches().tolist() == [6.4, 3.6], name
        assert any(character.isdigit() for character in title(ax)), name
        assert ax.get_xlabel(), name


def test_every_figure_draws_into_given_axes_and_shows_nothing(synthetic_trace, trend, table, kept, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *args, **kwargs: pytest.fail("a figure called show"))
    for name, draw in every_figure(synthetic_trace, trend, table, kept).items():
        figure, ax = plt.subplots()
        assert draw(ax) is ax, name
        assert ax.figure is figure
        assert len(plt.get_fignums()) == 1, f"{name} made a figure of its own"
        plt.close(figure)


def test_a_tokens_story_holds_its_neighbours(steps, synthetic_trace):
    ax = plots.displacement(steps, 60, around=5)
    low = steps["layer"].min()
    dots = next(line for line in ax.lines if line.get_label() == f"layer {low}")
    assert dots.get_xdata().tolist() == list(range(55, 66))
    np.testing.assert_array_equal(dots.get_ydata(), synthetic_trace.displacement[low, 55:66])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [f"t{index}␣" for index in range(55, 66)]
    assert "Token 60" in title(ax)


def test_the_title_of_the_zscores_tells_the_score(steps, synthetic_trace):
    score = frames.scores(synthetic_trace)["score"][60]
    assert f"score {score:+.2f}".replace("-", "−") in title(plots.zscores(steps, 60))


def test_a_token_that_does_not_exist_is_refused(steps):
    with pytest.raises(ValueError, match="no token 500 in a trace of 120"):
        plots.zscores(steps, 500)


def test_the_score_is_purple_above_zero_and_orange_below(synthetic_trace):
    frame = frames.scores(synthetic_trace)
    ax = plots.score(frame)
    bars = ax.collections[0]
    colours = [to_hex(colour) for colour in bars.get_colors()]
    assert colours == [palette.PURPLE if score >= 0 else palette.ORANGE for score in frame["score"]]
    best = frame[frame["part"] == "generated"].nlargest(1, "score").iloc[0]
    assert f"token {best['position']}" in title(ax)


def test_a_dollar_sign_in_the_text_is_no_formula(synthetic_trace):
    frame = frames.scores(synthetic_trace).assign(token="$x_1^$")
    plots.score(frame).figure.canvas.draw()


def test_the_trend_figure_shows_rho_and_interval(steps, trend):
    ax = plots.positional_trend(steps, trend, "z-score")
    layer = steps["layer"].min()
    rho = trend[(trend["layer"] == layer) & (trend["signal"] == "z-score")]["rho"].item()
    text = ax.get_legend().get_texts()[0].get_text()
    assert text.startswith(f"layer {layer}: ρ = {rho:+.2f}".replace("-", "−"))
    assert "95%" in text


def test_trend_by_layer_counts_clear_layers():
    rows = [(layer, "displacement", 0.5, 0.3, 0.6, 90) for layer in range(3)]
    rows += [(layer, "z-score", 0.1, -0.1 + layer / 5, 0.4, 90) for layer in range(3)]
    frame = pd.DataFrame(rows, columns=["layer", "signal", "rho", "low", "high", "tokens"])
    ax = plots.trend_by_layer(frame)
    assert title(ax).endswith("3 of 3 raw, 2 of 3 z-scored")
    assert "90 tokens" in ax.get_ylabel()
    assert len(ax.collections) == 2


def test_the_anatomy_is_sorted_by_the_score_and_marks_what_is_clear():
    rows = [("number", 2.0, 0.5), ("other", 0.0, 0.0), ("newline", -1.0, 1.0)]
    low, high = signals.reference_layers(5)
    cells = [
        {"layer": layer, "class": name, "tokens": 9, "zscore": (z := {low: first, high: second}.get(layer, 0.0))}
        | {"low": z - 0.1, "high": z + 0.1}
        for name, first, second in reversed(rows)
        for layer in range(5)
    ]
    ax = plots.band_anatomy(pd.DataFrame(cells))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["number (9)", "other (9)", "newline (9)"]
    image = np.asarray(ax.images[0].get_array())
    assert image[:, low].tolist() == [2, 0, -1] and image[:, high].tolist() == [0.5, 0, 1]
    dots = {tuple(map(int, at)) for at in ax.collections[0].get_offsets()}
    assert dots == {(low, 0), (high, 0), (low, 2), (high, 2)}
    told = f"Layer {low} moves most at number tokens (+2.00), layer {high} moves most at newline tokens (+1.00)"
    assert title(ax) == told


def test_value_ranges_draw_the_sinks_apart(synthetic_trace):
    ax = plots.value_ranges(frames.value_ranges(synthetic_trace))
    sinks = next(line for line in ax.lines if str(line.get_label()).startswith("sinks"))
    assert len(sinks.get_xdata()) == 5 * 2 * 4
    assert ax.get_yscale() == "log"


def test_the_head_map_is_the_frame(synthetic_trace):
    heads = frames.value_heads(synthetic_trace)
    mesh = plots.head_map(heads, "median", "median value range").collections[0]
    expected = np.median(synthetic_trace.value_range[:, :, 4:], axis=-1).T
    np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(2, 5), expected, rtol=1e-6)


def test_the_tail_tells_the_share_beyond_the_factor(synthetic_trace):
    tail = frames.value_tail(synthetic_trace)
    heads = frames.value_heads(synthetic_trace)
    ax = plots.value_tail(tail)
    assert title(ax).startswith(f"{100 * heads['tail_share'].mean():.2g}% of value states exceed 3×")
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_carriers_are_grey_where_the_interval_holds_one():
    frame = pd.DataFrame(
        {
            "class": ["number", "other", "newline"],
            "tokens": [10, 80, 10],
            "ratio": [3.0, 1.0, 0.2],
            "low": [2.0, 0.8, 0.1],
            "high": [4.0, 1.2, 0.5],
        }
    )
    frame["share"] = 0.1
    ax = plots.carriers(frame)
    assert ax.get_xlabel().startswith("share among the largest 10% of each head")
    points = next(each for each in ax.collections if len(each.get_offsets()) == 3)
    colours = [to_hex(colour) for colour in points.get_facecolors()]
    assert colours == [palette.ORANGE, palette.GREY, palette.PURPLE]
    assert "number tokens carry 3.0×" in title(ax)
    assert "newline tokens carry 0.2×" in title(ax)
    unclear = frame.assign(low=0.1, high=9.0)
    assert title(plots.carriers(unclear)).startswith("No class differs")


def test_kept_share_leaves_room_after_a_shorter_text(kept):
    ax = plots.kept_share(kept)
    grid = np.ma.filled(np.ma.asarray(ax.collections[0].get_array()).astype(float), np.nan).reshape(3, 12)
    assert grid[1].tolist() == [1] * 4 + [0.5] * 8
    assert np.isnan(grid[2, 8:]).all()
    assert title(ax) == "At the end evicting caches hold 100% of the prompt and 25% to 50% of what they wrote"
    assert [tick.get_text().split("\n")[0] for tick in ax.get_yticklabels()] == ["full", "epikv", "random"]


def test_long_texts_are_averaged_into_pixels(kept):
    grid = plots.kept_share(kept, bins=4).collections[0].get_array().reshape(3, 4)
    assert grid[1].tolist() == [1, pytest.approx(2 / 3), 0.5, 0.5]


def test_the_meter_compares_bytes_with_and_without_state(table):
    ax = plots.meter(table, 48)
    assert "50% of the full cache's keys and values, 62% to 100% with what policies keep" in title(ax)
    markers = [line.get_xdata()[0] for line in ax.lines if line.get_marker() in ("*", "o", "^")]
    assert sorted(markers) == [50.0, 52.0, 90.0]


def test_the_meter_draws_what_a_selection_attends(table):
    selection = {"policy": "seer-quest", "mean_slots": 90.0, "peak_slots": 120, "attended_slots": 31.0, "evictions": 0}
    ax = plots.meter(pd.concat([table, pd.DataFrame([selection | {"kv_mib": 8.0, "state_mib": 0.5}])]))
    hollow = [line.get_xdata()[0] for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert hollow == [31.0]
    told = [text.get_text() for text in ax.texts]
    assert told[0] == "8.0 + 0.50 MiB, 31 attended" and told[1] == "4.0 + 4.00 MiB, 5 evictions"


def test_a_policy_looks_the_same_everywhere():
    looks = [palette.policy_style(name) for name in palette.POLICIES]
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks)
    assert palette.policy_style("epikv(window=32)") == palette.policy_style("epikv")
    assert palette.policy_style("mine") == palette.policy_style("mine")
