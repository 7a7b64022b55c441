"""The decode loop: batches, positions, budgets, the meter, interruptions, sampling."""

from __future__ import annotations

import gc
import signal
import threading

import numpy as np
import pytest
import torch
from matrix import same
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import decode, engine, policies
from epiviz.cache import SlotCache

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)
REPRESENTATIVES = ["random", "streaming", "epikv", "vase-attnv", "vase-dkv", "h2o"]


@pytest.fixture(scope="module")
def stopping_model():
    """A tiny model that ends on tokens it does write, so that rows finish at different times."""
    model = tiny_model("qwen3")
    tokens = [ev.generate(model, random_prompt(n, s), "full", None, 120, progress=False).tokens for s, n in PROMPTS]
    ends = {row[at] for row, at in zip(tokens, (119, 60, 90, 100), strict=True)}
    lm_ends = frozenset(ends)
    stopping = ev.Model(model.lm, None, "stopping")
    stopping.__dict__["stop_tokens"] = lm_ends
    return stopping


PROMPTS = [(0, 12), (1, 57), (2, 102), (3, 40)]


@pytest.mark.parametrize("policy", REPRESENTATIVES)
def test_row_of_a_batch_does_what_it_does_alone(policy, stopping_model):
    prompts = [random_prompt(length, seed) for seed, length in PROMPTS]
    alone = [ev.generate(stopping_model, p, policy, BUDGET, 120, seed=3, progress=False) for p in prompts]
    together = ev.generate(stopping_model, prompts, policy, BUDGET, 120, seed=3, progress=False)
    assert len({len(run.tokens) for run in alone}) > 1, "rows must finish at different times"
    for a, b in zip(alone, together, strict=True):
        same(a, b)
    order = [2, 0, 3, 1]
    shuffled = ev.generate(stopping_model, [prompts[i] for i in order], policy, BUDGET, 120, seed=3, progress=False)
    for i, run in zip(order, shuffled, strict=True):
        same(alone[i], run)


def test_copies_of_a_prompt_draw_apart_and_share_totals_of_their_own():
    model = tiny_model("qwen3")
    prompt = random_prompt(30)
    first, second = ev.generate(model, [prompt, prompt], "random", BUDGET, 60, progress=False)
    assert not np.array_equal(first.retention.death, second.retention.death)
    share = ev.Budget(total=0.5, sinks=2, recent=8, buffer=8)
    short, long = ev.generate(model, [random_prompt(20), random_prompt(80)], "random", share, 60, progress=False)
    assert (short.budget.total, long.budget.total) == (40, 70)
    assert (short.meter.peak_slots, long.meter.peak_slots) == (48, 78)
    assert long.meter.prefill_peak_slots == 80


@pytest.mark.parametrize("policy", REPRESENTATIVES)
@pytest.mark.parametrize("length", [1, 5, 40, 41, 48, 49, 130])
def test_slots_positions_and_bytes(policy, length, monkeypatch):
    model = tiny_model("qwen3", dtype=torch.float32)
    seen_positions, seen_bytes = [], set()
    forward = type(model).forward

    def spy(self, tokens, positions, cache, mask=None, keep_logits=1):
        seen_positions.append(positions.clone())
        out = forward(self, tokens, positions, cache, mask, keep_logits)
        if len(seen_positions) > 1:
            seen_bytes.add(cache.kv_bytes())
            held = cache.held[0]
            kept = cache.tracks["position"][:, 0, :, :held]
            assert (kept.diff(dim=-1) > 0).all(), "slots are sorted and distinct in every head"
        return out

    monkeypatch.setattr(type(model), "forward", spy)
    run = ev.generate(model, random_prompt(length), policy, BUDGET, 64, progress=False)
    assert torch.equal(torch.cat(seen_positions, dim=1)[0], torch.arange(length + 63)), "positions grow by one"
    assert run.meter.peak_slots <= 48 and run.meter.prefill_peak_slots == length
    # layers · kv_heads · (budget + buffer) · 2 · head_dim · bytes, or less for texts that end before it
    assert seen_bytes == {4 * 2 * min(48, length + 64) * 2 * 16 * 4} == {run.meter.kv_bytes}
    assert (run.retention.event_steps[0] == length) == (length > 40)
    held_at_end = run.retention.alive(run.retention.tokens).sum(-1)
    assert (held_at_end == held_at_end[0, 0]).all() and held_at_end.max() <= 48


