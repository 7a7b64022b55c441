"""Replay: exactly what stepping would keep, and what it does to the predictions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import full_pass, seen
from tiny import fitting, random_prompt, tiny_model

import epiviz as ev
from epiviz import engine, policies
from epiviz.replays import Job, ReplayFileError, replay_together

POLICIES = [name for name in policies.names() if name != "full"]


@pytest.fixture(scope="module", params=["short prompt", "long prompt"])
def recorded(request):
    model, length = tiny_model("qwen3"), {"short prompt": 12, "long prompt": 70}[request.param]
    return model, ev.record(model, random_prompt(length), tokens=random_prompt(150, 9), progress=False)


def stepped(model, trace, policy, budget):
    """The retention of feeding a trace token by token."""
    policy = policies.get(policy)
    prompt, rest = trace.tokens[: trace.prompt_length].tolist(), trace.tokens[trace.prompt_length : -1]
    rows = engine.make_rows([prompt], policy, budget, len(rest) + 1)
    with engine.Session(model, policy, rows, len(rest) + 1, 0) as session:
        session.prefill()
        for token in rest:
            session.feed(torch.tensor([[int(token)]]))
        session.finish(session.rows)
    return rows[0].retention


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recorded", ["short prompt"], indirect=True)
def test_replay_keeps_what_stepping_keeps_and_predicts_what_the_oracle_predicts(recorded, policy):
    model, trace = recorded
    policy, budget = fitting(policy), ev.Budget(40, sinks=2, recent=8, buffer=16)
    found = ev.replay(model, trace, policy, budget, progress=False)
    slow = stepped(model, trace, policy, budget)
    assert np.array_equal(found.retention.death, slow.death)
    assert np.array_equal(found.retention.reason, slow.reason)
    assert np.array_equal(found.retention.event_steps, slow.event_steps)
    logits = full_pass(model, trace.tokens[:-1].tolist(), seen(found))
    log_p = logits[trace.prompt_length - 1 :].log_softmax(-1)
    nll = -log_p.gather(1, torch.from_numpy(trace.tokens[trace.prompt_length :])[:, None])[:, 0]
    assert found.nll[found.predicted] == pytest.approx(nll.numpy(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_in_chunks_keeps_what_stepping_keeps(policy):
    """Rows of other lengths are due at other times; a chunk runs to the next event of any."""
    model, policy, budget = tiny_model("qwen3"), fitting(policy), ev.Budget(40, sinks=2, recent=8, buffer=16)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((12, 57, 102))]
    text = torch.tensor([random_prompt(70, seed) for seed in (7, 8, 9)])

    def fed(longest):
        rows = engine.make_rows(prompts, policy, budget, 70)
        with engine.Session(model, policy, rows, 70, 0) as session:
            logits, at = [session.prefill()[:, None]], 0
            while at < 70:
                q = min(longest, session.room(), 70 - at)
                logits.append(session.feed(text[:, at : at + q]))
                at += q
            session.finish(rows)
        return rows, torch.cat(logits, dim=1), len(logits)

    (steps, slow, _), (chunks, fast, passes) = fed(1), fed(70)
    assert passes < 40 and (slow - fast).abs().max() <= 1e-9
    for a, b in zip(steps, chunks, strict=True):
        for name in ("death", "reason", "event_steps"):
            assert np.array_equal(getattr(a.retention, name), getattr(b.retention, name))
        assert a.meter == b.meter


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("buffer", [1, 64])
@pytest.mark.parametrize("recorded", ["short prompt"], indirect=True)
def test_any_buffer(recorded, buffer, policy):
    model, trace = recorded
    if buffer == 1:  # an event at each token: fewer are enough
        trace = ev.record(model, trace.tokens[:12].tolist(), tokens=trace.tokens[12:72].tolist(), progress=False)
    policy, budget = fitting(policy), ev.Budget(32, sinks=2, recent=8, buffer=buffer)
    found, slow = ev.replay(model, trace, policy, budget, progress=False), stepped(model, trace, policy, budget)
    assert np.array_equal(found.retention.event_steps, slow.event_steps)
    assert np.array_equal(found.retention.death, slow.death)


@pytest.mark.parametrize("buffer, policy", [*product([1, 64], ["random", "vase-attnv", "h2o"])])
@pytest.mark.parametrize("recorded", ["long prompt"], indirect=True)
def test_any_buffer_under_a_prompt_beyond_the_budget(recorded, buffer, policy):
    model, trace = recorded
    budget = ev.Budget(40, sinks=2, recent=8, buffer=buffer)
    found = ev.replay(model, trace, policy, budget, progress=False)
    assert np.array_equal(found.retention.death, stepped(model, trace, policy, budget).death)


def test_the_full_cache_agrees_with_itself_and_with_the_recording(recorded):
    model, trace = recorded
    found = ev.replay(model, trace, progress=False)
    assert found.retention.events == 0 and found.budget is None
    assert found.kl[found.predicted] == pytest.approx(0, abs=1e-9)
    assert found.top1_agreement == 1 and found.first_divergence is None
    assert found.nll_increase == pytest.approx(0, abs=1e-9)
    assert found.full_nll[found.predicted] == pytest.approx(trace.surprisal[found.predicted], rel=1e-4)
    assert np.isnan(found.nll[: trace.prompt_length]).all()


def test_equal_logits_are_no_divergence():
    """In bfloat16 the best two are often equal, and what names one of them must name it on both sides."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    trace = ev.record(model, random_prompt(12), tokens=random_prompt(400, 9), progress=False)
    found = ev.replay(model, trace, progress=False)
    assert (found.margin[found.predicted] == 0).any()
    assert found.top1_agreement == 1 and found.first_divergence is None


