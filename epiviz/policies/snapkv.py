"""SnapKV (arXiv 2404.14469) at decode time, the attention score VaSE builds on: what did the last queries look at?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from epiviz.attention import attention_rows
from epiviz.policies.base import Needs, Policy, Ranking, Slots, register


def window_attention(queries, keys, query_positions, key_positions) -> torch.Tensor:
    """Return the mean softmax weight that a window of queries gives each key, in one layer.

    Parameters
    ----------
    queries : ``[rows, heads, window, head_dim]``
    keys : ``[rows, kv_heads, n, head_dim]``
    query_positions : int64 ``[rows, window]``
        −1 marks an unused place.
    key_positions : int64 ``[rows, kv_heads, n]``

    Returns
    -------
    ``[rows, heads, n]``: softmax over these keys alone, causal, averaged over the queries that see at least one.
    """
    seen = key_positions[:, :, None, :] <= query_positions[:, None, :, None]
    voters = seen.any(-1).sum(-1, keepdim=True).clamp(min=1)  # [rows, kv_heads, 1]
    groups = queries.shape[1] // keys.shape[1]
    return attention_rows(queries, keys, seen).sum(-2) / voters.repeat_interleave(groups, dim=1)


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep what the last ``window`` queries attended to, per layer and KV head, at every eviction (VaSE, section 4.1).

    Parameters
    ----------
    window : int
        Queries that vote.
    pool : int
        Width of the average over neighbouring slots (odd; 1 switches it off). Zeros beyond the ends are counted.

    Notes
    -----
    As in VaSE's code the softmax runs over the slots outside the recent ones, query heads of a group are averaged,
    and prompt and sinks take part. Unlike there, neighbours are neighbours in time (the public code pools over the
    order of the previous ranking), and scores are float32, not bfloat16.
    """

    window: int = 64
    pool: int = 5
    weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd and at least 1, got {self.pool}")

    def needs(self, shape) -> Needs:
        return Needs(queries=self.window)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        # Layer by layer: the weights of all at once would need layers · heads · window · n floats.
        scores = torch.stack([self._layer_score(slots, layer) for layer in range(slots.layers)])
        return Ranking(functional.pad(scores, (0, slots.budget.recent)))

    def _layer_score(self, slots: Slots, layer: int) -> torch.Tensor:
        old = slots.n - slots.budget.recent
        keys = slots.keys[layer, :, :, :old]
        weights = window_attention(
            slots.queries[layer], keys, slots.query_positions, slots.positions[layer, :, :, :old]
        )
        pooled = functional.avg_pool1d(weights, self.pool, stride=1, padding=self.pool // 2)
        return pooled.unflatten(1, (keys.shape[1], -1)).mean(2)


@register("snapkv-prefill")
@dataclass(frozen=True)
class SnapKVPrefill(SnapKV):
    """SnapKV as published: the prompt is cut once to the budget, nothing is evicted while decoding (section 4).

    Memory grows with the generated text.
    """

    bounded: ClassVar[bool] = False

    def due(self, seen, held, budget) -> bool:
        return False
