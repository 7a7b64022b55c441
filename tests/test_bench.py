"""Benchmarks measure what they say; nothing here asserts a time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import random_prompt, tiny_model
from typer.testing import CliRunner

import epiviz as ev
from epiviz import bench, cli, policies
from epiviz.retention import Retention


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
    assert one["decisions"] == {
        "heads": 8, "differing": 0, "decisions": 8, "share": 0.0, "margin": 0.0,
        "noise": one["decisions"]["noise"],
    }  # fmt: skip
    assert one["decisions"]["noise"] < 1e-6


def test_stepping_is_what_a_replay_says():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(20), tokens=random_prompt(100, 9), progress=False)
    budget = ev.Budget(40, sinks=2, recent=8, buffer=8)
    retention, nll = bench.step(model, trace, policies.get("epikv"), budget)
    found = ev.replay(model, trace, "epikv", budget, progress=False)
    assert np.array_equal(retention.death, found.retention.death)
    assert nll == pytest.approx(found.nll[found.predicted], abs=1e-5)


def test_a_first_difference_is_told_by_hand():
    """Two heads, one event of 4 slots that drops one: the second head swaps slots 1 and 2, 0.25 apart."""
    death = np.array([[[0, 1, 1, 1], [1, 0, 1, 1]]], dtype=np.int32)
    other = np.array([[[0, 1, 1, 1], [1, 1, 0, 1]]], dtype=np.int32)
    histories = [Retention(np.array([4]), each, np.zeros_like(each, dtype=np.uint8), 0) for each in (death, other)]
    slow = np.array([[[1.0, 2.0, 3.0, 4.0], [9.0, 1.0, 1.25, 5.0]]])
    fast = np.array([[[1.0, 2.0, 3.0, 4.5], [9.0, 1.25, 1.0, 5.0]]])
    told = bench.compare_decisions(*histories, [slow], [fast])
    assert (told["heads"], told["differing"], told["decisions"], told["share"]) == (2, 1, 2, 0.5)
    assert told["noise"] == pytest.approx(0.5 / np.std([1, 2, 3, 4]))
    assert told["margin"] == pytest.approx(0.25 / np.std([9, 1, 1.25, 5]))


def test_a_long_trace_has_the_length_it_was_asked_for(smollm2):
    trace = bench.long_trace(smollm2, 150)
    assert len(trace) == 150 and trace.prompt_length == 64
