"""VaSE (arXiv 2606.03928): keep the few value states of abnormal range, and prefer sampling to the top."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from epiviz import signals
from epiviz.policies.base import Policy, Ranking, Slots, label, register
from epiviz.policies.compose import ReserveValues, Sample
from epiviz.policies.snapkv import SnapKV


@register("vase-attnv")
def vase_attnv(
    value_share: float = 0.25, statistic: str = "range", temperature: float = 1.0, window: int = 64, pool: int = 5
) -> ReserveValues:
    """Reserved value slots, the rest sampled by attention (VaSE-AttnV, section 4.1).

    ``round(value_share · total)`` slots, sinks included, go to the largest value ranges of each head; the others are
    drawn without replacement with SnapKV's attention as weights.
    """
    given = (value_share, statistic, temperature, window, pool)
    defaults = zip(inspect.signature(vase_attnv).parameters.items(), given, strict=True)
    title = label("vase-attnv", {name: (value, parameter.default) for (name, parameter), value in defaults})
    return ReserveValues(Sample(SnapKV(window, pool), temperature), value_share, statistic, title=title)


@register("vase-dkv")
@dataclass(frozen=True)
class VaseDKV(Policy):
    """Leverage scores of keys and values in a fresh random projection at each eviction (VaSE-DKV, section 4.2).

    ``‖k G‖² · ‖v G‖²`` with one ``G ~ N(0, 1/rank)`` of ``head_dim × rank`` per sample, layer and event, shared by the
    layer's KV heads and by keys and values.

    Parameters
    ----------
    size : int
        Columns of the projection (r = 20 in the public code).
    """

    size: int = 20

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        projection = draws.normal(slots.layers, slots.keys.shape[-1], self.size) / self.size**0.5
        # Layer by layer: a float32 copy of a whole half-precision cache would double its memory.
        layers = zip(slots.keys, slots.values, projection, strict=True)
        return Ranking(torch.stack([leverage(*layer) for layer in layers]))


def leverage(keys: torch.Tensor, values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Return ``‖k G‖² · ‖v G‖²``.

    Parameters
    ----------
    keys, values : ``[rows, kv_heads, n, head_dim]``
    projection : ``[rows, head_dim, size]``

    Returns
    -------
    ``[rows, kv_heads, n]``
    """
    keys, values = signals.at_least_float32(keys), signals.at_least_float32(values)
    projection = projection.to(keys.dtype).unsqueeze(1)
    return (keys @ projection).square().sum(-1) * (values @ projection).square().sum(-1)
