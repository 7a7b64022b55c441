"""Positions after eviction: absolute, relative to the cache, or with kept keys rotated again."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from oracle import attention_weights, deviation, evicting_run
from tiny import random_prompt, tiny_model
from transformers import AttentionInterface

import epiviz as ev
from epiviz import policies
from epiviz.cache import SlotCache
from epiviz.positions import Rotary

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)


@pytest.mark.parametrize("policy", ["random", "epikv", "vase-attnv", "h2o"])
def test_cache_relative_positions_are_the_recorded_ones(policy):
    model = tiny_model("qwen3")
    for row in evicting_run(
        model, [random_prompt(12), random_prompt(60, 1)], policy, BUDGET, 100, positions="cache-relative"
    ):
        assert deviation(model, row) <= 1e-9
        assert row.retention.events >= 3
        assert deviation(model, row, positions=np.arange(row.retention.tokens)) > 1e-5, "the modes differ"


def test_cache_relative_positions_freeze_like_the_public_harness():
    run = ev.generate(
        tiny_model("qwen3"),
        random_prompt(10),
        "streaming",
        ev.Budget(24, sinks=2, recent=4, buffer=1),
        35,
        positions="cache-relative",
        progress=False,
    )
    assert run.retention.positions.tolist() == [*range(24), *[24] * 20]
    absolute = ev.generate(
        tiny_model("qwen3"), random_prompt(10), "streaming", ev.Budget(24, 2, 4, 1), 35, progress=False
    )
    assert absolute.retention.positions is None and run.positions == "cache-relative"


def rerotated_reference(model, tokens, visible, birth):
    """Logits of a pass in which every query sees each head's keys at their rank among the keys that head holds."""
    rotary = Rotary.of(model)
    index = torch.arange(len(tokens))

    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        outputs = []
        for head in range(query.shape[1]):
            seen = torch.from_numpy(visible[module.layer_idx][head // groups])
            rank = seen.long().cumsum(-1) - 1  # [query, key]
            at_rank = rotary.rotate(key[0, head // groups].expand(len(tokens), -1, -1), rank - index)
            turned = rotary.rotate(query[0, head], torch.from_numpy(birth) - index)
            logits = torch.einsum("qd,qkd->qk", turned, at_rank) * scaling
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(weights @ value[0, head // groups])
        return torch.stack(outputs, dim=1)[None], None

    AttentionInterface.register("rerotated", attend)
    before, model.lm.config._attn_implementation = model.lm.config._attn_implementation, "rerotated"
    try:
        with torch.inference_mode():
            return model.lm(torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        model.lm.config._attn_implementation = before


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", ["random", "streaming", "snapkv"])
def test_rerotated_keys_are_where_their_slots_are(policy, architecture):
    model = tiny_model(architecture)
    chosen = policies.get(policy, **({"window": 8} if policy == "snapkv" else {}))
    prompts = [random_prompt(12), random_prompt(60, 1)]
    for row in evicting_run(model, prompts, chosen, BUDGET, 80, positions="rerotated"):
        fed = row.prompt + row.tokens[:-1]
        expected = rerotated_reference(model, fed, row.retention.visible(), row.retention.positions)
        found = torch.stack(row.logits)
        # cos and sin of the model are float32
        assert (expected[len(row.prompt) - 1 :] - found).abs().max() < 1e-3
        assert row.retention.events >= 3


def test_layers_without_rotation_stay_as_they_are():
    model = tiny_model("smollm3")
    rotates = [bool(layer.self_attn.use_rope) for layer in model.decoder_layers]
    assert not all(rotates)
    assert Rotary.of(model).layers == tuple(rotates)
    run = ev.generate(model, random_prompt(20), "random", BUDGET, 60, positions="rerotated", progress=False)
    assert run.retention.events >= 3


def test_the_three_modes_give_three_texts():
    model = tiny_model("qwen3")
    texts = {
        mode: ev.generate(model, random_prompt(20), "streaming", BUDGET, 80, positions=mode, progress=False).tokens
        for mode in ("absolute", "cache-relative", "rerotated")
    }
    assert len({tuple(tokens) for tokens in texts.values()}) == 3


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_no_drift_over_a_thousand_evictions(dtype, limit):
    """One slot goes at each; the kept keys stand where a single rotation would have put them."""
    model = tiny_model("llama")
    rotary = Rotary.of(model)
    cache = SlotCache(model.shape, 1, 21, dtype, torch.device("cpu"), None, rotary)
    keys = torch.randn(4, 2, 1020, 16, generator=torch.Generator().manual_seed(0))
    for token in range(1020):
        for layer in range(4):
            new = rotary.rotate(keys[layer, :, token], torch.tensor(min(token, 20)))[None, :, None].to(dtype)
            cache.write(layer, new, new)
        cache.advance(1)
        if cache.held[0] == 21:
            keep = torch.tensor([0, *range(2, 21)]).expand(4, 1, 2, 20)  # the second oldest goes
            cache.evict([0], keep, torch.zeros_like(keep, dtype=torch.uint8))
    kept = [0, *range(1001, 1020)]
    expected = rotary.rotate(keys[:, :, kept], torch.arange(20))
    found = cache.keys[:, 0, :, :20].float()
    drift = ((found - expected).abs() / expected.abs().clamp(min=1)).max().item()
    assert cache.tracks["position"][0, 0, 0, :20].tolist() == kept
    assert drift < limit


def test_rotation_equals_the_models_own():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny_model("llama", dtype=torch.float32)
    x = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = model.lm.model.rotary_emb(x, torch.arange(30)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.allclose(Rotary.of(model).rotate(x, torch.arange(30)), expected, atol=1e-5)


def test_what_cannot_be_rotated_again_is_refused_by_name():
    model = tiny_model("llama")
    lm = copy.deepcopy(model.lm)
    lm.config.rope_parameters = {**lm.config.rope_parameters, "rope_type": "dynamic"}
    with pytest.raises(
        ev.UnsupportedModelError, match="'dynamic' rotary positions, whose frequencies depend on the length"
    ):
        ev.generate(ev.Model(lm, None, "m"), [1, 2], "random", BUDGET, 5, positions="rerotated", progress=False)
    with pytest.raises(ev.UnsupportedModelError, match="gemma3_text. has no single rotary embedding"):
        ev.generate(tiny_model("gemma3"), [1, 2], "random", BUDGET, 5, positions="rerotated", progress=False)
    with pytest.raises(ev.BudgetError, match="looks at the last 64 queries, but only 8 recent tokens stay together"):
        ev.generate(model, [1, 2], "snapkv", BUDGET, 5, positions="rerotated", progress=False)
    with pytest.raises(ValueError, match="positions must be one of absolute, cache-relative, rerotated, got 'shifted'"):
        ev.generate(model, [1, 2], "random", BUDGET, 5, positions="shifted", progress=False)


def test_weights_of_the_oracle_are_causal():
    model = tiny_model("llama")
    visible = np.broadcast_to(np.tril(np.ones((20, 20), dtype=bool)), (4, 2, 20, 20))
    weights = attention_weights(model, random_prompt(20), visible)
    assert torch.allclose(weights.sum(-1), torch.ones(4, 4, 20, dtype=weights.dtype))
    assert (weights.triu(1) == 0).all()
