"""Policies that rank keys by their geometry alone: KeyDiff and KNorm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz import signals
from epiviz.policies.base import Policy, Ranking, Slots, register
from epiviz.policies.scoring import unit_keys


@register("keydiff")
@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keep the keys that differ most from the mean direction of all keys (arXiv 2504.15364, section 3)."""

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(torch.stack([-cosine_to_mean(keys) for keys in slots.keys]))


@register("knorm")
@dataclass(frozen=True)
class KNorm(Policy):
    """Keep the keys of smallest norm (arXiv 2406.11430, section 3)."""

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(torch.stack([-signals.channel_norm(keys) for keys in slots.keys]))


def cosine_to_mean(keys: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each key with the mean of the unit keys, ``[…, n]`` from ``[…, n, head_dim]``."""
    unit = unit_keys(keys)
    return torch.nn.functional.cosine_similarity(unit, unit.mean(-2, keepdim=True), dim=-1)
