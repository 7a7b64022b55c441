"""Benchmarks measure what they say; nothing here asserts a time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import random_prompt, tiny_model
from typer.testing import CliRunner

import epiviz as ev
from epiviz import bench, cli, policies
from epiviz.bench import replay as replay_bench


def test_bench_replay_measures_and_writes(tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    monkeypatch.setattr(ev, "load", lambda name: model, raising=False)
    path = ev.record(model, random_prompt(20), tokens=random_prompt(150, 9), name="t", progress=False).save(
        tmp_path / "t.safetensors"
    )
    out = tmp_path / "new" / "replay.json"
    arguments = ["bench", "replay", "--trace", str(path), "--budget", "80", "--policy", "snapkv", "--out", str(out)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["tokens"] == 170 and found["budget"]["total"] == 80 and found["noise_floor"]["top1"] == 1
    assert found["environment"]["dtype"] == "float64" and "torch" in found["environment"]["versions"]
    one = found["policies"]["snapkv"]
    assert one["speedup"] == pytest.approx(one["stepping"] / one["replay"])
    assert one["largest_nll_difference"] < 1e-5
    told = one["decisions"]
    assert told["noise"] < 1e-6
    assert told == {"decisions": 8, "differing": 0, "share": 0.0, "margin": 0.0, "noise": told["noise"]}


def test_stepping_is_what_a_replay_says():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(20), tokens=random_prompt(100, 9), progress=False)
    budget = ev.Budget(40, sinks=2, recent=8, buffer=8)
    retention, nll = bench.step(model, trace, policies.get("epikv"), budget)
    found = ev.replay(model, trace, "epikv", budget, progress=False)
    assert np.array_equal(retention.death, found.retention.death)
    assert nll == pytest.approx(found.nll[found.predicted], abs=1e-5)


def test_differences_are_told_by_hand():
    """Two heads, two of four slots kept: the second head swaps slots 1 and 2, 0.25 apart."""
    nan = np.nan
    slow = np.array([[[1.0, 2.0, 3.0, 4.0], [9.0, 1.25, 1.0, nan]]]), np.array([[[0, 0, 1, 1], [1, 1, 0, 0]]]) == 1
    fast = np.array([[[1.0, 2.0, 3.0, 4.5], [9.0, 1.0, 1.25, nan]]]), np.array([[[0, 0, 1, 1], [1, 0, 1, 0]]]) == 1
    told = bench.compare_decisions([[slow]], [[fast]])
    assert (told["decisions"], told["differing"], told["share"]) == (2, 1, 0.5)
    assert told["noise"] == pytest.approx(0.5 / np.std([1, 2, 3, 4]))
    assert told["margin"] == pytest.approx(0.25 / np.std([9, 1, 1.25]))
    again = bench.compare_decisions([[slow, slow]], [[fast, fast]])
    assert again["differing"] == 1, "what a second choice does after another first one is no decision of its own"


@pytest.mark.parametrize("name", ["epikv", "vase-attnv"])
def test_a_replay_may_be_led_through_the_history_of_stepping(name):
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(20), tokens=random_prompt(100, 9), progress=False)
    budget, policy = ev.Budget(40, sinks=2, recent=8, buffer=8), policies.get(name)
    stepped, _ = bench.step(model, trace, policy, budget)
    led = replay_bench._Witness(policies.get("random"), follow=stepped)
    assert np.array_equal(ev.replay(model, trace, led, budget, progress=False).retention.death, stepped.death)
    mine = [replay_bench._Witness(policy), replay_bench._Witness(policy, follow=stepped)]
    for witness in mine:
        ev.replay(model, trace, witness, budget, progress=False)
    told = bench.compare_decisions(*(witness.seen for witness in mine))
    assert told["decisions"] > 8 and told["differing"] == 0 and told["noise"] < 1e-9


def test_a_long_trace_has_the_length_it_was_asked_for(smollm2):
    trace = bench.long_trace(smollm2, 150)
    assert len(trace) == 150 and trace.prompt_length == 64
