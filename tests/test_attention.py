"""The seam: it sees the rotated queries, changes nothing, and leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from oracle import evicting_run, full_pass
from tiny import random_prompt, tiny_model
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import epiviz as ev
from epiviz import attention, engine, models, policies

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40, 600])
@pytest.mark.parametrize("steps", [0, 3, 16, 30])
def test_the_ring_holds_the_last_rotated_queries(length, steps):
    """Against the queries of a plain pass; a policy that sees nothing but a window."""
    model, window = tiny_model("qwen3"), 16
    policy = policies.get("snapkv", window=window)
    prompts = [random_prompt(length), random_prompt(length + 7, 1)]
    rows = engine.make_rows(prompts, policy, ev.Budget(2000), 40)
    following = torch.tensor([random_prompt(steps, 2), random_prompt(steps, 3)], dtype=torch.int64)
    with engine.Session(model, policy, rows, 40, 0) as session:
        session.prefill()
        for step in range(steps):
            session.feed(following[:, step : step + 1])
        ring = session.recent
    for row, prompt in enumerate(prompts):
        tokens = prompt + following[row].tolist()
        queries = plain_queries(model, tokens)
        held = {int(p): place for place, p in enumerate(ring.positions[row]) if p >= 0}
        assert sorted(held) == list(range(max(0, len(tokens) - window), len(tokens)))
        for position, place in held.items():
            assert torch.allclose(ring.queries[:, row, :, place], queries[:, :, position], atol=1e-12)


def plain_queries(model, tokens):
    """The rotated queries ``[layers, heads, tokens, head_dim]`` of one ordinary causal pass."""
    seen = {}

    def watch(module, query, key, value, mask, scaling=None, **kwargs):
        seen[module.layer_idx] = query[0]
        groups = query.shape[1] // key.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), is_causal=True, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("watch", watch)
    before, model.lm.config._attn_implementation = model.lm.config._attn_implementation, "watch"
    try:
        with torch.inference_mode():
            model.lm(torch.tensor([tokens]), use_cache=False)
    finally:
        model.lm.config._attn_implementation = before
    return torch.stack([seen[layer] for layer in sorted(seen)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "masks"), [(3, 1), (6, 1), (6, 6)])
@pytest.mark.parametrize("q", [1, 2, 33])
def test_grouped_heads_attend_as_copied_keys_do(dtype, heads, masks, q, monkeypatch):
    random = torch.Generator().manual_seed(3)
    kv_heads = heads // 3
    query, key, value = (
        torch.randn(3, h, n, 16, generator=random).to(dtype) for h, n in ((heads, q), (kv_heads, 70), (kv_heads, 70))
    )
    mask = torch.rand(3, masks, q, 70, generator=random) < 0.5
    mask[..., 0] = True
    layer, seam = SimpleNamespace(num_key_value_groups=3), attention._make_seam("sdpa")
    copied, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, mask, scaling=0.3)
    used = []
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **kwargs: used.append(1) or (copied, None)
    )  # one query is transformers' own business
    got, weights = seam(layer, query, key, value, mask, scaling=0.3)
    assert weights is None and torch.equal(got, copied) and len(used) == (q == 1)


def test_what_torch_cannot_do_is_left_to_transformers():
    seam, x = attention._make_seam("sdpa"), torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="softcap"):
        seam(SimpleNamespace(), x, x, x, torch.ones(1, 1, 3, 3, dtype=torch.bool), softcap=30.0)


def test_the_seam_is_gone_after_a_run_and_after_an_error(monkeypatch):
    model = tiny_model("qwen3")
    with attention.through_seam(model, (1, 2)):
        assert model.lm.config._attn_implementation == "epiviz-sdpa" and model.attention == "sdpa"
        with attention.through_seam(model):
            pass
        assert model.lm.config._attn_implementation == "epiviz-sdpa", "another run still needs it"
    assert model.lm.config._attn_implementation == "sdpa"
    monkeypatch.setattr(policies.Streaming, "rank", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ev.generate(model, random_prompt(20), "streaming", BUDGET, 60, progress=False)
    assert model.lm.config._attn_implementation == "sdpa"


def test_an_ordinary_call_during_a_run_is_not_watched():
    model = tiny_model("qwen3")
    with attention.through_seam(model, (1,)) as seam:
        model.lm(torch.tensor([[1, 2, 3]]))
        assert seam.hidden == {}


@pytest.mark.skipif(not models.flash_available(), reason="needs a GPU with flash-attn")
def test_flash_equals_sdpa():
    """The kernel with counts against the mask, in bfloat16 on the same GPU."""
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    model.lm.to("cuda")
    (masked,) = evicting_run(model, [random_prompt(30)], "streaming", BUDGET, 60)
    model.lm.config._attn_implementation = "flash_attention_2"
    (counted,) = evicting_run(model, [random_prompt(30)], "streaming", BUDGET, 60)
    assert torch.allclose(masked.logits[0], counted.logits[0], atol=0.1)


def test_the_oracle_itself_equals_the_library():
    """With nothing hidden, the oracle's pass is the model's own."""
    import numpy as np

    model, tokens = tiny_model("llama"), random_prompt(50)
    causal = np.broadcast_to(np.tril(np.ones((50, 50), dtype=bool)), (4, 2, 50, 50))
    with torch.inference_mode():
        plain = model.lm(torch.tensor([tokens]), use_cache=False).logits[0]
    assert torch.allclose(full_pass(model, tokens, causal), plain, atol=1e-10)
