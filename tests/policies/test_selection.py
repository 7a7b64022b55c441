"""Selections: what each query attends, against slow references, a masked full pass and the cache they leave whole."""

from __future__ import annotations

import copy
import functools
import signal
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from oracle import deviation, evicting_run
from tiny import WINDOW, random_prompt, tiny_model

import epiviz as ev
from epiviz import attention, engine, frames, policies, selector
from epiviz.cache import SlotCache
from epiviz.draws import BlockDraws
from epiviz.models import ModelShape
from epiviz.policies import Blocks, Needs, ReserveValues, Sample, Selection
from epiviz.positions import Rotary
from epiviz.text import join_bytes

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)
PROMPTS = {"single": (50,), "batch": (12, 61, 34)}
NEW = 36
SEERS = ("seer-oracle", "seer-quest")
ORACLE, QUEST = (policies.get(name, block=8) for name in SEERS)
VARIANTS = [ORACLE, QUEST, Sample(ORACLE), Sample(QUEST, 2.0), replace(QUEST, threshold=0.1, first_block=True)]


def labels(policy):
    return policy.label


@functools.cache
def run_of(policy, kind="single", model=None, seed=0, positions="absolute"):
    prompts = [random_prompt(length, number) for number, length in enumerate(PROMPTS[kind])]
    return evicting_run(model or tiny_model("qwen3"), prompts, policy, BUDGET, NEW, seed, positions)


# -- scores, one slot at a time --------------------------------------------------------------------


def oracle_scores(queries, keys, size):
    """The largest attention weight in each complete block, by any query of the group ``[group, head_dim]``."""
    weights = []
    for query in queries:
        logits = np.array([query @ key for key in keys]) / len(query) ** 0.5
        weights.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
    complete = (len(keys) - 1) // size
    return [max(row[i] for row in weights for i in range(b * size, (b + 1) * size)) for b in range(complete)]


def quest_scores(queries, keys, size):
    """The softmax share of each complete block's bound, the largest of the group."""
    complete = (len(keys) - 1) // size
    shares = np.zeros((len(queries), complete))
    for i, query in enumerate(queries):
        for b in range(complete):
            block = keys[b * size : (b + 1) * size]
            pairs = [(q * block[:, c].min(), q * block[:, c].max()) for c, q in enumerate(query)]
            shares[i, b] = sum(max(pair) for pair in pairs) / len(query) ** 0.5
        if complete:
            shares[i] = np.exp(shares[i] - shares[i].max())
            shares[i] /= shares[i].sum()
    return shares.max(axis=0).tolist() if complete else []


