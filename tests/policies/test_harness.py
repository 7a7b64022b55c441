"""What the papers' public code does: each difference against a slow reference, and every preset under the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import WatchedSession, attention_weights, deviation, seen
from stepper import Stepper
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import policies, signals
from epiviz.draws import Draws
from epiviz.engine import make_rows
from epiviz.policies import H2O, Budget, EpiKV, harness, paper_harness
from epiviz.policies.snapkv import SnapKV, pool_neighbours

CPU = torch.device("cpu")
PRESETS = sorted(harness.presets())
VASE = {"curdkv", "evict-largest", "rkv-simple", "snapkv", "vase-attnv", "vase-dkv", "vase-dkv-shared"}
# One row's displacements enter the others' scores there: these presets alone break the independence of rows.
SHARED_NORMS = {"epikv", "epikv-band", "epikv-mean", "epikv-reserve", "epikv-seg", "segment-hs"}


def fed(model, preset, prompts, new, seed=0):
    """Feed given texts in chunks through the engine; the rows carry their logits, as the oracle wants them."""
    rows = make_rows(prompts, preset.policy, preset.budget, new)
    texts = torch.tensor([random_prompt(new, sum(prompt)) for prompt in prompts])
    with WatchedSession(model, preset.policy, rows, new, seed, preset.positions) as session:
        logits, at = [session.prefill()[:, None]], 0
        while at < new - 1:
            q = min(session.room(), 64, new - 1 - at)
            logits.append(session.feed(texts[:, at : at + q]))
            at += q
        session.finish(session.rows)
    for row, text, own in zip(rows, texts, torch.cat(logits, dim=1), strict=True):
        row.tokens, row.logits = text.tolist(), list(own)
    return rows


def small(name):
    """A preset as small as its code allows, two prompts and a number of tokens that make it evict."""
    if name in VASE:
        return paper_harness(name, 128), [random_prompt(40), random_prompt(150, 1)], 290
    if name == "h2o":
        return paper_harness(name, 160), [random_prompt(140), random_prompt(150, 1)], 40
    reserve = {"slots": 4} if name == "epikv-reserve" else {}
    return paper_harness(name, 32, **reserve), [random_prompt(12), random_prompt(20, 1)], 30


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_the_oracle_and_only_shared_norms_join_rows(name):
    model, (preset, prompts, new) = tiny_model("qwen3"), small(name)
    together = fed(model, preset, prompts, new)
    alone = [fed(model, preset, [prompt], new)[0] for prompt in prompts]
    for row in (*together, *alone):
        assert deviation(model, row) <= 1e-9
        assert row.retention.events >= 3
        assert (row.retention.death < row.retention.events).any()
    same = [
        np.array_equal(a.retention.death, b.retention.death) and np.array_equal(a.retention.reason, b.retention.reason)
        for a, b in zip(together, alone, strict=True)
    ]
    assert all(same) == (name not in SHARED_NORMS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_cannot_be_taken_for_the_method(name):
    preset, _, _ = small(name)
    assert preset.policy.label.startswith(f"paper_harness({name}")
    assert f"paper_harness({name})" not in policies.names()
    assert preset.positions == ("absolute" if name in VASE else "cache-relative")
    assert preset.budget.buffer == (64 if name in VASE else 1)
    assert harness.presets()[name].startswith(("Mode `", "Class `", "As `"))


# -- EpiKV's harness -------------------------------------------------------------------------------


def test_positions_freeze_once_the_budget_is_full():
    preset = paper_harness("epikv", 16)
    run = ev.generate(tiny_model("qwen3"), random_prompt(11), **preset, max_new_tokens=12, progress=False)
    assert run.retention.positions.tolist() == [*range(16), 16, 16, 16, 16, 16, 16]
    assert run.policy == "paper_harness(epikv)" and run.positions == "cache-relative"
    assert (run.retention.death[:, :, :11] == run.retention.events).all(), "the prompt stays"
    assert np.diff(run.retention.event_steps).tolist() == [1] * 5, "one token goes per step"


@pytest.mark.parametrize(
    "name, total, expected",
    [
        ("epikv", 256, (0, 64, True)),
        ("epikv", 1024, (0, 128, True)),
        ("h2o", 1024, (4, 128, False)),
        ("h2o", 100, (4, 96, False)),
        ("raas", 256, (0, 0, True)),
        ("thinkv-tertiles", 256, (0, 64, False)),
        ("snapkv", 256, (0, 64, False)),
        ("vase-attnv", 256, (4, 64, False)),
    ],
)
def test_what_the_codes_protect(name, total, expected):
    budget = paper_harness(name, total).budget
    assert (budget.sinks, budget.recent, budget.protect_prompt) == expected and budget.total == total


def test_bfloat16_displacements_move_in_steps():
    hidden = torch.zeros(1, 40, 3)
    hidden[0, 1::2, 0] = torch.linspace(8.01, 15.9, 20)
    exact = signals.displacement(hidden)
    rounded = signals.displacement(hidden, score_dtype="bfloat16")
    assert torch.equal(rounded, (rounded * 16).round() / 16), "norms from 8 to 16 are multiples of 1/16"
    assert 0 < (rounded - exact).abs().max() <= 1 / 16


def test_displacements_are_averaged_over_the_rows_of_a_batch():
    """Two rows that move apart get the scores of their mean move, and the prompt's last state is each row's own."""
    generator = np.random.default_rng(0)
    hidden = {layer: torch.from_numpy(generator.normal(size=(2, 30, 6))) for layer in (1, 2)}
    budget = Budget(100, 0, 0, 1).resolve(5, 100)
    steppers = [Stepper(EpiKV((1, 2), average_rows=mean), budget, rows=2) for mean in (True, False)]
    for stepper in steppers:
        stepper.feed(5, hidden={layer: h[:, :5] for layer, h in hidden.items()})
        stepper.feed(10, hidden={layer: h[:, 5:15] for layer, h in hidden.items()})
        stepper.feed(15, hidden={layer: h[:, 15:] for layer, h in hidden.items()})
    shared, own = (stepper.cache.tracks["score"][0, :, 0, 5:30].double() for stepper in steppers)
    z = {layer: signals.causal_zscore(h.diff(dim=1)[:, 4:].norm(dim=-1).mean(0)) for layer, h in hidden.items()}
    assert torch.allclose(shared, (z[1] - z[2]).expand(2, -1), atol=1e-6)
    assert not torch.allclose(own[0], own[1], atol=0.1)


def test_a_bfloat16_sum_of_attention_stalls():
    received = torch.full((1, 1, 5000, 1), 1 / 1024)
    for score_dtype, expected in (("float32", 5000 / 1024), ("bfloat16", 0.25)):
        mass = torch.zeros(1, 1, 1, dtype=getattr(torch, score_dtype))
        H2O(score_dtype=score_dtype)._add(mass, received)
        assert mass.item() == pytest.approx(expected, rel=1e-4)
        assert H2O(score_dtype=score_dtype).needs(None).tracks["mass"] == mass.dtype


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_h2o_of_generated_queries_alone_averages_over_heads(scope):
    model, policy = tiny_model("qwen3"), H2O(scope=scope, prompt_rows=False)
    preset = policies.Preset(policy, Budget(40, sinks=2, recent=8, buffer=8))
    rows = make_rows([random_prompt(30)], policy, preset.budget, 60)
    tokens = random_prompt(40, 4)
    with WatchedSession(model, policy, rows, 60, 0) as session:
        session.prefill()
        for start in range(0, 40, 2):
            session.feed(torch.tensor([tokens[start : start + 2]]))
        mass = session.cache.tracks["mass"][:, 0, :, : session.cache.held[0]].double()
        positions = session.cache.tracks["position"][:, 0, :, : session.cache.held[0]]
        session.finish(session.rows)
    assert rows[0].retention.events >= 3
    weights = attention_weights(model, rows[0].prompt + tokens, seen(rows[0]))[:, :, 30:]  # queries after the prompt
    received = weights.sum(2).mean(1, keepdim=True).expand(-1, 2, -1)
    received = received.mean(0).expand(4, -1, -1) if scope == "global" else received
    assert torch.allclose(mass, received.gather(2, positions), atol=1e-5)


def test_raas_shares_its_stamps():
    """The stamps of the reference case, from one head and from two layers and heads whose mean it is."""
    budget = Budget(5, 0, 0, 1, protect_prompt=True).resolve(1, 100)
    stepper = Stepper(policies.RaaS(scope="global"), budget, layers=2, heads=2, kv_heads=2)
    stepper.feed(1)
    for row in ([0.5], [0.3, 0.5], [0.1, 0.4, 0.3], [0.05, 0.3, 0.35, 0.2], [0.02, 0.08, 0.3, 0.3, 0.2]):
        stepper.feed(1, rows=[[0.0, *row]])
    held = stepper.cache.held[0]
    stamps = stepper.cache.tracks["stamp"][:, 0, :, :held]
    assert (stamps == torch.tensor([0, 4, 5, 5, 5])).all()


def test_longflow_averages_both_factors_first():
    slots = Stepper(policies.LongFlow(), Budget(50, 0, 0, 1).resolve(1, 100), layers=2, heads=4, kv_heads=2)
    random = np.random.default_rng(0)
    for _ in range(12):
        slots.feed(
            1,
            keys=random.normal(size=(2, 1, 2, 1, 3)),
            values=random.normal(size=(2, 1, 2, 1, 3)),
            queries=random.normal(size=(2, 1, 4, 1, 3)),
        )
    seen_slots = slots.slots()
    rows = torch.stack(
        [
            (seen_slots.queries[layer, 0, head, 0] @ seen_slots.keys[layer, 0, head // 2].T / 3**0.5).softmax(-1)
            for layer in range(2)
            for head in range(4)
        ]
    )
    norm = seen_slots.values.abs().sum(-1)[:, 0]
    shared = policies.LongFlow(scope="global").rank(seen_slots, {}, None).priority
    assert shared.shape == (1, 1, 1, 12)
    assert torch.allclose(shared[0, 0, 0], rows.mean(0) * norm.mean((0, 1)), atol=1e-6)
    own = policies.LongFlow().rank(seen_slots, {}, None).priority
    assert torch.allclose(own[1, 0, 1], rows[6:8].mean(0) * norm[1, 1], atol=1e-6)


def test_bfloat16_variances_are_rounded_per_head_and_per_layer():
    keys = torch.randn(2, 1, 2, 6, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    budget = Budget(50, 0, 0, 1).resolve(1, 100)
    stepper = Stepper(policies.KeyVariance(window=1, score_dtype="bfloat16"), budget, 16, layers=2, kv_heads=2, heads=2)
    stepper.feed(6, keys=keys)
    of_layer = keys.var(-1).bfloat16().mean(2).bfloat16().double()  # [layers, rows, tokens]
    assert stepper.cache.tracks["score"][1, 0, 1, :6].tolist() == pytest.approx(of_layer.mean((0, 1)).tolist())
    assert of_layer.mean((0, 1)).tolist() != pytest.approx(keys.var(-1).mean((0, 1, 2)).tolist(), rel=1e-4)


# -- VaSE's code -----------------------------------------------------------------------------------


def test_pooling_over_rank_is_not_pooling_over_position():
    """Six slots whose public order is 1, 5, 3, 0, 2, 4; width 3, zeros beyond the ends."""
    weights = torch.tensor([[[0.0, 9, 0, 3, 0, 6]]])
    assert pool_neighbours(weights, 3).flatten().tolist() == [3, 3, 4, 1, 3, 2]
    order = torch.tensor([[[1, 5, 3, 0, 2, 4]]])
    assert pool_neighbours(weights, 3, order).flatten().tolist() == [1, 5, 0, 3, 0, 6]


B, TOTAL, TOKENS = 4, 20, 60


@pytest.fixture
def made_up():
    """Keys, values ``[tokens, 3]`` and queries of two heads ``[2, tokens, 3]``, for one KV head."""
    random = np.random.default_rng(8)
    return random.normal(size=(TOKENS, 3)), random.normal(size=(TOKENS, 3)), random.normal(size=(2, TOKENS, 3)) * 2


def public_cache(select):
    """Yield the slots after each eviction, in the order in which the public code holds them."""
    slots = []
    for token in range(TOKENS):
        slots.append(token)
        if len(slots) == TOTAL + B:
            slots = select(np.array(slots[:-B]), token) + slots[-B:]
            yield slots


def public_attention(candidates, token, keys, queries):
    """Mean attention of the last queries to the candidates, smoothed over the order in which they lie."""
    score = np.zeros(len(candidates))
    for head in queries:
        logits = head[token - B + 1 : token + 1] @ keys[candidates].T / 3**0.5
        weights = np.exp(logits)
        mean = (weights / weights.sum(-1, keepdims=True)).mean(0)
        score += np.convolve(mean, np.ones(5) / 5, mode="same") / 2
    return score


def kept_by(policy, made_up, sinks):
    keys, values, queries = made_up
    stepper = Stepper(policy, Budget(TOTAL, sinks, B, buffer=B).resolve(1, 200), heads=2)
    for token in range(TOKENS):
        at = slice(token, token + 1)
        stepper.feed(1, keys=keys[at], values=values[at], queries=queries[None, None, :, at])
    return [kept.flatten().tolist() for _, kept in stepper.events]


def test_snapkv_over_rank_is_the_public_cache(made_up):
    keys, _, queries = made_up

    def select(candidates, token):
        score = public_attention(candidates, token, keys, queries)
        return candidates[np.argsort(-score)[: TOTAL - B]].tolist()

    expected = [sorted(slots) for slots in public_cache(select)]
    assert len(expected) == 10
    assert kept_by(SnapKV(window=B, pool_over="rank"), made_up, sinks=0) == expected
    assert kept_by(SnapKV(window=B), made_up, sinks=0) != expected


def test_rkv_simple_over_rank_is_the_public_cache(made_up):
    keys, _, queries = made_up

    def select(candidates, token):
        unit = keys[candidates] / np.linalg.norm(keys[candidates], axis=-1, keepdims=True)
        cosine = unit @ unit.T - np.eye(len(candidates))
        redundancy = np.exp(cosine.mean(-1))
        score = public_attention(candidates, token, keys, queries) - redundancy / redundancy.sum()
        return candidates[np.argsort(-score)[: TOTAL - B]].tolist()

    expected = [sorted(slots) for slots in public_cache(select)]
    assert kept_by(policies.RKVSimple(window=B, pool_over="rank"), made_up, sinks=0) == expected


def test_vase_attnv_over_rank_is_the_public_cache(made_up):
    """Sinks in front, then value slots by descending range, then the drawn by descending race, then the recent."""
    keys, values, queries = made_up
    event = 0

    def select(candidates, token):
        nonlocal event
        score = public_attention(candidates, token, keys, queries)
        size = np.ptp(values[candidates], axis=-1)
        size[candidates < 2] = np.inf
        large = np.argsort(-size)[:5]
        draws = Draws(0, [0], [event], CPU)
        race = score / -np.log(draws.uniform(torch.from_numpy(candidates)[None, None, None]).numpy().flatten())
        race[large] = 0
        event += 1
        return [*candidates[large], *candidates[np.argsort(-race)[: TOTAL - B - 5]]]

    expected = [sorted(slots) for slots in public_cache(select)]
    found = {
        pool_over: kept_by(policies.get("vase-attnv", window=B, pool_over=pool_over), made_up, sinks=2)
        for pool_over in ("rank", "position")
    }
    assert found["rank"] == expected and found["position"] != expected


def test_places_stay_with_their_rows():
    """Rows evict at different times, and a row's order is its own."""
    model, budget = tiny_model("qwen3"), Budget(40, sinks=2, recent=8, buffer=8)
    policy = policies.get("vase-attnv", window=8, pool_over="rank")
    prompts = [random_prompt(12), random_prompt(57, 1)]
    together = ev.generate(model, prompts, policy, budget, 70, progress=False)
    for prompt, run in zip(prompts, together, strict=True):
        alone = ev.generate(model, prompt, policy, budget, 70, progress=False)
        assert np.array_equal(run.retention.death, alone.retention.death)
        by_position = policies.get("vase-attnv", window=8)
        other = ev.generate(model, prompt, by_position, budget, 70, progress=False)
        assert not np.array_equal(other.retention.death, alone.retention.death)


