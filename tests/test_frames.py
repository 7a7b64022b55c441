from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from epiviz import frames, signals
from epiviz.retention import Retention
from epiviz.text import join_bytes


def written(trace, pieces):
    """The trace with other text: ``pieces`` repeated to its length."""
    texts = [pieces[index % len(pieces)].encode() for index in range(len(trace))]
    return replace(trace, spans=join_bytes(texts))


def test_sinks_and_prompt_are_classes_whatever_they_say(synthetic_trace):
    classes = frames.token_classes(written(synthetic_trace, ["7", " so"]))
    assert list(classes[:4]) == ["sink"] * 4
    assert set(classes[4:20]) == {"prompt"}
    assert set(classes[20:]) == {"number", "marker"}


def test_scores_are_those_of_the_signals(synthetic_trace):
    frame = frames.scores(synthetic_trace)
    np.testing.assert_array_equal(frame["score"], signals.epiphany(synthetic_trace))
    assert (frame["part"] == "prompt").sum() == synthetic_trace.prompt_length


def test_displacements_hold_the_two_layers_of_the_score(synthetic_trace):
    frame = frames.displacements(synthetic_trace)
    assert frame["layer"].unique().tolist() == list(signals.reference_layers(5))
    wide = frame.pivot_table(index="position", columns="layer", values="zscore")
    difference = wide.iloc[:, 0] - wide.iloc[:, 1]
    np.testing.assert_allclose(difference, signals.epiphany(synthetic_trace), atol=1e-6)


def test_the_score_of_a_class_is_the_difference_of_its_layers(synthetic_trace):
    trace = written(synthetic_trace, ["7", " sofa", "\n"])
    layers, score = frames.band_anatomy(trace, draws=20), frames.score_anatomy(trace, draws=20)
    low, high = signals.reference_layers(5)
    classes, z = frames.token_classes(trace)[20:], signals.trace_zscore(trace, low)[20:]
    for name in ("number", "other", "newline"):
        means = score[score["class"] == name].set_index("part")["mean"]
        assert means["score"] == pytest.approx(means[f"layer {low}"] - means[f"layer {high}"], abs=1e-6)
        row = layers[(layers["class"] == name) & (layers["layer"] == low)].iloc[0]
        assert row["zscore"] == pytest.approx(means[f"layer {low}"]) == pytest.approx(z[classes == name].mean())
        assert row["tokens"] == (classes == name).sum() and row["low"] <= row["zscore"] <= row["high"]
    scores = score[score["part"] == "score"]["mean"]
    assert scores.is_monotonic_decreasing and set(layers["layer"]) == set(range(5))
    with pytest.raises(ValueError, match="no token after its prompt of 120"):
        frames.band_anatomy(replace(trace, prompt_length=120))


def test_top_tokens_are_sorted_and_leave_out_the_prompt(synthetic_trace):
    score = np.arange(120.0)
    score[5], score[60] = 1000, np.nan
    assert frames.top_tokens(synthetic_trace, score, n=3)["position"].tolist() == [119, 118, 117]
    assert frames.top_tokens(synthetic_trace, score, n=1, generated=False)["position"].tolist() == [5]
    assert len(frames.top_tokens(synthetic_trace, np.full(120, np.nan))) == 0


def test_the_zscore_takes_a_trend_away(synthetic_trace):
    drift = synthetic_trace.displacement * np.linspace(1, 8, 120, dtype=np.float32)
    trend = frames.positional_trend(replace(synthetic_trace, displacement=drift), draws=50)
    rho = trend.groupby("signal")["rho"].mean()
    assert rho["displacement"] > 0.5
    assert abs(rho["z-score"]) < 0.5 * rho["displacement"]
    assert ((trend["low"] <= trend["rho"]) & (trend["rho"] <= trend["high"])).all()
    assert set(trend["tokens"]) == {100}


def test_a_very_short_text_has_no_trend(synthetic_trace):
    trend = frames.positional_trend(replace(synthetic_trace, prompt_length=118), draws=10)
    assert trend["rho"].isna().all()


