"""The oracle: a full-length forward pass whose mask hides exactly what a Retention says was evicted."""

from __future__ import annotations

import numpy as np
import torch
from tiny import fitting
from transformers import AttentionInterface

from epiviz.decode import Sampler, decode
from epiviz.engine import Row, Session, make_rows
from epiviz.retention import Retention

_VISIBLE: list[torch.Tensor] = []  # bool [layers, kv_heads, tokens, tokens] of the pass in progress
_WEIGHTS: list[torch.Tensor] = []  # [heads, tokens, tokens] per layer of the last pass


def _masked_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Plain attention with one mask per layer and KV head."""
    groups = query.shape[1] // key.shape[1]
    visible = _VISIBLE[0][module.layer_idx].repeat_interleave(groups, 0)[None]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = (query @ key.transpose(2, 3)) * scaling
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    _WEIGHTS.append(weights[0])
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("oracle", _masked_attention)


def full_pass(model, tokens: list[int], visible: np.ndarray, positions=None) -> torch.Tensor:
    """Return the logits ``[tokens, vocabulary]`` of one pass without any cache, under a mask per layer and head."""
    config = model.lm.config
    before = config._attn_implementation
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    _VISIBLE[:] = [torch.from_numpy(np.array(visible))]
    _WEIGHTS.clear()
    config._attn_implementation = "oracle"
    try:
        with torch.inference_mode():
            return model.lm(
                input_ids=torch.tensor([tokens]), position_ids=torch.tensor(positions)[None], use_cache=False
            ).logits[0]
    finally:
        config._attn_implementation = before
        _VISIBLE.clear()


def within_windows(model, visible: np.ndarray) -> np.ndarray:
    """Return the masks with those of sliding layers cut to their window."""
    visible = visible.copy()
    token = np.arange(visible.shape[-1])
    for layer in model.shape.slides:
        visible[layer] &= token[:, None] - token < model.shape.window
    return visible


def attention_weights(model, tokens: list[int], visible: np.ndarray) -> torch.Tensor:
    """Return the eager attention weights ``[layers, heads, tokens, tokens]`` of a masked full pass."""
    full_pass(model, tokens, visible)
    return torch.stack(_WEIGHTS)


class SpySampler(Sampler):
    """Greedy, and remembers the logits each token was drawn from."""

    def draw(self, logits, seed, rows):
        for row, own in zip(rows, logits, strict=True):
            row.__dict__.setdefault("logits", []).append(own.clone())
        return super().draw(logits, seed, rows)


class WatchedSession(Session):
    """A session that looks at the cache around every event."""

    def _evict(self, rows, indices, cache, ring, state):
        budget, n = rows[0].budget, cache.held[indices[0]]
        before = {name: x.clone() for name, x in cache.slots(indices, n).items()}
        super()._evict(rows, indices, cache, ring, state)
        kept = cache.held[indices[0]]
        after = cache.slots(indices, kept)
        positions, earlier = after["position"], before["position"]
        assert (positions.diff(dim=-1) > 0).all(), "slots are sorted and distinct in every head"
        assert kept <= budget.total or not self.policy.bounded
        front = torch.arange(min(budget.front, n))
        assert torch.equal(positions[..., : len(front)], front.expand_as(positions[..., : len(front)]))
        newest = earlier[..., n - budget.recent :]
        assert torch.equal(positions[..., kept - budget.recent :], newest), "recent tokens stay"
        assert (newest < max(cache.seen[i] for i in indices)).all(), "no slot but of a token that was seen"
        source = torch.searchsorted(earlier.contiguous(), positions.contiguous())
        assert torch.equal(earlier.gather(3, source), positions), "nothing is kept that was not there"
        for name, x in after.items():
            if name in ("reason", "place") or (name == "keys" and self.rotary is not None):
                continue
            index = source if x.dim() == 4 else source[..., None].expand_as(x)
            assert torch.equal(before[name].gather(3, index), x), f"kept {name} move bit for bit"


def evicting_run(model, prompts, policy, budget, new_tokens, seed=0, positions="absolute") -> list[Row]:
    """Generate greedily through the engine; the rows carry ``logits`` beside tokens, retention and meter."""
    policy = fitting(policy)
    rows = make_rows(prompts, policy, budget, new_tokens)
    with WatchedSession(model, policy, rows, new_tokens, seed, positions) as session:
        decode(session, SpySampler())
    return rows


def seen(run, retention: Retention | None = None) -> np.ndarray:
    """Return what each query of a row, run or replay saw: what was not evicted, or what a selection attended."""
    return (retention or run.retention).visible() if run.attended is None else run.attended.visible()


def deviation(model, row: Row, retention: Retention | None = None, positions=None) -> float:
    """Return the largest difference between a row's logits and the oracle's, over all generated tokens."""
    visible, retention = seen(row, retention), retention or row.retention
    positions = retention.positions if positions is None else positions
    fed = row.prompt + row.tokens[:-1]
    assert retention.tokens == len(fed)
    logits = full_pass(model, fed, within_windows(model, visible), positions)
    mine = torch.stack(row.logits)
    return (logits[len(row.prompt) - 1 :] - mine).abs().max().item()
