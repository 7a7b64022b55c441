"""EpiKV (arXiv 2606.26472): keep the tokens at which the residual stream jumps.

A token's score is the causal z-score of its displacement at a middle layer minus that at an upper-middle layer. It
is computed once, when the token enters the cache, and then frozen; every layer and head keeps the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz import signals
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register


@register("epikv")
@dataclass(frozen=True)
class EpiKV(Policy):
    """Keep the highest epiphany scores ``z_low(t) − z_high(t)`` (EpiKV, section 3).

    Parameters
    ----------
    layers : (int, int), optional
        The two decoder blocks; 10 and 21 of 32, scaled to the model's depth, if not given.
    window : int
        Trailing displacements of the z-score, the current one included.

    Notes
    -----
    The public code keeps min(128, budget / 4) recent tokens, protects the prompt and evicts one token per step; here
    these are the budget's ``recent``, ``protect_prompt`` and ``buffer``. It also rotates every token after the first
    eviction at one frozen position, in bfloat16 norms; here positions stay absolute and norms are float32.
    """

    layers: tuple[int, int] | None = None
    window: int = signals.WINDOW

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must hold at least 2 displacements, got {self.window}")
        if self.layers is not None and (len(self.layers) != 2 or self.layers[0] == self.layers[1]):
            raise ValueError(f"layers must be two different decoder blocks, got {self.layers}")

    def _layers(self, depth: int) -> tuple[int, int]:
        layers = self.layers or signals.reference_layers(depth)
        for layer in layers:
            if not 0 <= layer < depth:
                raise ValueError(f"layer {layer} does not exist: the model has layers 0 … {depth - 1}")
        return layers

    def needs(self, shape) -> Needs:
        return Needs(hidden=self._layers(shape.layers), tracks={"score": torch.float32})

    def observe(self, new: New, state: State) -> None:
        previous = None if new.first and new.prompt else state["previous"].unbind(1)
        order = self.layers or sorted(new.hidden)
        hidden = [new.hidden[layer] for layer in order]
        steps = torch.stack(
            [signals.displacement(h, None if previous is None else previous[i]) for i, h in enumerate(hidden)], dim=1
        )
        # The window starts empty at the prompt's and at the generated part's first token.
        history = None if new.first else state["window"]
        z = signals.causal_zscore(steps, self.window, history)
        new.write("score", (z[:, 0] - z[:, 1])[None, :, None, :])
        state["previous"] = torch.stack([h[:, -1] for h in hidden], dim=1)
        state["window"] = signals.rolling_windows(steps, self.window, history)[..., -1, 1:]

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.tracks["score"])