def test_value_ranges_are_sampled_but_keep_the_sinks(synthetic_trace):
    whole, part = frames.value_ranges(synthetic_trace), frames.value_ranges(synthetic_trace, per_layer=60)
    assert len(whole) == 5 * 2 * 120
    assert whole["sink"].sum() == part["sink"].sum() == 5 * 2 * 4
    assert 5 * 30 < len(part) < 5 * 100
    row = part.iloc[-1]
    assert row["value_range"] == synthetic_trace.value_range[row["layer"], row["head"], row["position"]]


def test_value_heads_tell_tail_and_sinks(synthetic_trace):
    ranges = np.ones((5, 2, 120), dtype=np.float32)
    ranges[:, :, :4] = 0.1
    ranges[2, 1, 50:62] = 10
    heads = frames.value_heads(replace(synthetic_trace, value_range=ranges)).set_index(["layer", "head"])
    assert heads.loc[(2, 1), "tail_share"] == pytest.approx(12 / 116)
    assert heads["tail_share"].drop((2, 1)).eq(0).all()
    assert heads.loc[(2, 1), "tail_index"] == pytest.approx(10)
    assert (heads["sink_rank"] < 0.05).all()


def test_value_tail_falls_from_one_to_zero(synthetic_trace):
    tail = frames.value_tail(synthetic_trace, thresholds=np.array([0.0, 1.0, 1000.0]))
    one = tail[(tail["layer"] == 3) & (tail["head"] == 1)]
    assert one["share"].tolist() == pytest.approx([1, 0.5, 0], abs=0.01)
    assert frames.TAIL_FACTOR in set(frames.value_tail(synthetic_trace)["multiple"])


def test_every_head_marks_the_same_number_of_large_values(synthetic_trace):
    hits = frames.large_values(synthetic_trace, share=0.1)
    assert hits.sum() == 5 * 2 * 12
    assert hits.max() <= 10
    with pytest.raises(ValueError, match="share must lie"):
        frames.large_values(synthetic_trace, share=0)


def test_carriers_find_the_class_with_the_large_values(synthetic_trace):
    trace = written(synthetic_trace, ["7", " word", " +", " stone"])
    ranges = synthetic_trace.value_range.copy()
    ranges[:, :, 20::4] += 100
    found = frames.carriers(replace(trace, value_range=ranges), draws=100).set_index("class")
    assert found.index[0] == "number"
    assert found.loc["number", "low"] > 1
    assert found.loc["other", "ratio"] == 0
    assert found["token_share"].sum() == pytest.approx(1)
    assert found["large_share"].sum() == pytest.approx(1)


def made_up_run(policy, tokens, death, events=(6, 8), prompt_length=3):
    retention = Retention(
        np.array(events), np.array(death, dtype=np.int32), np.zeros_like(death, np.uint8), prompt_length
    )
    meter = SimpleNamespace(
        evictions=len(events),
        mean_slots=5.0,
        peak_slots=6,
        prefill_peak_slots=3,
        attended_slots=4.0,
        kv_bytes=2**20,
        state_bytes=2**19,
    )
    return SimpleNamespace(policy=policy, status="length", tokens=tokens, meter=meter, retention=retention)


@pytest.fixture
def made_up_runs():
    never = np.full((2, 1, 9), 2)
    death = never.copy()
    death[0, 0, 1], death[:, 0, 4] = 0, 1
    return [made_up_run("full", [5, 6, 7, 8], never), made_up_run("epikv", [5, 6, 9], death)]


def test_runs_tell_meter_and_divergence(made_up_runs):
    table = frames.runs(made_up_runs, reference=made_up_runs[0]).set_index("policy")
    assert table["same_tokens"].tolist() == [4, 2]
    assert table.loc["epikv", ["kv_mib", "state_mib", "evictions"]].tolist() == [1.0, 0.5, 2]
    assert frames.runs(made_up_runs)["same_tokens"].isna().all()


def test_kept_is_what_the_heads_hold(made_up_runs):
    frame = frames.kept(made_up_runs)
    epikv = frame[frame["policy"] == "epikv"].set_index("position")
    assert epikv["kept"].tolist() == [1, 0.5, 1, 1, 0, 1, 1, 1, 1]
    assert epikv["part"].tolist() == ["prompt"] * 3 + ["generated"] * 6
    early = frames.kept(made_up_runs, step=7)
    assert early.groupby("policy").size().tolist() == [7, 7]
    assert early.set_index(["policy", "position"]).loc[("epikv", 4), "kept"] == 1