def test_alive_tokens_are_those_in_the_cache():
    """The history says at every step what the cache holds."""
    model, policy = tiny_model("qwen3"), policies.get("vase-attnv")
    rows = engine.make_rows([random_prompt(30)], policy, BUDGET, 60)
    held = []
    with engine.Session(model, policy, rows, 60, seed=0) as session:
        logits = session.prefill()
        for _ in range(60):
            logits = session.feed(logits.argmax(-1)[:, None] if logits.ndim == 2 else logits[:, -1].argmax(-1)[:, None])
            held.append(
                (
                    session.cache.seen[0],
                    session.cache.tracks["position"][:, 0, :, : session.cache.held[0]].numpy().copy(),
                )
            )
        session.finish(session.rows)
    for seen, positions in held:
        alive = rows[0].retention.alive(seen)
        mine = np.zeros_like(alive)
        np.put_along_axis(mine, positions, True, axis=2)
        assert np.array_equal(alive, mine)


def test_reasons_name_what_protects_a_slot():
    model = tiny_model("qwen3")
    run = ev.generate(model, random_prompt(30), "vase-attnv", BUDGET, 100, progress=False)
    reason = run.retention.reason
    last = run.retention.event_steps[-1]
    assert (reason[:, :, :2] == ev.Reason.SINK).all()
    assert (reason[:, :, last - 8 : last] == ev.Reason.RECENT).all()
    assert (reason[:, :, last:] == ev.Reason.NONE).all()
    alive = run.retention.alive(last)
    reserved = (alive & (reason == ev.Reason.RESERVED)).sum(-1)
    assert (reserved == 8).all()  # round(0.25 · 40) = 10 slots, 2 of them sinks
    assert ((alive & (reason == ev.Reason.SAMPLED)).sum(-1) == 40 - 10 - 8).all()


def test_a_chunk_beyond_the_next_event_is_refused():
    model, chosen = tiny_model("qwen3"), policies.get("random")
    rows = engine.make_rows([random_prompt(30)], chosen, BUDGET, 60)
    with engine.Session(model, chosen, rows, 60, seed=0) as session:
        session.prefill()
        with pytest.raises(ValueError, match="runs past the next event, due in 18"):
            session.feed(torch.zeros(1, 19, dtype=torch.int64))


def test_frozen_scores_decide_the_same_set_streaming_and_offline():
    """EpiKV one out per step = protected prompt + last R + the best of all older tokens."""
    model = tiny_model("qwen3")
    budget = ev.Budget(total=60, sinks=0, recent=12, buffer=1, protect_prompt=True)
    prompt = random_prompt(10)
    run = ev.generate(model, prompt, "epikv", budget, 300, progress=False)
    low, high = ev.signals.reference_layers(4)
    scores = run_scores(model, prompt, run.tokens, budget, (low, high))
    older = scores[10 : len(scores) - 12]
    best = 10 + np.argsort(-older, kind="stable")[: 60 - 10 - 12]
    expected = {*range(10), *best.tolist(), *range(len(scores) - 12, len(scores))}
    alive = run.retention.alive(run.retention.tokens)
    assert all(set(np.flatnonzero(alive[layer, head])) == expected for layer in range(4) for head in range(2))


def run_scores(model, prompt, tokens, budget, layers):
    """Epiphany scores along a text, from the displacements an evicting run really had."""
    steps = []

    class Watch:
        needs = policies.Needs(hidden=layers)

        def observe(self, new, logits, ids):
            steps.append(torch.stack([new.hidden[layer][0] for layer in layers]))

    policy = policies.get("epikv")
    rows = engine.make_rows([prompt], policy, budget, len(tokens))
    with engine.Session(model, policy, rows, len(tokens), 0, recorder=Watch()) as session:
        session.prefill()
        for token in tokens[:-1]:
            session.feed(torch.tensor([[token]]))
    moves = ev.signals.displacement(torch.cat(steps, dim=1))
    z = torch.cat([ev.signals.causal_zscore(part) for part in (moves[:, : len(prompt)], moves[:, len(prompt) :])], -1)
    return (z[0] - z[1]).numpy()


