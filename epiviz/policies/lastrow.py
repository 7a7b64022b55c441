"""Policies that look at the attention of the current query alone: TOVA and LongFlow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.choices import check_choice
from epiviz.policies.base import Needs, Policy, Ranking, Slots, register
from epiviz.policies.scoring import SCOPES, average, current_row, group_mean
from epiviz.signals import at_least_float32


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

    Parameters
    ----------
    scope : {"head", "layer", "global"}
        Average both factors over what the scope shares before multiplying, as the EpiKV harness does over all heads.
    """

    scope: str = "head"

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, SCOPES)

    def needs(self, shape) -> Needs:
        return Needs(queries=1)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        heads = slots.values.shape[2]
        attention = torch.stack([group_mean(current_row(slots, layer), heads) for layer in range(slots.layers)])
        size = torch.stack([torch.linalg.vector_norm(at_least_float32(v), ord=1, dim=-1) for v in slots.values])
        return Ranking(average(attention, self.scope) * average(size, self.scope))