def test_measures_by_hand(recorded):
    model, trace = recorded
    found = ev.replay(model, trace, "streaming", ev.Budget(40, sinks=2, recent=8, buffer=16), progress=False)
    causal = np.broadcast_to(np.tril(np.ones((len(trace) - 1,) * 2, dtype=bool)), found.retention.visible().shape)
    ids = trace.tokens[:-1].tolist()
    evicted, full = (
        full_pass(model, ids, mask)[trace.prompt_length - 1 :] for mask in (found.retention.visible(), causal)
    )
    p, q = full.softmax(-1), evicted.softmax(-1)
    assert found.kl[found.predicted] == pytest.approx((p * (p / q).log()).sum(-1).numpy(), rel=1e-4, abs=1e-6)
    agrees = (full.argmax(-1) == evicted.argmax(-1)).numpy()
    assert np.array_equal(found.agrees[found.predicted], agrees)
    assert found.first_divergence == trace.prompt_length + int(np.flatnonzero(~agrees)[0])
    top = full.topk(2).values
    assert found.margin[found.predicted] == pytest.approx((top[:, 0] - top[:, 1]).numpy(), rel=1e-4, abs=1e-6)
    assert (found.kl[found.predicted] >= -1e-9).all()


def test_replaying_a_greedy_run_keeps_what_the_run_kept():
    model = tiny_model("qwen3")
    budget = ev.Budget(40, sinks=2, recent=8, buffer=8)
    run = ev.generate(model, random_prompt(30), "vase-attnv", budget, 100, seed=4, progress=False)
    trace = ev.record(model, random_prompt(30), tokens=run.tokens, progress=False)
    found = ev.replay(model, trace, "vase-attnv", budget, seed=4, progress=False)
    assert np.array_equal(found.retention.death, run.retention.death)
    assert found.meter == run.meter


def test_replay_with_other_positions(recorded):
    model, trace = recorded
    budget = ev.Budget(40, sinks=2, recent=8, buffer=16)
    increase = {
        mode: ev.replay(model, trace, "random", budget, positions=mode, progress=False).nll_increase
        for mode in ("absolute", "cache-relative", "rerotated")
    }
    assert len(set(increase.values())) == 3


def test_foreign_and_empty_traces(recorded, synthetic_trace, smollm2):
    model, trace = recorded
    with pytest.raises(ev.ForeignTraceError):
        ev.replay(smollm2, synthetic_trace)
    with pytest.raises(ValueError, match="none after them to predict"):
        ev.replay(model, ev.record(model, tokens=[5], progress=False))
    with pytest.raises(ev.BudgetError, match="needs a budget"):
        ev.replay(model, trace, "random")
    with pytest.raises(ev.ForeignTraceError, match="tokenizer other"):
        ev.replay(model, replace(trace, header={"tokenizer": "other", "model": "x"}))


def test_the_shipped_trace_is_readable_and_replayable(smollm2):
    from pathlib import Path

    trace = ev.Trace.load(Path(__file__).parents[1] / "data/traces/marbles.safetensors")
    found = ev.replay(smollm2, trace, "streaming", ev.Budget(96, 4, 24, 64), progress=False)
    assert found.retention.events >= 3 and found.nll_increase > 0
    reader = ev.TraceReader(trace, [found])
    assert reader.method == "streaming"