def rounded_attention(queries, keys):
    """The public code's score of ``[heads, window, size]`` and ``[n, size]``, step by step in bfloat16."""
    logits = (queries.bfloat16() @ keys.bfloat16().T) / keys.shape[-1] ** 0.5
    weights = logits.float().softmax(-1).bfloat16()
    mean = weights.mean(1)  # over queries
    pooled = torch.nn.functional.avg_pool1d(mean[None], 5, 1, 2)[0]
    return pooled.mean(0)


def test_bfloat16_scores_take_few_values():
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 1, 4100, 128, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    queries = torch.randn(1, 1, 4, 8, 128, generator=generator, dtype=torch.bfloat16) * 1.5
    slot = torch.arange(4100)
    slots = policies.Slots(
        keys,
        values,
        slot.expand(1, 1, 1, 4100),
        (slot < 4096)[None, None, None],
        Budget(2048, sinks=0, recent=4, buffer=4).resolve(1, 9000),
        {},
        queries,
        torch.full((1, 8), 5000),
    )
    found = SnapKV(window=8, score_dtype="bfloat16").rank(slots, {}, None).priority[0, 0, 0, :4096]
    assert found.dtype == torch.bfloat16
    expected = rounded_attention(queries[0, 0], keys[0, 0, 0, :4096])
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=0)
    assert (found == expected).float().mean() > 0.98
    assert len(found.unique()) < 600
    exact = SnapKV(window=8).rank(slots, {}, None).priority[0, 0, 0, :4096]
    assert len(exact.unique()) > 4000
    product = policies.VaseDKV(score_dtype="bfloat16").rank(slots, {}, Draws(0, [1], [0], CPU)).priority
    assert product.dtype == torch.bfloat16 and len(product.unique()) < 2000