def interrupt_after(monkeypatch, model, passes: int):
    """Press Ctrl-C in the middle of a forward pass."""
    forward, count = type(model).forward, iter(range(1, 10**6))

    def spy(self, *args, **kwargs):
        if next(count) == passes:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)


@pytest.mark.parametrize("passes", [1, 2, 60])
def test_interrupted_run_is_returned_whole(monkeypatch, passes):
    model = tiny_model("qwen3", dtype=torch.float32)
    interrupt_after(monkeypatch, model, passes)
    backend = model.attention
    runs = ev.generate(model, [random_prompt(20), random_prompt(50, 1)], "epikv", BUDGET, 100, progress=False)
    assert [run.status for run in runs] == ["stopped", "stopped"]
    assert all(len(run.tokens) == max(0, passes - 2) for run in runs)
    assert model.lm.config._attn_implementation == backend
    assert not any(layer._forward_hooks for layer in model.decoder_layers)
    fed = [20 + passes - 3, 50 + passes - 3] if passes > 2 else [0, 0]
    assert [run.retention.tokens for run in runs] == fed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_an_eviction_to_end():
    done = []

    def evict():
        with engine.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        evict()
    assert done == [True]


def test_stop_event_ends_a_run_in_another_thread():
    model, stop, result = tiny_model("qwen3", dtype=torch.float32), threading.Event(), []
    stop.set()
    work = threading.Thread(
        target=lambda: result.append(
            ev.generate(model, random_prompt(20), "random", BUDGET, 100, stop=stop, progress=False)
        )
    )
    work.start()
    work.join()
    assert result[0].status == "stopped" and result[0].tokens == []


