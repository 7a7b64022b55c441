"""Calibration of ThinKV: sparsities of a text, valleys of a density, the command, and what is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracle import attention_weights
from tiny import random_prompt, tiny_model
from typer.testing import CliRunner

import epiviz as ev
from epiviz import calibration, policies
from epiviz.cli import app
from epiviz.policies import Budget, thinkv


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def trace(model):
    return ev.record(model, random_prompt(21), tokens=random_prompt(160, 9), progress=False)


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EPIVIZ_CACHE", str(tmp_path))
    return tmp_path / thinkv.FILE


def test_valleys_of_three_clear_modes():
    random = np.random.default_rng(0)
    three = np.concatenate([random.normal(mean, 0.03, 400) for mean in (0.2, 0.5, 0.8)])
    found = calibration.find_valleys(three)
    assert found.bandwidth == 1 and found.depth > 0.8
    assert found.low == pytest.approx(0.35, abs=0.03) and found.high == pytest.approx(0.65, abs=0.03)


def test_modes_that_hold_next_to_nothing_do_not_count():
    random = np.random.default_rng(0)
    two = np.concatenate([random.normal(0.3, 0.03, 500), random.normal(0.6, 0.03, 500)])
    outliers = np.concatenate([two, np.full(20, 0.95)])
    found = calibration.find_valleys(outliers)
    assert found is None or found.bandwidth < 0.8
    assert calibration.find_valleys(np.full(50, 0.4)) is None


def test_recorded_sparsities_are_those_of_eager_attention(model, trace):
    n = len(trace)
    causal = np.broadcast_to(np.tril(np.ones((n, n), dtype=bool)), (4, 2, n, n))
    weights = attention_weights(model, trace.tokens.tolist(), causal).numpy()
    found = calibration.sparsities(model, trace)
    assert found.shape == (4, n - trace.prompt_length)
    for layer, token in [(0, 21), (2, 100), (3, n - 1)]:
        rows = weights[layer, :, token, : token + 1]
        share = (rows < 0.01 * rows.max(-1, keepdims=True)).mean()
        assert found[layer, token - trace.prompt_length] == pytest.approx(share, abs=1e-12)


def test_the_command_calibrates_a_model(model, trace, no_cache, monkeypatch, tmp_path):
    """It writes what the policy then goes by, and the printed name says that it is not what is shipped."""
    monkeypatch.setattr(ev, "load", lambda name: model, raising=False)
    file = trace.save(tmp_path / "text.safetensors")
    result = CliRunner().invoke(app, ["calibrate", "thinkv", str(file), "--model", model.name])
    assert result.exit_code == 0, result.output
    assert "execution below" in result.output and str(no_cache) in result.output
    entry = json.loads(no_cache.read_text(encoding="utf-8"))[model.name]
    assert entry["depth"] == 4 and 0 < entry["low"] < entry["high"] < 1
    assert entry["made_from"]["traces"] == {trace.name: trace.fingerprint}
    assert sum(entry["made_from"]["shares"].values()) == pytest.approx(1, abs=0.002)
    thresholds = policies.get("thinkv", thresholds="calibrated").for_model(model.shape).thresholds
    assert (thresholds.layers, thresholds.low) == (tuple(entry["layers"]), entry["low"])
    run = ev.generate(model, random_prompt(30), "thinkv", Budget(40, 2, 6, 10), 20, progress=False)
    assert run.policy == f"thinkv(thresholds={thresholds})"
    no_cache.write_text("{")
    with pytest.raises(ValueError, match="holds no thresholds .* remove it"):
        policies.get("thinkv").for_model(model.shape)


def test_the_command_says_what_is_wrong(model, no_cache, monkeypatch, tmp_path):
    monkeypatch.setattr(ev, "load", lambda name: model, raising=False)
    result = CliRunner().invoke(app, ["calibrate", "thinkv", str(tmp_path / "none.safetensors")])
    assert result.exit_code == 2 and "there is no trace file" in result.output
    short = ev.record(model, random_prompt(3), tokens=[1, 2], progress=False).save(tmp_path / "short.safetensors")
    result = CliRunner().invoke(app, ["calibrate", "thinkv", str(short)])
    assert result.exit_code == 2 and "no three modes in any of the 4 layers" in result.output
    assert not no_cache.exists()


def test_what_is_shipped_was_made_from_the_shipped_traces():
    for name, entry in json.loads(thinkv.SHIPPED.read_text(encoding="utf-8")).items():
        folder = Path(__file__).parents[1] / "data" / "traces"
        traces = [ev.Trace.load(folder / f"{trace}.safetensors") for trace in entry["made_from"]["traces"]]
        assert entry["made_from"]["traces"] == {trace.name: trace.fingerprint for trace in traces}, name
        assert entry["made_from"]["tokens"] == sum(len(trace) - trace.prompt_length for trace in traces)
        assert set(entry["made_from"]["valleys"]) == set(map(str, entry["layers"]))
        assert entry["made_from"]["command"].startswith("epiviz calibrate thinkv data/traces/")