def test_a_bfloat16_race_divides_rounded_weights_by_rounded_noise():
    class Weights(policies.Policy):
        weights = True

        def rank(self, slots, state, draws):
            return policies.Ranking(torch.tensor([0.0, 0.3, 0.001, 2.0, 0.0, 1e-30]).expand(1, 1, 1, 6))

    slots = Stepper(Weights(), Budget(4, 0, 0, 1).resolve(1, 10)).slots()
    slots.positions = torch.arange(6).expand(1, 1, 1, 6)
    draws = Draws(0, [1], [0], CPU)
    race = policies.Sample(Weights(), score_dtype="bfloat16").rank(slots, {}, draws).priority.flatten()
    noise = (-draws.uniform(slots.positions).log()).bfloat16().flatten()
    assert torch.equal(race, torch.tensor([0.0, 0.3, 0.001, 2.0, 0.0, 1e-30]).bfloat16() / noise)


def test_a_shared_projection_gives_the_copies_of_a_prompt_the_same_luck():
    model, prompt = tiny_model("qwen3"), random_prompt(150)
    for name, alike in (("vase-dkv", False), ("vase-dkv-shared", True), ("curdkv", False)):
        first, second = fed(model, paper_harness(name, 128), [prompt, prompt], 4)
        assert np.array_equal(first.retention.death, second.retention.death) == alike, name
    draws = Draws(0, [1, 2], [0, 3], CPU)
    slots = Stepper(policies.VaseDKV(), Budget(4, 0, 0, 1).resolve(1, 10), rows=2).slots()
    fixed = policies.CurDKV(shared_projection=True).projection(slots, draws, fixed=True)
    assert torch.equal(fixed[:, 0], fixed[:, 1])


