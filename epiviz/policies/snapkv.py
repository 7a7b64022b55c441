"""SnapKV (arXiv 2404.14469) at decode time, the attention score VaSE builds on: what did the last queries look at?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from epiviz.attention import attention_rows
from epiviz.choices import check_choice
from epiviz.policies.base import Needs, Policy, Ranking, Slots, register
from epiviz.policies.order import PLACE, laid_down, remember_order
from epiviz.signals import SCORE_DTYPES, at_least_float32, in_score_dtype


def window_attention(queries, keys, query_positions, key_positions, score_dtype: str = "float32") -> torch.Tensor:
    """Return the mean softmax weight that a window of queries gives each key, in one layer.

    Parameters
    ----------
    queries : ``[rows, heads, window, head_dim]``
    keys : ``[rows, kv_heads, n, head_dim]``
    query_positions : int64 ``[rows, window]``
        −1 marks an unused place.
    key_positions : int64 ``[rows, kv_heads, n]``
    score_dtype : {"float32", "bfloat16"}

    Returns
    -------
    ``[rows, heads, n]``: softmax over these keys alone, causal, averaged over the queries that see at least one.
    """
    seen = key_positions[:, :, None, :] <= query_positions[:, None, :, None]
    voters = seen.any(-1).sum(-1, keepdim=True).clamp(min=1)  # [rows, kv_heads, 1]
    groups = queries.shape[1] // keys.shape[1]
    rows = at_least_float32(attention_rows(queries, keys, seen, score_dtype))
    return in_score_dtype(rows.sum(-2) / voters.repeat_interleave(groups, dim=1), score_dtype)


def pool_neighbours(weights: torch.Tensor, width: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """Average ``[rows, heads, n]`` over ``width`` neighbours, zeros beyond the ends counted.

    Neighbours are those of the last axis or, given indices ``order`` ``[rows, kv_heads, n]``, those in that order.
    """
    if order is not None:
        order = order.repeat_interleave(weights.shape[1] // order.shape[1], dim=1)
        weights = weights.gather(-1, order)
    pooled = functional.avg_pool1d(weights, width, stride=1, padding=width // 2)
    return pooled if order is None else torch.empty_like(pooled).scatter_(-1, order, pooled)


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
    pool_over : {"position", "rank"}
        Neighbours in the text, or neighbours in the order of the previous ranking, as in VaSE's public code.
    score_dtype : {"float32", "bfloat16"}
        Precision of logits, weights and averages; bfloat16, as in the public code, makes many of them equal.
    group : {"mean", "max"}
        Over the query heads that share a KV head: their mean, as in VaSE's code, or their largest, as in R-KV's.

    Notes
    -----
    As in VaSE's code the softmax runs over the slots outside the recent ones, and prompt and sinks take part.
    """

    window: int = 64
    pool: int = 5
    pool_over: str = "position"
    score_dtype: str = "float32"
    group: str = "mean"
    weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd and at least 1, got {self.pool}")
        check_choice("pool_over", self.pool_over, ("position", "rank"))
        check_choice("score_dtype", self.score_dtype, SCORE_DTYPES)
        check_choice("group", self.group, ("mean", "max"))

    def needs(self, shape) -> Needs:
        return Needs(queries=self.window, tracks={PLACE: torch.int32} if self.pool_over == "rank" else {})

    def rank(self, slots: Slots, state, draws) -> Ranking:
        # Layer by layer: the weights of all at once would need layers · heads · window · n floats.
        scores = torch.stack([self._layer_score(slots, layer) for layer in range(slots.layers)])
        scores = functional.pad(scores, (0, slots.budget.recent))
        remember_order(slots, scores)
        return Ranking(scores)

    def _layer_score(self, slots: Slots, layer: int) -> torch.Tensor:
        old = slots.n - slots.budget.recent
        keys = slots.keys[layer, :, :, :old]
        weights = window_attention(
            slots.queries[layer], keys, slots.query_positions, slots.positions[layer, :, :, :old], self.score_dtype
        )
        order = laid_down(slots.tracks[PLACE][layer, :, :, :old]) if self.pool_over == "rank" else None
        groups = pool_neighbours(weights, self.pool, order).unflatten(1, (keys.shape[1], -1))
        return groups.mean(2) if self.group == "mean" else groups.amax(2)


@register("snapkv-prefill")
@dataclass(frozen=True)
class SnapKVPrefill(SnapKV):
    """SnapKV as published: the prompt is cut once to the budget, nothing is evicted while decoding (section 4).

    Memory grows with the generated text.
    """

    bounded: ClassVar[bool] = False

    def due(self, seen, held, budget) -> bool:
        return False
