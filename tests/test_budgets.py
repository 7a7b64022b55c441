"""Cost against budget: over traces, beside the control, and how it is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from epiviz import frames, plots


def grid(increase, policies=("random", "good", "odd"), shares=(0.25, 0.5), traces=4, seeds=2):
    """A grid's frame with ``increase(policy, share, trace, seed)`` as cost."""
    rows = [
        {
            "trace": f"t{trace}",
            "policy": policy,
            "budget": 100,
            "share": share + 0.001 * trace,
            "seed": seed,
            "n": 50,
            "bounded": policy != "free",
        }
        | {"nll_increase": (x := increase(policy, share, trace, seed)), "low": x - 0.1, "high": x + 0.2}
        for policy in policies
        for share in shares
        for trace in range(traces)
        for seed in range(seeds)
    ]
    full = {
        "trace": "t0",
        "bounded": False,
        "policy": "full",
        "budget": None,
        "share": None,
        "seed": 0,
        "nll_increase": 0.0,
    }
    return pd.DataFrame([*rows, full])


def cost(policy, share, trace, seed):
    base = {"random": 0.4, "good": 0.1, "odd": 0.4}[policy] * (1 - share)
    wobble = 0.01 * trace if policy != "odd" else 0.3 * (-1) ** trace
    return base + wobble + 0.001 * seed + (0.002 * trace**2 if policy == "good" else 0)


def test_curves_by_hand():
    cells = grid(cost)
    free = cells[cells["policy"] == "good"].assign(policy="free", bounded=False)
    table = frames.budget_curves(pd.concat([cells, free]))
    assert set(table["policy"]) == {"random", "good", "odd"} and sorted(set(table["share"])) == [0.25, 0.5]
    row = table.query("policy == 'good' and share == 0.25").iloc[0]
    values = np.array([np.mean([cost("good", 0.25, t, s) for s in range(2)]) for t in range(4)])
    beside = np.array([np.mean([cost("random", 0.25, t, s) for s in range(2)]) for t in range(4)])
    assert row["n"] == 4 and row["nll_increase"] == pytest.approx(values.mean())
    low, high = stats.t.interval(0.95, 3, values.mean(), values.std(ddof=1) / 2)
    assert (row["low"], row["high"]) == pytest.approx((low, high))
    assert row["difference"] == pytest.approx((values - beside).mean())
    assert row["p"] == pytest.approx(stats.ttest_rel(values, beside).pvalue)
    assert row["p_holm"] == pytest.approx(2 * row["p"])  # the smaller of two
    control = table.query("policy == 'random'")
    assert control["difference"].isna().all() and control["p_holm"].isna().all()


def test_one_trace_takes_over_the_interval_of_its_tokens():
    table = frames.budget_curves(grid(cost, traces=1, seeds=1))
    row = table.query("policy == 'good' and share == 0.5").iloc[0]
    assert (row["low"], row["high"]) == pytest.approx((row["nll_increase"] - 0.1, row["nll_increase"] + 0.2))
    assert np.isnan(row["difference_low"]) and np.isnan(row["p"]) and np.isfinite(row["difference"])


def test_no_budget_is_no_curve():
    with pytest.raises(ValueError, match="none of the 1 rows has a budget"):
        frames.budget_curves(grid(cost).tail(1))


def test_replays_under_other_limits_are_not_averaged_like_seeds():
    rows = grid(cost).assign(buffer=64)
    again = frames.budget_curves(pd.concat([rows, rows]))  # as two runs of a sweep may record the same replay
    pd.testing.assert_frame_equal(again, frames.budget_curves(rows))
    with pytest.raises(ValueError, match=r"96 replays .* not their limits, as random: buffer \[64, 1\]"):
        frames.budget_curves(pd.concat([rows, rows.assign(buffer=1)]))


def test_the_titles_tell_the_findings():
    table = frames.budget_curves(grid(cost))
    ax = plots.budget_curves(table)
    assert "At 25% of the text, good costs +0.10 nats per token, random +0.32" in ax.get_title("left").replace(
        "\n", " "
    )
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"random", "good", "odd"}
    ax = plots.against_control(table)
    title = ax.get_title("left").replace("\n", " ")
    assert title.startswith("1 of 2 policies cost clearly less than random at 25% of the text, 1 at 50%")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["good", "odd"]
    marked = [text.get_text() for text in ax.texts if "•" in text.get_text()]
    assert len(marked) == 2 and all(text.startswith("−") or text.startswith("-") for text in marked)
    with pytest.raises(ValueError, match="no policy 'random' to compare with"):
        plots.against_control(frames.budget_curves(grid(cost, policies=("good", "odd"))))


def test_differences_are_paired_and_marked():
    table = frames.budget_curves(grid(cost))
    ax = plots.differences(table)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["odd", "good"]
    title = ax.get_title("left").replace("\n", " ")
    assert (
        title.startswith("At 25% of the text 1 of 2 policies cost clearly less than random")
        and "lowest good, −0.2" in title
    )
    assert [text.xy[1] for text in ax.texts if text.get_text() == "•"] == [1]  # good is clear of random, odd is not
    good = table.query("policy == 'good' and share == 0.25").iloc[0]
    ends = ax.collections[1].get_segments()[0][:, 0]
    assert ends.tolist() == pytest.approx([good["difference_low"], good["difference_high"]])
    with pytest.raises(ValueError, match="no policy has a difference to 'random' at 30% of the text; .* 25%, 50%"):
        plots.differences(table, 0.3)