def test_one_token_to_predict(tmp_path):
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(50), tokens=random_prompt(1, 9), progress=False)
    found = ev.replay(model, trace, "epikv", ev.Budget(40, sinks=2, recent=8, buffer=8), progress=False)
    assert found.retention.events == 1 and found.retention.tokens == 50
    assert np.isfinite(found.nll[50]) and np.isnan(found.nll[:50]).all()
    assert found.kl[50] == pytest.approx(0, abs=1e-12), "the only prediction is made before event 0"


LONG = f"""
import resource, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import torch
from tiny import random_prompt, tiny_model
import epiviz as ev

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = tiny_model("qwen3", 4, 2, torch.float32, layers=1)
model.lm(torch.tensor([[1, 2]]))
before = peak()
trace = ev.record(model, random_prompt(100), tokens=random_prompt(16_000, 9), progress=False)
found = ev.replay(model, trace, "h2o", ev.Budget(256, buffer=768), progress=False)
assert found.retention.events > 15 and len(found.nll) == 16_100
print(peak() - before)
"""


def test_sixteen_thousand_tokens_need_no_square_of_memory():
    """One 16k × 16k float32 matrix would take a gigabyte, and there are four query heads."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 500, f"{float(done.stdout):.0f} MiB above the model"


def test_together_is_alone(recorded):
    model, trace = recorded
    budget = ev.Budget(40, sinks=2, recent=8, buffer=8)
    jobs = [Job(policies.get(name), budget, seed) for name, seed in (("h2o", 0), ("epikv", 0), ("random", 1))]
    for job, found in zip(jobs, replay_together(model, trace, jobs, progress=False), strict=True):
        alone = ev.replay(model, trace, job.policy, budget, job.seed, progress=False)
        assert np.array_equal(found.retention.death, alone.retention.death)
        for name in ("nll", "full_nll", "kl", "margin"):
            assert np.array_equal(getattr(found, name), getattr(alone, name), equal_nan=True)
        bare = ev.replay(model, trace, job.policy, budget, job.seed, compare=False, progress=False)
        assert np.array_equal(bare.nll, alone.nll, equal_nan=True) and bare.kl is None
        with pytest.raises(ValueError, match="was not compared with the full cache"):
            bare.nll_increase  # noqa: B018


def test_the_noise_floor_is_rounding():
    model = tiny_model("qwen3", dtype=torch.float32)
    trace = ev.record(model, random_prompt(12), tokens=random_prompt(80, 9), progress=False)
    floor = ev.noise_floor(model, trace, chunk=7, progress=False)
    apart = np.abs(floor.nll - floor.full_nll)[floor.predicted]
    assert 0 < apart.max() < 1e-4 and floor.top1_agreement == 1 and floor.first_margin is None
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        ev.replay(model, trace, "full", chunk=0)


@pytest.mark.parametrize("policy", ["vase-attnv", "seer-quest", "full"])
def test_a_replay_is_saved_and_loaded_whole(recorded, policy, tmp_path):
    model, trace = recorded
    budget = ev.Budget(40, sinks=2, recent=8, buffer=8)
    found = ev.replay(model, trace, fitting(policy), budget, positions="cache-relative", progress=False)
    back = ev.Replay.load(found.save(tmp_path / "r.safetensors"), trace)
    for name in ("nll", "full_nll", "kl", "agrees", "margin"):
        assert np.array_equal(getattr(back, name), getattr(found, name), equal_nan=True)
    assert (back.policy, back.budget, back.meter, back.seed) == (found.policy, found.budget, found.meter, found.seed)
    for name in ("death", "reason", "event_steps", "positions"):
        assert np.array_equal(getattr(back.retention, name), getattr(found.retention, name))
    assert back.retention.evicts == found.retention.evicts
    if found.attended is not None:
        assert np.array_equal(back.attended.steps, found.attended.steps)
        assert back.attended.layers == found.attended.layers
    with pytest.raises(ReplayFileError, match="replay of another trace"):
        ev.Replay.load(tmp_path / "r.safetensors", replace(trace, tokens=trace.tokens[::-1].copy()))
    trace.save(tmp_path / "t.safetensors")
    with pytest.raises(ReplayFileError, match="is no replay in the format"):
        ev.Replay.load(tmp_path / "t.safetensors", trace)
