"""RaaS (arXiv 2502.11147): keep what was attended to most recently."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.choices import check_choice
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register
from epiviz.policies.scoring import SCOPES, attention_received
from epiviz.signals import SCORE_DTYPES, in_score_dtype


@register("raas")
@dataclass(frozen=True)
class RaaS(Policy):
    """Drop the oldest time stamp; a slot is stamped whenever its attention is in the upper part (section 4).

    Parameters
    ----------
    share : float
        Generated slots whose attention is in the top ``share`` get the current step as their stamp (r = 50 %). A new
        slot starts with its own step.
    scope : {"head", "layer", "global"}
        Stamps per layer and KV head, or shared by the heads whose attention is then averaged.
    score_dtype : {"float32", "bfloat16"}
        Precision in which attention is compared; in bfloat16 more slots tie with the last one that is stamped.

    Notes
    -----
    The paper pins the whole prompt: set ``protect_prompt=True``. The prompt takes no part in the median. Of equal
    stamps the older token goes.
    """

    share: float = 0.5
    scope: str = "head"
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}")
        check_choice("scope", self.scope, SCOPES)
        check_choice("score_dtype", self.score_dtype, SCORE_DTYPES)

    def needs(self, shape) -> Needs:
        return Needs(rows=True, tracks={"stamp": torch.int64, "generated": torch.bool})

    def observe(self, new: New, state: State) -> None:
        new.write("stamp", new.positions[:, None, :])
        new.write("generated", torch.full_like(new.positions, not new.prompt, dtype=torch.bool)[:, None, :])
        if new.prompt:
            return
        stamp, generated = new.track("stamp"), new.track("generated")
        layers, _, kv_heads, _ = stamp.shape
        for shared, attention in attention_received(new, layers, kv_heads, self.scope):
            attention = in_score_dtype(attention, self.score_dtype)
            active = in_upper_share(attention, generated[shared].unsqueeze(-2) & (attention > 0), self.share)
            step = torch.where(active, new.positions[:, None, :, None], -1).amax(-2)
            stamp[shared] = torch.maximum(stamp[shared], step)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.tracks["stamp"].double())


def in_upper_share(x: torch.Tensor, counted: torch.Tensor, share: float) -> torch.Tensor:
    """Mark the counted entries of the last axis at or above the value that a ``share`` of them reaches.

    With half of an even number of entries this is the lower median, so more than half may be marked.
    """
    values = x.masked_fill(~counted, -torch.inf).sort(-1, descending=True).values
    count = counted.sum(-1, keepdim=True)
    place = torch.floor(count * share).long().clamp(max=x.shape[-1] - 1)
    threshold = values.gather(-1, torch.minimum(place, (count - 1).clamp(min=0)))
    return counted & (x >= threshold)
