"""Policies that look at the attention of the current query alone: TOVA and LongFlow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.attention import attention_rows
from epiviz.policies.base import Needs, Policy, Ranking, Slots, register
from epiviz.policies.h2o import group_mean
from epiviz.signals import at_least_float32


def current_row(slots: Slots, layer: int) -> torch.Tensor:
    """Return the newest query's attention over all slots of a layer, ``[rows, heads, n]``."""
    visible = torch.ones((), dtype=torch.bool, device=slots.keys.device).expand(1, 1, 1, slots.n)
    return attention_rows(slots.queries[layer], slots.keys[layer], visible)[:, :, 0]


@register("tova")
@dataclass(frozen=True)
class TOVA(Policy):
    """Keep the highest attention of the current query, averaged over a layer's heads (arXiv 2401.06104, section 3)."""

    def needs(self, shape) -> Needs:
        return Needs(queries=1)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        rows = [current_row(slots, layer).mean(1, keepdim=True) for layer in range(slots.layers)]
        return Ranking(torch.stack(rows))


@register("longflow")
@dataclass(frozen=True)
class LongFlow(Policy):
    """Keep the highest attention × ‖value‖₁ of the current query, per layer and KV head (arXiv 2603.11504).

    The EpiKV harness averages both factors over layers and heads before multiplying; here each head has its own.
    """

    def needs(self, shape) -> Needs:
        return Needs(queries=1)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        scores = []
        for layer, values in enumerate(slots.values):
            size = torch.linalg.vector_norm(at_least_float32(values), ord=1, dim=-1)
            scores.append(group_mean(current_row(slots, layer), values.shape[1]) * size)
        return Ranking(torch.stack(scores))