# -- using presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epikv", "vase-attnv", "h2o"])
def test_replay_takes_a_preset_and_keeps_what_the_run_kept(name):
    model, (preset, (prompt, _), new) = tiny_model("qwen3"), small(name)
    run = ev.generate(model, prompt, **preset, max_new_tokens=min(new, 100), seed=2, progress=False)
    trace = ev.record(model, prompt=prompt, tokens=run.tokens, progress=False)
    found = ev.replay(model, trace, **preset, seed=2, progress=False)
    assert np.array_equal(found.retention.death, run.retention.death)
    assert found.policy == run.policy == preset.policy.label and found.positions == preset.positions


def test_parameters_of_a_preset_are_printed():
    preset = paper_harness("vase-attnv", 512, value_share=0.5)
    assert preset.policy.label == "paper_harness(vase-attnv(value_share=0.5))"
    assert paper_harness("vase-attnv", 512, value_share=0.25).policy.label == "paper_harness(vase-attnv)"
    assert dict(preset) == {"policy": preset.policy, "budget": preset.budget, "positions": "absolute"}
    assert (
        paper_harness("epikv-reserve", np.int64(512), slots=32).policy.policy.reserved(
            Budget(512, 0, 128, 1).resolve(10, 10)
        )
        == 32
    )