def expected(score, queries, keys, policy, total):
    """The slots that the newest of ``keys`` attends."""
    size = policy.block
    scores = score(queries, keys, size)
    own = (len(keys) - 1) // size
    room = (total - (len(keys) - own * size)) // size
    share = np.array(scores) / sum(scores) if scores else np.array([])
    first = [0] if policy.first_block and own else []
    order = sorted(set(range(own)) - set(first), key=lambda b: (scores[b], b), reverse=True)
    order = [b for b in order if share[b] > policy.threshold]
    blocks = {*(first + order)[:room], own}
    return np.array([i // size in blocks for i in range(len(keys))])


@settings(max_examples=40, deadline=None)
@given(
    some.sampled_from(SEERS), some.sampled_from([(4, 2), (1, 1), (8, 1)]), some.integers(1, 9), some.integers(2, 40),
    some.tuples(some.integers(0, 60), some.integers(0, 60)), some.integers(1, 20), some.booleans(),
    some.sampled_from([0.0, 0.05, 0.3]), some.integers(0, 2**31),
)  # fmt: skip
def test_blocks_are_those_of_a_slow_reference(name, heads, block, total, held, q, first_block, threshold, seed):
    """Rows of different lengths, chunks of any size, through the selector."""
    random, shape = np.random.default_rng(seed), ModelShape(2, *heads, head_dim=6, hidden=1)
    policy = policies.get(name, block=block, threshold=threshold, first_block=first_block)
    total = max(total, 2 * block)
    cache = SlotCache(shape, 2, 90, torch.float64, torch.device("cpu"))
    keys = random.normal(size=(2, 2, shape.kv_heads, 90, 6))
    cache.keys.copy_(torch.from_numpy(keys))
    cache._reset_counts(held, held)
    queries = random.normal(size=(2, 2, shape.heads, q, 6))
    choosing = selector.Selector(policy, cache, [total, total], 0, [1, 2], 20)
    score = {"seer-oracle": oracle_scores, "seer-quest": quest_scores}[name]
    for layer in range(2):
        slots = choosing.visible(layer, torch.from_numpy(queries[layer]))
        for row, head, step in np.ndindex(2, shape.kv_heads, q):
            n = held[row] + step + 1
            group = slice(head * shape.group, (head + 1) * shape.group)
            wanted = expected(score, queries[layer, row, group, step], keys[layer, row, head, :n], policy, total)
            assert wanted.sum() <= total
            for found in slots[row, group, step].numpy():
                assert np.array_equal(np.flatnonzero(found), np.flatnonzero(wanted))


@settings(max_examples=20, deadline=None)
@given(some.integers(1, 8), some.integers(0, 2**31))
def test_quests_bound_is_above_every_logit_of_a_block(block, seed):
    random = np.random.default_rng(seed)
    keys = torch.from_numpy(random.normal(size=(2, 5, block, 6)))  # [kv_heads, blocks, block, head_dim]
    queries = torch.from_numpy(random.normal(size=(1, 4, 3, 6)))
    quest = policies.get("seer-quest", block=block)
    summaries = quest.summarise(0, keys, torch.arange(5 * block).reshape(5, block))
    low, high = (summaries[name][None] for name in ("low", "high"))
    positive, negative = (queries.clamp(min=0), queries.clamp(max=0))
    bound = policies.seer.group_logits(positive, high) + policies.seer.group_logits(negative, low)
    logits = policies.seer.group_logits(queries, keys.flatten(1, 2)[None]).unflatten(-1, (5, block))
    assert (bound + 1e-12 >= logits.amax(-1)).all()
    assert block > 1 or torch.allclose(bound, logits[..., 0])


# -- the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (1, 1), (8, 1)])
@pytest.mark.parametrize("policy", [ORACLE, QUEST], ids=labels)
def test_logits_equal_a_full_pass_that_shows_the_attended_blocks(policy, heads, kv_heads, kind):
    model = tiny_model("qwen3", heads, kv_heads)
    for row in run_of(policy, kind, model):
        assert deviation(model, row) <= 1e-9
        attended = row.attended
        per_query = attended.visible()[:, :, attended.prompt_length :].sum(-1)
        assert per_query.max() <= BUDGET.total
        assert row.meter.attended_slots == pytest.approx(per_query.mean())
        tokens = np.arange(attended.prompt_length, attended.tokens)
        assert row.meter.mean_slots == (tokens + 1).mean(), "everything is held"
        assert row.retention.events == 0 and (row.retention.death == 0).all(), "nothing ever left"
        assert not row.meter.bounded and row.meter.peak_slots == attended.tokens
        own = attended.steps[:, :, np.arange(attended.queries), tokens // 8]
        assert own.all(), "the newest block is always attended"
        assert (attended.steps != attended.steps[:1, :1]).any() or model.shape.layers * kv_heads == 1


@pytest.mark.parametrize("policy", VARIANTS[2:], ids=labels)
def test_variants_equal_it_too(policy):
    model = tiny_model("qwen3")
    for row in run_of(policy, "batch", model):
        assert deviation(model, row) <= 1e-9
        assert row.meter.attended_slots <= BUDGET.total


def test_sliding_and_dense_layers_attend_all_they_hold():
    """A hybrid model selects on its full layers (1 and 3) only; here not on the first of them."""
    model, policy = tiny_model("gemma3"), replace(QUEST, dense_layers=2)
    for row in run_of(policy, "batch", model):
        assert row.attended.layers == (3,)
        assert deviation(model, row) <= 1e-4, "its norms round to float32"
        seen = row.attended.visible()[:, :, row.attended.prompt_length :].sum(-1)
        held = np.arange(row.attended.prompt_length, row.attended.tokens) + 1
        assert (seen[1] == held).all() and (seen[3] <= 40).all() and (seen[3] < held).any()
        assert row.meter.attended_slots == pytest.approx(seen[[1, 3]].mean())
        assert row.attended.tokens > WINDOW, "its windows slide"


@pytest.fixture(scope="module")
def witnessed():
    model = tiny_model("qwen3")
    (row,) = run_of(QUEST, model=model)
    assert deviation(model, row) <= 1e-9
    return model, row


def wrong(row, change):
    steps = row.attended.steps.copy()
    change(steps)
    mutant = copy.copy(row)
    mutant.attended = replace(row.attended, steps=steps)
    return mutant


def swap_a_block(steps):
    """One query of one head attended another block than it says."""
    layer, head, query = 1, 0, 10
    chosen, left = np.flatnonzero(steps[layer, head, query]), np.flatnonzero(~steps[layer, head, query])
    steps[layer, head, query, [chosen[0], left[0]]] = False, True


def swap_heads(steps):
    steps[1] = steps[1, ::-1].copy()


def shift_queries(steps):
    steps[2, :, 1:] = steps[2, :, :-1].copy()


@pytest.mark.parametrize("change", [swap_a_block, swap_heads, shift_queries])
def test_mutants_fail(witnessed, change):
    model, row = witnessed
    assert deviation(model, wrong(row, change)) > 1e-5


# -- beside the full cache, in batches, in chunks --------------------------------------------------


@pytest.mark.parametrize("policy", [ORACLE, QUEST, Sample(QUEST)], ids=labels)
def test_a_budget_as_long_as_the_text_is_the_full_cache(policy):
    model, prompts = tiny_model("qwen3"), [random_prompt(20), random_prompt(60, 1)]
    selected = evicting_run(model, prompts, policy, ev.Budget(60 + 30), 30)
    full = evicting_run(model, prompts, "full", None, 30)
    for mine, other in zip(selected, full, strict=True):
        assert torch.allclose(torch.stack(mine.logits), torch.stack(other.logits), rtol=0, atol=1e-12)
        assert mine.meter.attended_slots == mine.meter.mean_slots == other.meter.attended_slots


@pytest.mark.parametrize("policy", VARIANTS, ids=labels)
def test_chunks_and_batches_select_what_single_steps_select(policy):
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(30), tokens=random_prompt(70, 9), progress=False)
    chunked = ev.replay(model, trace, policy, BUDGET, seed=4, progress=False)
    prompt, rest = trace.tokens[:30].tolist(), trace.tokens[30:-1]
    rows = engine.make_rows([prompt, random_prompt(55, 3)], policy, BUDGET, len(rest) + 1)
    with engine.Session(model, policy, rows, len(rest) + 1, 4) as session:
        session.prefill()
        for token in rest:
            session.feed(torch.tensor([[int(token)], [5]]))
        session.finish(session.rows[1:])
        session.finish(session.rows)
    assert np.array_equal(rows[0].attended.steps, chunked.attended.steps)
    assert rows[0].meter == chunked.meter


@pytest.mark.parametrize("policy", [ORACLE, Sample(QUEST)], ids=labels)
def test_rows_that_end_at_different_times_do_not_disturb_each_other(policy):
    model, prompts = tiny_model("qwen3"), [random_prompt(length, seed) for seed, length in enumerate((12, 61, 34))]
    options = {"budget": BUDGET, "max_new_tokens": NEW, "seed": 3, "progress": False}
    ends = [
        run.tokens[at] for run, at in zip(ev.generate(model, prompts, policy, **options), (35, 12, 24), strict=True)
    ]
    stopping = ev.Model(model.lm, None, "stopping")
    stopping.__dict__["stop_tokens"] = frozenset(ends)
    together = ev.generate(stopping, prompts, policy, **options)
    assert len({len(run.tokens) for run in together}) > 1
    for prompt, run in zip(prompts, together, strict=True):
        alone = ev.generate(stopping, prompt, policy, **options)
        assert run.tokens == alone.tokens and run.meter == alone.meter
        assert np.array_equal(run.attended.steps, alone.attended.steps)
        assert np.array_equal(run.attended.count, alone.attended.count)


def other_backend(backend):
    lm = copy.deepcopy(tiny_model("qwen3").lm)
    lm.config._attn_implementation = backend
    return ev.Model(lm, None, backend)


def test_eager_selects_what_sdpa_selects():
    for a, b in zip(run_of(QUEST, "batch"), run_of(QUEST, "batch", other_backend("eager")), strict=True):
        assert np.array_equal(a.attended.steps, b.attended.steps)
        assert torch.allclose(torch.stack(a.logits), torch.stack(b.logits), rtol=0, atol=1e-10)


def test_under_a_flash_backend_layers_that_select_go_through_sdpa(monkeypatch):
    """The kernel has no mask per head; it reads the prompt, and dense layers."""
    counted = []

    def counts(query, cache, layer, scaling):  # what the kernel computes
        counted.append(layer)
        q = query.shape[2]
        keys, values = (x[layer, :, :, : max(cache.held) + q] for x in (cache.keys, cache.values))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, *(x.repeat_interleave(2, 1) for x in (keys, values)), attn_mask=cache.visible(q), scale=scaling
        )
        return out.transpose(1, 2)

    monkeypatch.setattr(attention, "flash_with_counts", counts)
    policy = replace(QUEST, dense_layers=1)
    flash = run_of(policy, "batch", other_backend("flash_attention_2"))
    assert counted.count(0) == 3 + NEW - 1 and counted.count(1) == 3, "three prompts, and what is dense"
    for a, b in zip(run_of(policy, "batch"), flash, strict=True):
        assert np.array_equal(a.attended.steps, b.attended.steps)
        assert torch.allclose(torch.stack(a.logits), torch.stack(b.logits), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", [ORACLE, QUEST], ids=labels)
def test_half_precision_stays_finite_and_half(policy, dtype):
    for row in run_of(policy, "batch", tiny_model("qwen3", dtype=dtype)):
        assert torch.stack(row.logits).isfinite().all() and row.logits[0].dtype == dtype
        assert row.meter.attended_slots <= BUDGET.total


@pytest.mark.parametrize("positions", ["cache-relative", "rerotated"])
def test_without_evictions_all_positions_are_absolute(positions):
    (absolute,), (other,) = run_of(QUEST), run_of(QUEST, positions=positions)
    assert other.tokens == absolute.tokens and np.array_equal(other.attended.steps, absolute.attended.steps)


def test_an_interrupted_run_is_returned_whole(monkeypatch):
    model = tiny_model("qwen3")
    forward, count = type(model).forward, iter(range(1, 10**6))

    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if next(count) == 20:
            signal.raise_signal(signal.SIGINT)  # all layers have selected, and nothing is counted yet
        return out

    monkeypatch.setattr(type(model), "forward", spy)
    run = ev.generate(model, random_prompt(50), QUEST, BUDGET, NEW, progress=False)
    monkeypatch.undo()
    assert run.status == "stopped" and run.attended.queries == 18 == len(run.tokens) - 1
    assert run.attended.visible().shape[-1] == run.retention.tokens


# -- sampling --------------------------------------------------------------------------------------


def test_blocks_are_drawn_by_their_weights():
    share = torch.tensor([0.1, 0.2, 0.7, 0.0])
    positions = torch.arange(8000)[None]
    candidates = torch.tensor([True, True, True, False])[None, None, None].expand(1, 1, 8000, 4)

    class Given:
        selects, label = True, "given"

        def weigh(self, query, blocks, draws):
            return share.log().expand(1, 2, 8000, 4)

    blocks = Blocks(8, None, None, candidates, ~candidates, torch.tensor(1), {}, torch.tensor(False))
    chosen = Sample(Given()).select(None, blocks, BlockDraws(0, [1], 0, positions))
    assert (chosen.sum(-1) == 1).all(), "as many as there is room for"
    for head in chosen[0].double().mean(1):
        assert (head[:3] - share[:3]).abs().max() < 4 * (0.25 / 8000) ** 0.5
    assert (chosen[0, 0] != chosen[0, 1]).any(), "heads draw apart"
    cold = Sample(Given(), 1e-3).select(None, blocks, BlockDraws(0, [1], 0, positions))
    assert cold[..., 2].all(), "a low temperature takes the top"


def test_draws_follow_the_seed():
    first, other = (run_of(Sample(QUEST), seed=seed)[0].attended.steps for seed in (0, 1))
    again = run_of.__wrapped__(Sample(QUEST))[0].attended.steps
    assert np.array_equal(first, again) and (first[:, :, :1] != other[:, :, :1]).any()


# -- the contract: gates, refusals -----------------------------------------------------------------


@dataclass(frozen=True)
class Gate(Selection):
    """Shaped like a trained gate: its own weights, and states from before their rotation."""

    block: int = 8
    rotary: Rotary | None = None
    query_weights: torch.Tensor | None = field(default=None, compare=False)  # [layers, kv_heads, group · size, width]
    key_weights: torch.Tensor | None = field(default=None, compare=False)  # [layers, kv_heads, 3 · size, width]

    def needs(self, shape):
        return Needs(summaries={"gate": self.key_weights.shape[-1]})

    def check(self, budget, shape):
        assert budget.total >= self.block

    def summarise(self, layer, keys, positions):
        plain = self.rotary.rotate(keys, -positions.expand(keys.shape[:-1]))
        pooled = torch.cat([plain.amax(-2), plain.amin(-2), plain.mean(-2)], dim=-1)
        return {"gate": pooled @ self.key_weights[layer]}

    def weigh(self, query, blocks, draws):
        plain = self.rotary.rotate(query.states, -query.positions[:, None].expand(query.states.shape[:-1]))
        joined = plain.unflatten(1, (blocks.keys.shape[1], -1)).transpose(2, 3).flatten(3)
        return joined @ self.query_weights[query.layer] @ blocks.summaries["gate"].transpose(-1, -2)


def test_the_contract_takes_trained_gates(monkeypatch):
    model, random = tiny_model("qwen3"), torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(4, 2, size, 12, generator=random, dtype=torch.float64) for size in (2 * 16, 3 * 16))
    gate, states = Gate(8, Rotary.of(model), queries, keys), []
    hook = model.decoder_layers[1].self_attn.k_norm.register_forward_hook(
        lambda module, inputs, output: states.append(output[0].transpose(0, 1))  # [kv_heads, q, head_dim], unrotated
    )
    rows = run_of(gate, "single", model)
    hook.remove()
    assert deviation(model, rows[0]) <= 1e-9
    plain = torch.cat(states, dim=1)[:, :48].unflatten(1, (6, 8))
    pooled = torch.cat([plain.amax(2), plain.amin(2), plain.mean(2)], dim=-1) @ keys[1]
    prefilled = SlotCache(model.shape, 1, 50, torch.float64, torch.device("cpu"))
    prefilled.keys[1, 0, :, :50] = Rotary.of(model).rotate(
        torch.cat(states, dim=1)[:, :50], torch.arange(50).expand(2, 50)
    )
    prefilled._reset_counts([50], [50])
    found = selector.Selector(gate, prefilled, [40], 0, [1], 10).summaries["gate"][1, 0, :, :6]
    assert torch.allclose(found, pooled, rtol=0, atol=1e-9)


def test_what_does_not_fit_is_refused_by_name():
    model, prompt = tiny_model("qwen3"), random_prompt(20)
    with pytest.raises(ev.BudgetError, match="newest block of 64 slots, which a budget of 40 .* lower block to 40"):
        ev.generate(model, prompt, "seer-quest", BUDGET, 10, progress=False)
    with pytest.raises(ev.BudgetError, match="first and the newest block .* total to 128 or lower block to 20"):
        ev.generate(model, prompt, policies.get("seer-oracle", first_block=True), BUDGET, 10, progress=False)
    with pytest.raises(ev.BudgetError, match="needs a budget"):
        ev.generate(model, prompt, "seer-oracle", None, 10, progress=False)
    with pytest.raises(ValueError, match="leaves no layer of 4"):
        ev.generate(model, prompt, policies.get("seer-oracle", block=8, dense_layers=4), BUDGET, 10, progress=False)
    with pytest.raises(ValueError, match="'seer-quest.block=8.' cannot be wrapped: it never evicts"):
        ReserveValues(QUEST)
    for parameter in ({"block": 0}, {"threshold": 1.0}, {"dense_layers": -1}):
        with pytest.raises(ValueError, match=next(iter(parameter))):
            policies.get("seer-quest", **parameter)


def test_nan_weights_are_an_error():
    @dataclass(frozen=True)
    class Broken(Selection):
        def weigh(self, query, blocks, draws):
            return torch.full(blocks.candidates.shape, torch.nan)

    with pytest.raises(FloatingPointError, match="NaN priorities"):
        ev.generate(tiny_model("qwen3"), random_prompt(20), Broken(block=8), BUDGET, 10, progress=False)


# -- what is remembered and shown ------------------------------------------------------------------


@pytest.mark.parametrize("policy", [replace(ORACLE, dense_layers=1), Sample(QUEST)], ids=labels)
def test_the_history_is_what_was_seen(policy):
    (row,) = run_of(policy)
    history = row.attended
    visible = history.visible()[list(history.layers)]
    queries = np.arange(50, history.tokens)
    for token in (0, 7, 33, 49, 50, 55, 56, history.tokens - 1):
        later = queries[queries >= token]
        assert history.share()[token] == pytest.approx(visible[:, :, later, token].mean())
        saw = np.flatnonzero(visible[:, :, 50:, token].any(axis=(0, 1)))
        assert history.last_query()[token] == (saw[-1] + 50 if len(saw) else -1)
    for step in (51, 70, history.tokens):
        assert history.at(step) == pytest.approx(visible[:, :, step - 1].mean(axis=(0, 1)))
    for step in (50, history.tokens + 1):
        with pytest.raises(ValueError, match=f"outside 51 … {history.tokens}"):
            history.at(step)


def test_long_runs_keep_counts_only(monkeypatch):
    (short,) = run_of(QUEST)
    monkeypatch.setattr(selector, "STEPS_LIMIT", 100)
    (long,) = run_of.__wrapped__(QUEST)
    assert long.attended.steps is None and long.meter == short.meter
    assert np.array_equal(long.attended.share(), short.attended.share())
    with pytest.raises(ValueError, match="not kept"):
        long.attended.at(60)


def test_summaries_are_metered():
    """Two vectors for each block of 8 in float64, 4 layers and 2 KV heads, beside what every cache keeps."""
    (quest,), (oracle,) = run_of(QUEST), run_of(ORACLE)
    assert quest.meter.state_bytes - oracle.meter.state_bytes == 2 * 16 * 8 * 4 * 2 * 11


def test_views_say_attended_and_strike_nothing():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(30), tokens=random_prompt(60, 9), progress=False)
    selected, evicted = (ev.replay(model, trace, policy, BUDGET, progress=False) for policy in (QUEST, "streaming"))
    reader = ev.TraceReader(trace, [selected, evicted])
    name = "seer-quest(block=8) (attended)"
    assert reader.data.methods[:2] == [name, "streaming"]
    assert reader.counts()["struck"] == 0
    colours = reader.data.columns[0].score(f"{name}, 40 slots").values
    assert colours[:-1] == pytest.approx(selected.attended.share(), rel=1e-6) and np.isnan(colours[-1])
    run = ev.generate(model, random_prompt(30), QUEST, BUDGET, 20, progress=False)
    with_text = replace(run, spans=join_bytes(f"{token} ".encode() for token in run.prompt_tokens + run.tokens))
    column = ev.TraceReader(with_text).data.columns[0]
    assert "40 attended, nothing evicted" in column.note and column.score("attended") is not None
    frame = frames.attended([selected])
    assert frame["attended"].tolist() == selected.attended.share().tolist()
    assert frames.replays([selected])["attended_slots"][0] == selected.meter.attended_slots
    with pytest.raises(ValueError, match="selects nothing"):
        frames.attended([evicted])
