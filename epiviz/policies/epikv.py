"""EpiKV (arXiv 2606.26472): keep the tokens at which the residual stream jumps.

A token's score compares how far the residual stream moves at two depths. It is computed once, when the token enters
the cache, and then frozen; every layer and head keeps the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz import signals
from epiviz.choices import check_choice
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register
from epiviz.policies.h2o import H2O
from epiviz.policies.scoring import SCOPES, average


@dataclass(frozen=True)
class HiddenStatePolicy(Policy):
    """Base of the policies that compare displacements at two depths.

    Parameters
    ----------
    layers : pair of int or of (int, int), optional
        The two decoder blocks, or bands of blocks (both ends included) whose displacements are averaged first. Not
        given: the reference of a 32-layer model, scaled to the model's depth.
    window : int
        Trailing displacements of the rolling statistic, the current one included.
    score_dtype : {"float32", "bfloat16"}
        Precision of displacements.
    average_rows : bool
        Average displacements over the rows of a batch, so that all get the same scores, as the public code does. A
        row then depends on its batch.

    Notes
    -----
    The public code keeps min(128, budget / 4) recent tokens, protects the prompt and evicts one token per step; here
    these are the budget's ``recent``, ``protect_prompt`` and ``buffer``. It also rotates every token after the first
    eviction at one frozen position, and takes norms in bfloat16; here positions stay absolute and norms are float32.
    :func:`epiviz.policies.paper_harness` sets all of it.
    """

    layers: tuple | None = None
    window: int = signals.WINDOW
    score_dtype: str = "float32"
    average_rows: bool = False

    def __post_init__(self) -> None:
        check_choice("score_dtype", self.score_dtype, signals.SCORE_DTYPES)
        if self.window < 2:
            raise ValueError(f"window must hold at least 2 displacements, got {self.window}")
        if self.layers is not None and (len(self.layers) != 2 or self.layers[0] == self.layers[1]):
            raise ValueError(f"layers must be two different decoder blocks or bands, got {self.layers}")

    def reference(self, depth: int) -> tuple:
        """Return the two layers or bands that the paper names, for a model of ``depth`` blocks."""
        return signals.reference_layers(depth)

    def score(self, moves: torch.Tensor, history: torch.Tensor | None) -> torch.Tensor:
        """Turn displacements ``[rows, 2, q]`` and the window before them into scores ``[rows, q]``."""
        raise NotImplementedError

    def bands(self, depth: int) -> list[range]:
        """Return the blocks of both depths; raise if the model lacks one."""
        bands = []
        for band in self.layers or self.reference(depth):
            first, last = (band, band) if isinstance(band, int) else band
            if not 0 <= first <= last < depth:
                raise ValueError(f"layer {last} does not exist: the model has layers 0 … {depth - 1}")
            bands.append(range(first, last + 1))
        return bands

    def needs(self, shape) -> Needs:
        low, high = self.bands(shape.layers)
        return Needs(hidden=tuple(sorted({*low, *high})), tracks={"score": torch.float32})

    def observe(self, new: New, state: State) -> None:
        bands = self.bands(new.depth)
        layers = sorted({*bands[0], *bands[1]})
        hidden = torch.stack([new.hidden[layer] for layer in layers], dim=1)  # [rows, layers, q, channels]
        previous = None if new.first and new.prompt else state["previous"]
        moves = signals.displacement(hidden, previous, self.score_dtype)
        if self.average_rows:
            moves = moves.mean(0, keepdim=True).expand_as(moves)
        moves = torch.stack([moves[:, [layers.index(layer) for layer in band]].mean(1) for band in bands], dim=1)
        # The window starts empty at the prompt's and at the generated part's first token.
        history = None if new.first else state["window"]
        new.write("score", self.score(moves, history)[None, :, None, :])
        state["previous"] = hidden[:, :, -1]
        state["window"] = signals.rolling_windows(moves, self.window, history)[..., -1, 1:]

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.tracks["score"])


@register("epikv")
@dataclass(frozen=True)
class EpiKV(HiddenStatePolicy):
    """Keep the highest epiphany scores ``z_low(t) − z_high(t)``, layers 10 and 21 of 32 (EpiKV, section 3)."""

    def score(self, moves, history):
        z = signals.causal_zscore(moves, self.window, history)
        return z[:, 0] - z[:, 1]


@register("epikv-mean")
@dataclass(frozen=True)
class EpiKVMean(HiddenStatePolicy):
    """Keep the highest difference of rolling means, without a z-score ("HS-variance" in EpiKV, section 3).

    The layer of larger norms dominates, and opposite drifts make it keep the oldest tokens.
    """

    def score(self, moves, history):
        mean = signals.rolling_mean(moves, self.window, history)
        return mean[:, 0] - mean[:, 1]


@register("epikv-band")
@dataclass(frozen=True)
class EpiKVBand(HiddenStatePolicy):
    """Keep the highest weighted difference of two bands' z-scores, bands 7–13 and 18–25 of 32 (EpiKV, section 4).

    Displacements are averaged over a band's layers first, then z-scored once.

    Parameters
    ----------
    weights_of_bands : (float, float)
        1.29 is the ratio of the correlations of layers 10 and 21 on the paper's MATH-500 traces.
    """

    weights_of_bands: tuple[float, float] = (1.29, 1.0)

    def reference(self, depth):
        return signals.reference_bands(depth)

    def score(self, moves, history):
        z = signals.causal_zscore(moves, self.window, history)
        low, high = self.weights_of_bands
        return low * z[:, 0] - high * z[:, 1]


@register("epikv-attn")
@dataclass(frozen=True)
class EpiKVAttention(HiddenStatePolicy):
    """Keep the highest sum of cumulative attention and z_low, each scaled to 0 … 1 ("attn × HS", EpiKV, section 4).

    The paper's table calls it a product; its code adds. Attention is H2O's sum over all queries so far.

    Parameters
    ----------
    layers : as above
        Only the first is used.
    window : int
    scope : {"global", "layer", "head"}
        What the cumulative attention is averaged over; the paper uses one score for all heads.
    """

    scope: str = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scope", self.scope, SCOPES)

    def needs(self, shape) -> Needs:
        return super().needs(shape) | H2O().needs(shape)

    def observe(self, new: New, state: State) -> None:
        super().observe(new, state)
        H2O().observe(new, state)

    def score(self, moves, history):
        return signals.causal_zscore(moves, self.window, history)[:, 0]

    def rank(self, slots: Slots, state, draws) -> Ranking:
        mass = average(slots.tracks["mass"], self.scope)
        score = average(slots.tracks["score"], self.scope)
        return Ranking(min_max(mass, slots.candidates) + min_max(score, slots.candidates))


def min_max(x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Scale ``x`` so that the counted entries of the last axis span 0 … 1."""
    low = torch.where(counted, x, torch.inf).amin(-1, keepdim=True)
    high = torch.where(counted, x, -torch.inf).amax(-1, keepdim=True)
    return (x - low) / (high - low + 1e-9)
