"""LagKV (arXiv 2504.04704): a token matters if its channels spread, measured on the scale of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.policies.base import Policy, Ranking, Slots, register
from epiviz.signals import at_least_float32


@register("lagkv")
@dataclass(frozen=True)
class LagKV(Policy):
    """LagKV under a fixed budget: the lag scores of all partitions compete for the same slots (section 3).

    The slots behind the protected ones at the front are cut into partitions of ``lag``. Each channel of a partition is
    normalised with the minimum and maximum of the next one; a token's score is the standard deviation over channels,
    softmaxed inside the partition, keys plus values. The last partition and an unfinished tail have no next one:
    they stay as long as there is room.

    Parameters
    ----------
    lag : int
        Tokens per partition.
    """

    lag: int = 128

    def __post_init__(self) -> None:
        if self.lag < 2:
            raise ValueError(f"lag must be at least 2, got {self.lag}")

    def rank(self, slots: Slots, state, draws) -> Ranking:
        front, n = slots.budget.front, slots.n
        whole = (n - front) // self.lag
        ranked = max(0, whole - 1) * self.lag  # slots that have a next partition
        # Above every score, newest highest: a tail that does not fit loses its oldest tokens.
        score = torch.arange(n, device=slots.keys.device).double().add(10.0).expand(slots.positions.shape).clone()
        if ranked:
            for layer in range(slots.layers):
                parts = [
                    x[layer, :, :, front : front + ranked + self.lag].unflatten(2, (-1, self.lag))
                    for x in (slots.keys, slots.values)
                ]
                score[layer, :, :, front : front + ranked] = sum(lag_score(part) for part in parts).flatten(2)
        return Ranking(score)


def lag_score(parts: torch.Tensor, epsilon: float = 1e-9) -> torch.Tensor:
    """Return the lag scores ``[…, partitions − 1, lag]`` of ``[rows, kv_heads, partitions, lag, head_dim]``.

    ``epsilon`` keeps a channel that is constant in the next partition finite; the original divides by zero.
    """
    parts = at_least_float32(parts)
    low, high = torch.aminmax(parts[:, :, 1:], dim=3, keepdim=True)
    scaled = (parts[:, :, :-1] - low) / (high - low + epsilon)
    return scaled.std(-1).softmax(-1)