def test_bad_presets_say_what_to_do():
    with pytest.raises(ev.UnknownPolicyError, match="unknown preset 'vase-atnv'; did you mean 'vase-attnv'"):
        paper_harness("vase-atnv", 512)
    with pytest.raises(ev.UnknownPolicyError, match="known presets: curdkv, epikv"):
        paper_harness("", 512)
    with pytest.raises(ev.BudgetError, match="multiple of 64 slots, got 500; the next is 512"):
        paper_harness("snapkv", 500)
    with pytest.raises(ev.BudgetError, match="got 64; the next is 128"):
        paper_harness("vase-dkv", 64)
    with pytest.raises(ev.BudgetError, match="whole number of slots, got 0.25"):
        paper_harness("epikv", 0.25)
    with pytest.raises(ev.BudgetError, match="the preset chooses sinks, recent tokens and buffer"):
        paper_harness("epikv", Budget(512))
    with pytest.raises(TypeError, match="'paper_harness\\(vase-attnv\\)' has no parameter 'share'; did you mean"):
        paper_harness("vase-attnv", 512, share=0.5)
    with pytest.raises(ValueError, match="score_dtype must be one of float32, bfloat16, got 'float16'"):
        SnapKV(score_dtype="float16")
    with pytest.raises(ValueError, match="pool_over must be one of position, rank, got 'slot'"):
        SnapKV(pool_over="slot")
    with pytest.raises(KeyError):
        paper_harness("epikv", 512)["seed"]