def test_recall_and_positions_are_told_and_drawn():
    rows = [("random", 0.6), ("good", 0.8), ("odd", 0.5)]
    table = pd.DataFrame(
        [
            {"policy": name, "recall": x, "low": x - 0.02, "high": x + 0.02, "worst_heads": x / 2, "n": 40}
            for name, x in rows
        ]
    )
    ax = plots.recall(table)
    assert (
        ax.get_title("left").replace("\n", " ") == "good still holds 80% of what the full model attends to, random 60%"
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["odd", "random", "good"]

    cells = grid(cost, policies=("random", "good"), shares=(0.5,), seeds=1)
    frozen = cells.assign(positions="cache-relative", nll_increase=cells["nll_increase"] + 1.0)
    both = pd.concat([cells.assign(positions="absolute"), frozen]).assign(buffer=64)
    modes = frames.position_modes(both)
    mean = cells[cells["policy"] == "good"]["nll_increase"].mean()
    told = modes.query("positions == 'cache-relative' and policy == 'good'").iloc[0]
    assert (told["n"], told["nll_increase"]) == (4, pytest.approx(mean + 1)) and told["low"] < told["nll_increase"]
    title = plots.position_modes(modes).get_title("left").replace("\n", " ")
    assert title.startswith("Evicting every 64, frozen positions cost +1.") and "(absolute: +0." in title


def measured(rows, traces=("a", "b")):
    """A frame of replays from (policy, share, slots, cost) that cost 0.02 more on each further trace."""
    return pd.DataFrame(
        [
            {"trace": trace, "policy": policy, "share": share, "bounded": policy != "full", "n": 40}
            | {"mean_slots": slots, "peak_slots": 2 * slots, "attended_slots": slots, "kv_mib": slots / 10}
            | {"state_mib": 1.0, "nll_increase": (x := cost + 0.02 * i), "low": x - 0.1, "high": x + 0.2}
            for policy, share, slots, cost in rows
            for i, trace in enumerate(traces)
        ]
    )


CELLS = [("full", None, 100, 0.0), ("good", 0.25, 30, 0.2), ("odd", 0.25, 30, 0.3), ("thrifty", 0.25, 20, 0.4),
         ("good", 0.5, 60, 0.1), ("odd", 0.5, 60, 0.1), ("wide", 0.5, 70, 0.15)]  # fmt: skip


def test_the_front_by_hand():
    table = frames.pareto(measured(CELLS))
    front = table[table["front"]]
    assert front["policy"].tolist() == ["thrifty", "good", "good", "odd", "full"]  # of two equal points both stay
    assert front["memory"].tolist() == [20, 30, 60, 60, 100]
    good = table.query("policy == 'good' and share == 0.25").iloc[0]
    assert (good["n"], good["nll_increase"], good["bounded"]) == (2, pytest.approx(0.21), True)
    low, high = stats.t.interval(0.95, 1, 0.21, 0.01)
    assert (good["low"], good["high"]) == pytest.approx((low, high))
    assert not table.query("policy == 'full'")["bounded"].item()
    everything = frames.pareto(measured(CELLS), "mib")
    assert everything.query("policy == 'thrifty'")["memory"].item() == pytest.approx(3.0)
    alone = frames.pareto(measured(CELLS, "a")).query("policy == 'thrifty'").iloc[0]
    assert (alone["low"], alone["high"]) == pytest.approx((0.3, 0.6))


def test_points_of_other_texts_are_not_compared():
    cells = measured(CELLS)
    with pytest.raises(ValueError, match="wide at 50% of the text was replayed on 1 of 2 traces"):
        frames.pareto(cells.drop(cells.index[-1]))
    with pytest.raises(ValueError, match="memory must be one of mean_slots, .* got 'bytes'"):
        frames.pareto(cells, "bytes")
    with pytest.raises(ValueError, match="no rows"):
        frames.pareto(cells[:0])


def test_the_front_is_drawn_and_told():
    table = frames.pareto(measured(CELLS))
    ax = plots.pareto(table)
    title = ax.get_title("left").replace("\n", " ")
    assert title == (
        "By their means nothing beats 5 of 7 points, from thrifty (20 slots held, +0.41 nats) "
        "to full (100 slots held, +0.01 nats)"
    )
    steps = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
    assert steps.get_xdata().tolist() == [20, 30, 60, 60, 100]
    assert "2 others" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert "mean of 2 traces" in ax.get_ylabel()
    figure = plots.pareto_hover(table)
    points = {trace.name: trace for trace in figure.data if trace.mode == "markers"}
    assert set(points) == {"full", "good", "odd", "thrifty", "wide"}
    assert list(points["good"].x) == [30, 60] and points["full"].marker.symbol[0].endswith("-open")
    assert "no budget" in points["full"].hovertext[0]
    assert points["good"].hovertext[0].split("<br>") == [
        "<b>good</b>",
        "budget 25% of the text",
        "30.0 slots held",
        "costs +0.21 [+0.08, +0.34] nats per token",
        "replays of 2 traces",
    ]