def test_two_threads_share_a_model():
    """Each run sees its own passes only."""
    model, results = tiny_model("qwen3"), {}
    alone = {p: ev.generate(model, random_prompt(20), p, BUDGET, 60, progress=False) for p in ("epikv", "snapkv")}
    work = [
        threading.Thread(
            target=lambda p=p: results.update({p: ev.generate(model, random_prompt(20), p, BUDGET, 60, progress=False)})
        )
        for p in alone
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    for policy, run in alone.items():
        same(run, results[policy])
    assert model.lm.config._attn_implementation == "sdpa"


def test_loops_are_named():
    model = tiny_model("llama", dtype=torch.float32, layers=3)
    run = ev.generate(model, random_prompt(5), "full", None, 400, progress=False)
    period = decode.find_loop(run.tokens)
    assert (run.status == "loop") == (period > 0)
    assert decode.find_loop([5] * 49) == 0 and decode.find_loop([5] * 50) == 1
    assert decode.find_loop(list(range(300)) + [1, 2] * 24) == 0
    assert decode.find_loop(list(range(300)) + [1, 2] * 25) == 2
    assert decode.find_loop(list(range(500)) * 4) == 0 and decode.find_loop(list(range(500)) * 5) == 500


def test_stop_on_loop_ends_early():
    model = ev.Model(tiny_model("qwen3", dtype=torch.float32).lm, None, "looping")
    rows = engine.make_rows([random_prompt(5)], policies.get("full"), None, 200)
    with engine.Session(model, policies.get("full"), rows, 200, 0) as session:
        decode.decode(session, _Constant(), stop_on_loop=True)
    assert rows[0].status == "loop" and len(rows[0].tokens) == 64


class _Constant(decode.Sampler):
    def draw(self, logits, seed, rows):
        return torch.full((len(rows),), 3)


def test_sampling_follows_the_distribution():
    """Nucleus and top-k cut as documented, and draws follow the probabilities."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rows = [engine.Row([1], sample, None) for sample in range(4000)]
    drawn = decode.Sampler(temperature=1.0).draw(logits.expand(4000, 4), 0, rows)
    expected = logits.softmax(-1)[0]
    share = torch.bincount(drawn, minlength=4) / 4000
    assert (share - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5
    assert set(decode.Sampler(temperature=1.0, top_k=2).draw(logits.expand(4000, 4), 0, rows).tolist()) == {0, 1}
    assert set(decode.Sampler(temperature=1.0, top_p=0.5).draw(logits.expand(4000, 4), 0, rows).tolist()) == {0}
    assert set(decode.Sampler(temperature=1.0, top_p=0.7).draw(logits.expand(4000, 4), 0, rows).tolist()) == {0, 1}


def test_the_models_own_sampling_is_greedy_unless_it_says_otherwise():
    from types import SimpleNamespace

    from transformers import GenerationConfig

    def of(**given):
        model = SimpleNamespace(lm=SimpleNamespace(generation_config=GenerationConfig(**given)))
        return decode.Sampler.of(model, "model", None, None, None)

    assert of() == decode.Sampler()
    assert of(do_sample=True, temperature=0.6, top_p=0.95, top_k=20) == decode.Sampler(0.6, 0.95, 20)
    assert of(do_sample=True).top_k == 50
    with pytest.raises(ValueError, match="min_p=0.1, which is not supported"):
        of(do_sample=True, min_p=0.1)


def test_memory_of_a_row_does_not_depend_on_its_batch():
    model = tiny_model("qwen3")
    prompts = [random_prompt(5), random_prompt(200, 1)]
    together = ev.generate(model, prompts, "full", None, 10, progress=False)
    for prompt, run in zip(prompts, together, strict=True):
        assert ev.generate(model, prompt, "full", None, 10, progress=False).meter == run.meter


def test_sampled_rows_do_not_depend_on_the_batch():
    model = tiny_model("qwen3")
    prompts = [random_prompt(10, s) for s in range(3)]
    together = ev.generate(model, prompts, "random", BUDGET, 80, seed=5, temperature=1.0, progress=False)
    for prompt, run in zip(prompts, together, strict=True):
        same(ev.generate(model, prompt, "random", BUDGET, 80, seed=5, temperature=1.0, progress=False), run)
    other = ev.generate(model, prompts[0], "random", BUDGET, 80, seed=6, temperature=1.0, progress=False)
    assert other.tokens != together[0].tokens


@pytest.mark.parametrize(
    "policy", ["vase-attnv", "epikv", "thinkv", policies.get("seer-oracle", block=16), "snapkv"], ids=str
)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_the_slots_go_with_their_run(policy, architecture):
    """Not when Python next looks for circles: until then a long run's cache would stand beside the next one's."""
    model, budget = tiny_model(architecture), ev.Budget(total=40, sinks=2, recent=16, buffer=8)

    def caches():
        return sum(type(each) is SlotCache for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = caches()
        ev.generate(model, [random_prompt(60), random_prompt(20, 1)], policy, budget, 60, progress=False)
        trace = ev.record(model, random_prompt(30), max_new_tokens=50, progress=False)
        ev.replay(model, trace, policy, budget, progress=False)
        assert caches() == before
    finally:
        gc.enable()


def test_nan_priorities_are_an_error():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Broken(policies.Policy):
        def rank(self, slots, state, draws):
            return policies.Ranking(slots.positions * torch.nan)

    with pytest.raises(FloatingPointError, match="NaN priorities"):
        ev.generate(tiny_model("qwen3"), random_prompt(20), Broken(), BUDGET, 60, progress=False)


def test_eager_equals_sdpa():
    import copy

    model = tiny_model("qwen3")
    lm = copy.deepcopy(model.lm)
    lm.config._attn_implementation = "eager"
    eager = ev.Model(lm, None, "eager")
    prompts = [random_prompt(12), random_prompt(57, 1)]
    for a, b in zip(
        ev.generate(model, prompts, "vase-attnv", BUDGET, 80, progress=False),
        ev.generate(eager, prompts, "vase-attnv", BUDGET, 80, progress=False),
        strict=True,
    ):
        same(a, b)
    assert lm.config._attn_implementation == "eager"
