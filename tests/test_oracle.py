"""Logits under the evicting cache equal a full pass with the mask of what was kept; and what is not equal fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import deviation, evicting_run
from tiny import random_prompt, tiny_model

import epiviz as ev

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)
NEW = 200
POLICIES = ev.policies.names()
CONFIGS = [("llama", 4, 2), ("llama", 1, 1), ("llama", 8, 1), ("qwen3", 4, 2), ("qwen3", 1, 1), ("qwen3", 8, 1)]
REPRESENTATIVES = ["full", "random", "streaming", "epikv", "vase-attnv", "vase-dkv"]
CELLS = [
    (policy, *config)
    for policy in POLICIES
    for config in CONFIGS
    if policy in REPRESENTATIVES or config == ("qwen3", 4, 2)
]
UNBOUNDED = ["full", "lagkv-ratio", "snapkv-prefill"]  # memory grows with the text, and the meter says so
PROMPTS = {"single": [30], "batch": [12, 57, 102]}  # the batch's prompts differ by 90 tokens


def prompts(kind):
    return [random_prompt(length, seed) for seed, length in enumerate(PROMPTS[kind])]


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("policy, architecture, heads, kv_heads", CELLS)
def test_evicting_cache_equals_masked_full_pass(policy, architecture, heads, kv_heads, kind):
    model = tiny_model(architecture, heads, kv_heads)
    length = NEW if policy in REPRESENTATIVES else 90
    for row in evicting_run(model, prompts(kind), policy, BUDGET, length):
        assert len(row.tokens) == length
        assert deviation(model, row) <= 1e-9
        assert row.meter.bounded == (policy not in UNBOUNDED)
        if policy in UNBOUNDED:
            continue  # their evictions have tests of their own
        assert row.retention.events >= 3
        assert (row.retention.death < row.retention.events).any()
        assert row.meter.peak_slots <= 48


@pytest.mark.parametrize("kind", ["batch"])
@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "phi3", "smollm3", "gemma3"])
@pytest.mark.parametrize("policy", ["random", "epikv", "vase-attnv", "h2o", "rkv", "epikv-lag"])
def test_other_architectures(policy, architecture, kind):
    """The hybrid's sliding layers keep their window and never evict; its norms round to float32."""
    model = tiny_model(architecture)
    for row in evicting_run(model, prompts(kind), policy, BUDGET, 80):
        assert deviation(model, row) <= (1e-4 if architecture == "gemma3" else 1e-9)
        assert row.retention.events >= 3
        evicted = (row.retention.death < row.retention.events).any(axis=(1, 2))
        assert evicted.tolist() == [architecture != "gemma3" or layer in (1, 3) for layer in range(4)]
        assert row.retention.evicts == ((1, 3) if architecture == "gemma3" else (0, 1, 2, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_float32_stays_within_rounding(policy):
    model = tiny_model("qwen3", 4, 2, torch.float32)
    for row in evicting_run(model, prompts("batch"), policy, BUDGET, 80):
        scale = max(1.0, torch.stack(row.logits).abs().max().item())
        assert deviation(model, row) <= 1e-5 * scale


@pytest.mark.parametrize("buffer", [1, 8])
@pytest.mark.parametrize("policy", ["epikv", "vase-attnv"])
def test_protected_prompt_and_plain_stepping(policy, buffer):
    model = tiny_model("qwen3")
    budget = ev.Budget(total=60, sinks=2, recent=8, buffer=buffer, protect_prompt=True)
    (row,) = evicting_run(model, prompts("single"), policy, budget, 80)
    assert deviation(model, row) <= 1e-9
    assert (row.retention.death[:, :, :30] == row.retention.events).all()


@pytest.fixture(scope="module")
def witnessed():
    """A run whose kept sets differ between heads, and whose oracle agrees."""
    model = tiny_model("qwen3")
    (row,) = evicting_run(model, prompts("single"), "vase-attnv", BUDGET, 100)
    assert deviation(model, row) <= 1e-9
    return model, row


def test_mutant_position_off_by_one_fails(witnessed):
    model, row = witnessed
    positions = np.arange(row.retention.tokens)
    positions[row.retention.event_steps[0] :] += 1
    assert deviation(model, row, positions=positions) > 1e-5


def test_mutant_swapped_heads_fail(witnessed):
    model, row = witnessed
    swapped = row.retention.death.copy()
    swapped[1] = swapped[1, ::-1]
    assert deviation(model, row, replace(row.retention, death=swapped)) > 1e-5


@pytest.mark.parametrize("shift", [-1, 1])
def test_mutant_death_shifted_by_one_event_fails(witnessed, shift):
    model, row = witnessed
    death = row.retention.death.copy()
    layer, head, token = np.argwhere((death > 0) & (death < row.retention.events - 1))[0]
    death[layer, head, token] += shift
    assert deviation(model, row, replace(row.retention, death=death)) > 1e-5
