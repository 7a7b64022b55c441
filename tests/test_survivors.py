"""Frames and figures of survivors, on histories and numbers that are known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from histories import simulate
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import frames, lifetimes, plots, stats
from epiviz.diversity import MEASURES, Diversity, DiversityRecorder
from epiviz.inclusion import inclusion
from epiviz.policies.base import Budget
from epiviz.retention import Retention
from epiviz.text import join_bytes

BUDGET = Budget(40, sinks=2, recent=8, buffer=8).resolve(20, 99)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def title(ax):
    return ax.get_title(loc="left").replace("\n", " ")


@pytest.fixture
def trace(synthetic_trace):
    pieces = [b"7", b" so", b" stone", b" word"]
    return replace(synthetic_trace, spans=join_bytes([pieces[index % 4] for index in range(len(synthetic_trace))]))


def picky(trace, favoured):
    """A replay that never evicts a favoured token as long as there are others."""
    tokens, steps = len(trace) - 1, []
    death, held = np.zeros((2, 1, tokens), dtype=np.int32), list(range(20))
    for step in range(20, tokens + 1):
        if len(held) >= BUDGET.peak:
            choice = [token for token in held if BUDGET.front <= token < step - BUDGET.recent]
            choice.sort(key=lambda token: (favoured[token], token))
            for token in choice[: len(held) - BUDGET.total]:
                death[:, 0, token] = len(steps)
                held.remove(token)
            steps.append(step)
        held.append(step)
    death[:, 0, [token for token in held if token < tokens]] = len(steps)
    history = Retention(np.array(steps), death, np.zeros_like(death, np.uint8), 20)
    return SimpleNamespace(policy="picky", retention=history, budget=BUDGET, trace=trace)


@pytest.fixture
def replays(trace):
    numbers = np.arange(120) % 4 == 0
    made = [simulate(seed, 119, 2, 20, BUDGET, 20, (0, 1)).history for seed in (1, 2)]
    random = [SimpleNamespace(policy=f"random{i}", retention=h, budget=BUDGET, trace=trace) for i, h in enumerate(made)]
    mine = picky(trace, numbers)
    mine.retention = replace(mine.retention, death=mine.retention.death.repeat(20, 1), reason=made[0].reason)
    return [mine, *random]


def test_survival_finds_the_favoured_class_and_leaves_chance_alone(replays):
    frame = frames.survival(replays, draws=200).set_index(["policy", "group"])
    assert frame.loc[("picky", "number"), "low"] > 0.2
    assert frame.loc[("picky", "other"), "high"] < 0
    for policy in ("random0", "random1"):
        rows = frame.loc[policy]
        assert (rows["kept"] - rows["expected"]).abs().max() < 0.1
        assert rows["excess"].tolist() == pytest.approx((rows["kept"] - rows["expected"]).tolist())
    assert frame["tokens"].groupby("policy").sum().unique().tolist() == [len(range(2, 112 - 8))]


def test_survival_by_a_label_and_at_a_step(replays):
    label = np.arange(120) % 2 == 0
    frame = frames.survival(replays[1:2], label, step=100, draws=50)
    assert frame["group"].tolist() == [False, True]
    found = lifetimes.survival(replays[1].retention, label, BUDGET, 100)
    assert frame["kept"].tolist() == pytest.approx(found.kept.mean((1, 2)).tolist())
    assert frame["tokens"].tolist() == found.tokens.tolist()
    never = SimpleNamespace(
        policy="full", budget=None, trace=replays[0].trace, retention=replace(
            replays[0].retention, event_steps=np.array([]), death=np.zeros_like(replays[0].retention.death)
        )
    )  # fmt: skip
    assert len(frames.survival([never])) == 0


def test_the_survival_figure_names_the_clearest_class(replays):
    frame = frames.survival(replays, draws=200)
    ax = plots.survival(frame)
    assert "picky keeps" in title(ax) and "chance" in title(ax)
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels[-1].startswith("other (") and labels[-1].split("\n")[1].startswith("chance ")
    dots = next(line for line in ax.lines if line.get_label() == "picky")
    assert sorted(dots.get_xdata()) == pytest.approx(sorted(frame[frame["policy"] == "picky"]["excess"]))
    unclear = frame.assign(low=-1, high=1)
    assert title(plots.survival(unclear)) == f"0 of {len(frame)} kept shares differ clearly from chance"


def test_overlap_of_contested_tokens_and_chance(replays):
    everything, table = frames.overlap(replays), frames.overlap(replays, contested=True)
    assert everything.index.tolist() == ["picky", "random0", "random1"]
    assert table.index.tolist() == [*everything.index, "chance"]
    assert (np.diag(table) == 1).all() and np.allclose(table, table.T)
    assert (everything.loc["picky", "random0"] > table.loc["picky", "random0"]).all()
    among = lifetimes.contested(replays[0].retention, BUDGET)
    a, b = (each.retention.alive(119)[:, :, among] for each in replays[1:])
    assert table.loc["random0", "random1"] == pytest.approx(((a & b).sum(-1) / (a | b).sum(-1)).mean())
    assert table.loc["random0", "random1"] == pytest.approx(table.loc["random0", "chance"], abs=0.03)
    ax = plots.overlap(table)
    assert "a random draw: 0." in title(ax) and "chance" not in title(ax)


def test_overlap_counts_only_layers_that_evict(replays):
    hybrid = [replace(each.retention, evicts=(1,)) for each in replays[1:]]
    pair = [SimpleNamespace(policy=str(i), retention=h, budget=BUDGET) for i, h in enumerate(hybrid)]
    a, b = (each.alive(119)[1] for each in hybrid)
    assert frames.overlap(pair).loc["0", "1"] == pytest.approx(((a & b).sum(-1) / (a | b).sum(-1)).mean())


def test_lifetimes_leave_out_what_is_protected_for_ever(replays):
    frame = frames.lifetimes(replays[:1])
    own = np.arange(119) >= BUDGET.front
    curve = lifetimes.survival_curve(lifetimes.lifetimes(replays[0].retention), own)
    assert frame["held"].tolist() == curve.tolist()
    assert frame.loc[frame["held"] < 1, "age"].min() >= BUDGET.recent
    assert len(frames.lifetimes(replays, np.arange(120) == 5)) > 0
    both = frames.lifetimes(replays)
    medians = both[both["held"] <= 0.5].groupby("policy")["age"].min()
    ax = plots.lifetimes(both)
    assert f"{medians.min()} (" in title(ax) and f"{medians.max()} (" in title(ax)
    assert title(plots.lifetimes(both.assign(held=0.9))).startswith("More than half")


def made_up_diversity(level):
    measures = {name: np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 100 + level for name in MEASURES}
    return Diversity(np.array([50, 60, 70]), np.array([30, 30, 30]), measures)


def test_diversity_is_one_row_for_each_head_and_event():
    frame = frames.diversity({"random": made_up_diversity(0.2), "epikv": made_up_diversity(0.3)})
    assert len(frame) == 2 * 3 * 2 * 2 and set(MEASURES) <= set(frame.columns)
    row = frame[(frame["policy"] == "epikv") & (frame["event"] == 2) & (frame["layer"] == 1) & (frame["head"] == 0)]
    assert row["key_cosine"].item() == pytest.approx(0.4) and row["step"].item() == 70
    for measure in MEASURES:
        line = plots.diversity(frame, measure).lines[-1]
        assert line.get_ydata() == pytest.approx([0.1] * 3, abs=1e-6)
    assert "0.255 under random, from 0.355 (epikv)" in title(plots.diversity(frame))
    with pytest.raises(ValueError, match="no policy 'snapkv' to compare with, only random, epikv"):
        plots.diversity(frame, control="snapkv")


@pytest.mark.parametrize("read, total", [(60, 90), (45, 40)])
def test_where_nothing_was_evicted_the_figures_say_so(read, total):
    """A roomy budget, and one that is cut at the last token, after which no query comes."""
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(12), tokens=random_prompt(read, 3), progress=False)
    budget, recorder = ev.Budget(total, sinks=2, recent=8, buffer=16), DiversityRecorder()
    names = ["random", "snapkv"]
    replays = [ev.replay(model, trace, name, budget, on_event=recorder, progress=False) for name in names]
    recalled = ev.attention_recall(model, trace, replays, progress=False)
    ax = plots.recall(frames.recall(replays, recalled))
    assert title(ax) == "Attention that is still held: nothing was evicted"
    if total == 90:
        assert "nothing was evicted" in title(plots.survival(frames.survival(replays)))
        assert "nothing was evicted" in title(plots.diversity(frames.diversity({"random": recorder.result()})))
    only = pd.DataFrame([{"policy": "random", "recall": 0.5, "low": 0.4, "high": 0.6, "worst_heads": 0.2, "n": 9}])
    assert title(plots.recall(only)) == "Attention that is still held"


def test_the_inclusion_figure_counts_tokens_below_the_bound():
    found = inclusion(np.exp(np.random.default_rng(0).normal(size=30)), 10, seeds=200)
    frame = frames.inclusion(found)
    assert frame["share"].is_monotonic_decreasing and frame["share"].sum() == pytest.approx(1)
    assert frame.set_index("token")["exact"][4] == found.exact[4]
    assert title(plots.inclusion(frame)).startswith("10 of 30 drawn, 200 seeds: 0 tokens below the bound")
    assert ": 30 tokens below" in title(plots.inclusion(frame.assign(high=-1)))


def test_a_bootstrap_in_parts_is_the_same(monkeypatch):
    x = np.random.default_rng(0).normal(size=50)
    member = x > 0
    whole = stats.mean_interval(x, member, draws=101)
    monkeypatch.setattr(stats.series, "AT_ONCE", 77)
    assert stats.mean_interval(x, member, draws=101) == whole
    assert whole.value == pytest.approx(x[member].mean()) and whole.low < whole.value < whole.high
    index = stats.series._indices(*stats.series._block_starts(50, stats.BLOCK, 101, seed=0), 50)
    by_hand = np.percentile([x[i][member[i]].mean() for i in index], [2.5, 97.5])
    assert (whole.low, whole.high) == pytest.approx(tuple(by_hand))
    assert np.isnan(stats.mean_interval(x, np.zeros(50, bool)).value)
    with pytest.raises(ValueError, match="one entry per token"):
        stats.mean_interval(x, member[1:])
