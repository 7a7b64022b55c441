"""Frames and figures of evaluations, on texts made up so that every number is known."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import epiviz as ev
from epiviz import frames, plots, stats


def texts(policy, budget, solved, evicted=None, *, protect=False, seed=0, outcome="wrong", positions="absolute"):
    """One row per problem; ``solved`` and ``evicted`` say of which."""
    n = len(solved)
    evicted = [budget is not None] * n if evicted is None else evicted
    return pd.DataFrame(
        {
            "problem": [f"p{index}" for index in range(n)],
            "sample": 0,
            "policy": policy,
            "budget": np.nan if budget is None else float(budget),
            "protect_prompt": pd.array([protect if budget else None] * n, dtype="boolean"),
            "positions": positions,
            "seed": seed,
            "outcome": ["correct" if right else outcome for right in solved],
            "correct": np.array(solved, dtype=bool),
            "evicted": pd.array(evicted, dtype="boolean"),
            "tokens": pd.array(range(100, 100 + n), dtype="Int64"),
            "mean_slots": 50.0,
            "kv_mib": 1.0,
            "state_mib": 0.1,
            "bounded": budget is not None,
            "seconds": 0.5,
        }
    )


ALL, HALF, NONE = [1] * 20, [1] * 10 + [0] * 10, [0] * 20
FRAME = pd.concat(
    [
        texts("full", None, [1] * 19 + [0]),
        texts("random", 64, HALF, seed=0),
        texts("random", 64, [1] * 6 + [0] * 14, seed=1),
        texts("random", 64, [1] * 16 + [0] * 4, protect=True),
        texts("epikv", 64, [1] * 18 + [0] * 2, [0] * 8 + [1] * 12, outcome="length"),
        texts("streaming", 64, NONE, outcome="loop"),
        texts("random", 128, ALL),
        texts("epikv", 128, ALL),
    ],
    ignore_index=True,
)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def row(table, policy, budget, protect=False):
    found = table[(table["policy"] == policy) & (table["protect_prompt"] == protect)]
    return found[found["budget"].isna() if budget is None else found["budget"] == budget].iloc[0]


def test_accuracy_of_each_condition():
    table = frames.accuracy(FRAME)
    assert len(table) == 7 and table["n"].sum() == len(FRAME)
    full = row(table, "full", None)
    expected = stats.wilson(19, 20)
    assert (full["accuracy"], full["low"], full["high"]) == (expected.value, expected.low, expected.high)
    assert full["n_evicted"] == 0 and np.isnan(full["accuracy_evicted"])
    random = row(table, "random", 64)
    assert (random["accuracy"], random["n"], random["problems"], random["seeds"]) == (0.4, 40, 20, 2)
    two = FRAME[(FRAME["policy"] == "random") & (FRAME["budget"] == 64) & ~FRAME["protect_prompt"].fillna(False)]
    clustered = stats.accuracy(two["correct"], two["problem"])
    assert (random["low"], random["high"]) == pytest.approx((clustered.low, clustered.high))


def test_accuracy_among_texts_that_evicted_has_the_full_cache_on_the_same_problems():
    found = row(frames.accuracy(FRAME), "epikv", 64)
    assert (found["evicted"], found["n_evicted"]) == (0.6, 12)
    assert found["accuracy_evicted"] == pytest.approx(10 / 12)
    assert found["full_evicted"] == pytest.approx(11 / 12), "p8 to p19, of which the full cache fails p19"
    assert found["accuracy"] == 0.9


def test_errors_are_counted_and_nothing_else():
    frame = texts("epikv", 64, HALF)
    frame.loc[15:, "outcome"] = "error"
    found = frames.accuracy(frame).iloc[0]
    assert (found["accuracy"], found["errors"], found["n"]) == (10 / 15, 5, 20)


def test_code_is_no_error_and_has_no_accuracy():
    frame = pd.concat([texts("full", None, HALF), texts("epikv", 64, HALF, outcome="length")])
    frame.loc[frame["outcome"].isin(["correct", "wrong"]), ["outcome", "correct"]] = "ungraded", False
    table = frames.accuracy(frame)
    assert table["accuracy"].isna().all() and table["accuracy_evicted"].isna().all() and not table["errors"].any()
    assert table["evicted"].tolist() == [0, 1]
    for function in (frames.pass_at_k, frames.seed_spreads, lambda frame: frames.paired_accuracy(frame, "full")):
        with pytest.raises(ValueError, match="texts are code, which is not graded here"):
            function(frame)


def test_a_text_counts_once():
    wide, narrow = (texts("epikv", 64, HALF).assign(recent=recent) for recent in (4, 16))
    with pytest.raises(
        ValueError, match="40 texts of epikv are of the same problem, sample and seed, and differ in rec"
    ):
        frames.accuracy(pd.concat([wide, narrow]))
    for function in (frames.outcomes, frames.pass_at_k, frames.seed_spreads):
        with pytest.raises(ValueError, match="choose the rows that belong together"):
            function(pd.concat([wide, wide]))


def test_differences_are_paired_by_problem_under_the_same_limit():
    table = frames.paired_accuracy(FRAME)
    assert set(zip(table["policy"], table["budget"], strict=True)) == {
        ("epikv", 64.0), ("streaming", 64.0), ("epikv", 128.0)
    }  # fmt: skip
    epikv = row(table, "epikv", 64)
    assert epikv["difference"] == pytest.approx(0.9 - 0.4) and epikv["n"] == 20
    control = np.array([1] * 6 + [0.5] * 4 + [0] * 10)
    own = np.array([1] * 18 + [0] * 2)
    alone = stats.paired_difference(own, control)
    assert (epikv["low"], epikv["high"], epikv["p"]) == (alone.estimate.low, alone.estimate.high, alone.p)
    assert epikv["compared"] == 2 and epikv["p_holm"] >= epikv["p"]
    same = row(table, "epikv", 128)
    assert (same["difference"], same["p"], same["compared"]) == (0, 1, 1)
    assert len(frames.paired_accuracy(FRAME, control="full")) == 6
    with pytest.raises(ValueError, match="no policy 'h2o' to compare with"):
        frames.paired_accuracy(FRAME, control="h2o")


def test_outcomes_add_up_to_one():
    table = frames.outcomes(FRAME)
    sums = table.groupby(["policy", "budget", "protect_prompt"], dropna=False)["share"].sum()
    assert sums.tolist() == pytest.approx([1] * len(sums))
    assert list(dict.fromkeys(table["outcome"])) == ["loop", "length", "correct", "wrong"]
    streaming = table[(table["policy"] == "streaming") & (table["outcome"] == "loop")].iloc[0]
    assert (streaming["count"], streaming["n"]) == (20, 20)


def test_seeds_of_a_stochastic_policy():
    (found,) = frames.seed_spreads(FRAME).to_dict("records")
    assert (found["policy"], found["seeds"], found["problems"]) == ("random", 2, 20)
    assert (found["lowest"], found["highest"]) == (0.3, 0.5)
    assert found["seed_sd"] == pytest.approx(np.sqrt(4 * 0.5 / 20 / 20))


def test_pass_at_k_of_two_seeds():
    two = FRAME[(FRAME["policy"] == "random") & (FRAME["budget"] == 64) & (FRAME["protect_prompt"] == False)]  # noqa: E712
    table = frames.pass_at_k(two, k=(1, 2)).set_index("k")
    assert table["pass_at_k"].tolist() == pytest.approx([0.4, 0.5])
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        frames.pass_at_k(two, k=(3,))


def test_pass_at_k_stays_a_share_and_says_nothing_of_errors_alone():
    most = pd.concat([texts("random", 64, [1] * 19 + [0], seed=seed) for seed in (0, 1)])
    assert frames.pass_at_k(most)["high"].tolist() == [1]
    failed = most.assign(outcome="error")
    (found,) = frames.pass_at_k(failed).to_dict("records")
    assert (found["n"], found["samples"]) == (0, 0) and np.isnan(found["pass_at_k"])


def test_empty_frames_are_refused():
    for function in (frames.accuracy, frames.outcomes, frames.paired_accuracy):
        with pytest.raises(ValueError, match="no rows"):
            function(FRAME.head(0))


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def title(ax):
    return ax.get_title(loc="left").replace("\n", " ")


def test_every_accuracy_panel_has_the_full_cache_and_the_protected_control():
    table = frames.accuracy(FRAME)
    ax = plots.accuracy(table, ["epikv"])
    assert {"full cache", "random", "random, prompt protected", "epikv"} <= set(labels(ax))
    assert title(ax) == (
        "On average over 2 budgets, prompt not protected, epikv solves 95%, random 70%, the full cache 95%"
    )
    protected = plots.accuracy(table, protect_prompt=True)
    assert {"full cache", "random, prompt protected"} <= set(labels(protected))
    with pytest.raises(ValueError, match="protect_prompt=True"):
        plots.accuracy(frames.accuracy(FRAME[FRAME["protect_prompt"] != True]), protect_prompt=True)  # noqa: E712


def test_over_budgets_a_problem_is_one_cluster_and_only_common_budgets_count():
    more = pd.concat([FRAME, texts("knorm", 64, NONE), texts("knorm", 128, ALL)])
    more = more[(more["policy"] != "streaming") & ~((more["policy"] == "random") & (more["seed"] == 1))]
    lonely = pd.concat([more, texts("epikv", 256, ALL)])  # the others were not run at 256
    table = frames.accuracy_over_budgets(lonely[lonely["protect_prompt"] != True])  # noqa: E712
    found = row(table, "epikv", None)
    assert table.attrs["budgets"] == [64, 128]
    assert (found["n"], found["problems"], found["accuracy"]) == (40, 20, 0.95)
    expected = ev.stats.accuracy([1] * 18 + [0] * 2 + ALL, [*range(20), *range(20)])
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    both = frames.accuracy_over_budgets(lonely)
    assert both.attrs["budgets"] == [64], "random was not run at 128 with a protected prompt"
    assert row(both, "random", None, protect=True)["accuracy"] == 0.8 and row(both, "epikv", None)["n"] == 20
    assert row(both, "full", None)["n"] == 20
    with pytest.raises(ValueError, match="no budget was run by all of epikv, random"):
        frames.accuracy_over_budgets(pd.concat([texts("random", 64, ALL), texts("epikv", 128, ALL)]))


def test_paired_differences_say_how_many_stand():
    ax = plots.paired_accuracy(frames.paired_accuracy(FRAME))
    assert title(ax).startswith("1 of 2 policies solve clearly more than random at 64 slots, 1 fewer")
    with pytest.raises(ValueError, match="budget 32; there are"):
        plots.paired_accuracy(frames.paired_accuracy(FRAME), budget=32)


def test_outcomes_name_the_worst():
    ax = plots.outcomes(frames.outcomes(FRAME))
    assert "most streaming (100%, mainly loop)" in title(ax)
    assert "give no answer that counts" in title(ax)
    bars = {bar.get_label(): sum(patch.get_width() for patch in bar) for bar in ax.containers}
    assert sum(bars.values()) == pytest.approx(4), "full, random, epikv, streaming"


def test_conditional_accuracy_names_the_gap():
    ax = plots.evicted_accuracy(frames.accuracy(FRAME))
    assert title(ax) == "At 64 slots, texts that never evict raise a policy's accuracy by up to 7 points"


def test_variants_are_drawn_beside_the_full_cache():
    variants = pd.concat([FRAME, texts("epikv", 64, NONE, positions="cache-relative")])
    ax = plots.accuracy_at(frames.accuracy(variants))
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert "epikv, cache-relative" in names and "epikv, absolute" in names
    assert "from 0%" in title(ax) and "to 90% (epikv, absolute)" in title(ax)


def test_published_curves_have_a_panel_of_their_own():
    frame = ev.published(withdrawn=False)
    math = frame[(frame["paper"] == "epikv") & (frame["task"] == "math500") & (frame["table"] == "Table 3")]
    ax = plots.published_accuracy(math)
    assert "Published by epikv (DeepSeek-R1-Distill-Llama-8B, math500): at 512 slots" in title(ax)
    with pytest.raises(ValueError, match="one task is needed"):
        plots.published_accuracy(frame[(frame["paper"] == "epikv") & (frame["unit"] == "%")])
    with pytest.raises(ValueError, match="several numbers at budget"):
        plots.published_accuracy(pd.concat([math, math]))
