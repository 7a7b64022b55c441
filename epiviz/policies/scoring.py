"""What several families of methods score with: shared heads, attention received, unit keys, standard scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from epiviz.attention import attention_rows
from epiviz.policies.base import New, Slots
from epiviz.signals import at_least_float32

SCOPES = {"global": (0, 2), "layer": (2,), "head": ()}  # axes of [layers, rows, kv_heads, q] that are averaged


def average(x: torch.Tensor, scope: str) -> torch.Tensor:
    """Average ``[layers, rows, kv_heads, …]`` over what the scope shares; the axes stay, with length 1."""
    return x.mean(dim=SCOPES[scope], keepdim=True) if SCOPES[scope] else x


def group_sum(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum attention rows ``[rows, heads, …]`` over the query heads of each KV head."""
    return rows.unflatten(1, (kv_heads, -1)).sum(2)


def group_mean(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Average attention rows ``[rows, heads, …]`` over the query heads of each KV head."""
    return rows.unflatten(1, (kv_heads, -1)).mean(2)


def attention_received(new: New, layers: int, kv_heads: int, scope: str) -> Iterator[tuple]:
    """Yield the attention that slots get from the new queries, ``[rows, kv_heads or 1, q, n]``, behind its layers.

    Per head: summed over a KV head's query heads, one layer at a time. Per layer: averaged over its heads. Global:
    averaged over all heads and layers, once.
    """
    total = 0.0
    for layer in range(layers):
        rows = new.rows(layer)
        if scope == "head":
            yield layer, group_sum(rows, kv_heads)
        elif scope == "layer":
            yield layer, rows.mean(1, keepdim=True)
        else:
            total = total + rows.mean(1, keepdim=True)
    if scope == "global":
        yield slice(None), total / layers


def current_row(slots: Slots, layer: int) -> torch.Tensor:
    """Return the newest query's attention over all slots of a layer, ``[rows, heads, n]``."""
    visible = torch.ones((), dtype=torch.bool, device=slots.keys.device).expand(1, 1, 1, slots.n)
    return attention_rows(slots.queries[layer], slots.keys[layer], visible)[:, :, 0]


def unit_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return keys scaled to length 1, at least float32."""
    keys = at_least_float32(keys)
    return keys / (torch.linalg.vector_norm(keys, dim=-1, keepdim=True) + 1e-8)


def standardise(scores: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return scores minus mean, over sd, of each head's candidates; constant scores give 0, infinite ones stay."""
    finite = candidates & scores.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    clean = torch.where(finite, scores, 0.0)
    mean = clean.sum(-1, keepdim=True) / count
    variance = torch.where(finite, (clean - mean).square(), 0.0).sum(-1, keepdim=True) / count
    z = (scores - mean) / variance.sqrt().clamp(min=1e-12)
    return torch.where(scores.isfinite(), z, scores)
