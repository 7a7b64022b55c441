"""The bundled model, for real: against transformers' own generation, and under every policy."""

from __future__ import annotations

import pytest
import torch

import epiviz as ev

QUESTION = "A train has 12 cars with 40 seats each. 310 seats are taken. How many are free? Think step by step."
LONG = "Read this list, then name the third item. " + " ".join(f"Item {n}: colour {n * 7 % 11}." for n in range(60))
CHINESE = "请一步一步地思考 🤔：小明有 12 个苹果 🍎，吃了 3 个，还剩几个？"


def test_an_infinite_budget_equals_the_library_greedy_generation(smollm2):
    ids = torch.tensor([smollm2.encode(QUESTION)])
    with torch.inference_mode():
        reference = smollm2.lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    reference = reference[0, ids.shape[1] :].tolist()
    for policy, budget in [("full", None), ("vase-attnv", ev.Budget(10**9))]:
        run = ev.generate(smollm2, QUESTION, policy, budget, max_new_tokens=40, progress=False)
        assert run.tokens == reference
        assert run.retention.events == 0


@pytest.fixture(scope="module", params=[False, True], ids=["evictable", "protected"])
def written(request, smollm2):
    budget = ev.Budget(128 if request.param else 96, sinks=4, recent=32, buffer=32, protect_prompt=request.param)
    # One goes on for long, the others until they have evicted; those that differ most protect the prompt too.
    others = () if request.param else ("random", "streaming", "vase-dkv")
    lengths = {"vase-attnv": 110 if request.param else 240} | dict.fromkeys(("epikv", *others), 100)
    return {
        policy: ev.generate(smollm2, QUESTION, policy, budget, max_new_tokens=length, progress=False)
        for policy, length in lengths.items()
    }, request.param


def test_long_texts_under_evicting_policies(written):
    runs, protected = written
    for run in runs.values():
        assert run.status in ("finished", "length", "loop") and run.text.strip()
        assert run.text == run.spans.slice(run.prompt_length, len(run.spans) - (run.status == "finished"))
        peak = run.budget.total + 32
        assert run.meter.peak_slots <= peak
        assert run.meter.kv_bytes == 30 * 3 * peak * 2 * 64 * 4
        if run.prompt_length + len(run.tokens) > peak + 1:
            assert run.retention.events > 0
        lost = run.retention.death[:, :, : run.prompt_length] < run.retention.events
        assert not lost.any() or not protected


@pytest.mark.parametrize("policy", ["epikv", "vase-attnv", "vase-dkv"])
@pytest.mark.parametrize(
    "prompt, raw", [(LONG, False), ("A", True), (CHINESE, False)], ids=["long", "one token", "chinese"]
)
def test_awkward_prompts(smollm2, prompt, raw, policy):
    budget = ev.Budget(64, sinks=4, recent=16, buffer=16)
    run = ev.generate(smollm2, prompt, policy, budget, max_new_tokens=24, raw=raw, progress=False)
    assert run.tokens and run.spans.text.endswith(run.spans.piece(len(run.spans) - 1))
    if prompt is LONG:
        assert run.prompt_length > 64 and run.retention.event_steps[0] == run.prompt_length
        assert run.meter.prefill_peak_slots == run.prompt_length > run.meter.peak_slots
    if raw:
        assert run.prompt_length == 1
    if prompt is CHINESE:
        assert CHINESE in run.spans.text
