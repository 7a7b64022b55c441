"""H2O (arXiv 2306.14048): keep the tokens that received most attention so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register


@register("h2o")
@dataclass(frozen=True)
class H2O(Policy):
    """Keep the heavy hitters: the largest attention received from all queries so far, prompt included (section 4).

    Parameters
    ----------
    accumulate : {"sum", "mean", "decay"}
        Sum over all queries (the paper's; it favours old tokens, which more queries have seen), mean over the
        queries since the token was born, or a sum that forgets.
    decay : float
        What a sum keeps of itself per query, with ``accumulate="decay"``.

    Notes
    -----
    The paper's budget is half heavy hitters, half recent tokens: set the budget's ``recent`` for it. The mass of a
    KV head is summed over its query heads, in float32 (a bfloat16 sum stalls after some hundred steps).
    """

    accumulate: str = "sum"
    decay: float = 0.99

    def __post_init__(self) -> None:
        if self.accumulate not in ("sum", "mean", "decay"):
            raise ValueError(f"accumulate must be 'sum', 'mean' or 'decay', got {self.accumulate!r}")
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {self.decay}")

    def needs(self, shape) -> Needs:
        return Needs(rows=True, tracks={"mass": torch.float32})

    def observe(self, new: New, state: State) -> None:
        mass = new.track("mass")
        q = new.positions.shape[1]
        kept = self.decay if self.accumulate == "decay" else 1.0
        # The newest query's weights count fully, the one before it has been decayed once, …
        weight = kept ** torch.arange(q - 1, -1, -1, device=mass.device, dtype=torch.float64)
        for layer in range(mass.shape[0]):
            received = group_sum(new.rows(layer), mass.shape[2])  # [rows, kv_heads, q, n]
            total = torch.einsum("rhqn,q->rhn", received, weight.to(received.dtype))
            mass[layer].mul_(kept**q).add_(total)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        mass = slots.tracks["mass"]
        return Ranking(mass / (slots.seen - slots.positions) if self.accumulate == "mean" else mass)


def group_sum(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum attention rows ``[rows, heads, …]`` over the query heads of each KV head."""
    return rows.unflatten(1, (kv_heads, -1)).sum(2)


def group_mean(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Average attention rows ``[rows, heads, …]`` over the query heads of each KV head."""
    return rows.unflatten(1, (kv_heads, -1)).mean(2)
