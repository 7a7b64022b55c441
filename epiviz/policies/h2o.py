"""H2O (arXiv 2306.14048): keep the tokens that received most attention so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.choices import check_choice
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register
from epiviz.policies.scoring import SCOPES, attention_received
from epiviz.signals import SCORE_DTYPES


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
    scope : {"head", "layer", "global"}
        Attention summed over the query heads of each KV head, or averaged over a layer's heads, or over all heads.
    prompt_rows : bool
        Let the prompt's queries count.
    score_dtype : {"float32", "bfloat16"}
        Precision of the sum; a bfloat16 one stalls at about 256 times what is added per step.

    Notes
    -----
    The paper's budget is half heavy hitters, half recent tokens: set the budget's ``recent`` for it.
    """

    accumulate: str = "sum"
    decay: float = 0.99
    scope: str = "head"
    prompt_rows: bool = True
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choice("accumulate", self.accumulate, ("sum", "mean", "decay"))
        check_choice("scope", self.scope, SCOPES)
        check_choice("score_dtype", self.score_dtype, SCORE_DTYPES)
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {self.decay}")

    def needs(self, shape) -> Needs:
        return Needs(rows=True, tracks={"mass": getattr(torch, self.score_dtype)})

    def observe(self, new: New, state: State) -> None:
        if new.prompt and not self.prompt_rows:
            return
        mass = new.track("mass")
        layers, _, kv_heads, _ = mass.shape
        for shared, received in attention_received(new, layers, kv_heads, self.scope):
            self._add(mass[shared], received)

    def _add(self, mass: torch.Tensor, received: torch.Tensor) -> None:
        """Add the rows ``[rows, kv_heads or 1, q, n]`` of the new queries to a sum, in place."""
        kept = self.decay if self.accumulate == "decay" else 1.0
        if self.score_dtype == "bfloat16":  # query by query: it is the sum that is rounded
            for row in received.unbind(2):
                mass.mul_(kept).add_(row.bfloat16())
            return
        q = received.shape[2]
        # The newest query's weights count fully, the one before it has been decayed once, …
        weight = kept ** torch.arange(q - 1, -1, -1, device=mass.device, dtype=torch.float64)
        mass.mul_(kept**q).add_(torch.einsum("rhqn,q->rhn", received, weight.to(received.dtype)))

    def rank(self, slots: Slots, state, draws) -> Ranking:
        mass = slots.tracks["mass"]
        return Ranking(mass / (slots.seen - slots.positions) if self.accumulate == "mean" else mass)
