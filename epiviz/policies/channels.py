"""EpiKV's attention-free siblings (arXiv 2606.26472, section 3): statistics over the channels of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz import signals
from epiviz.choices import check_choice
from epiviz.policies.base import Needs, New, Policy, Ranking, Slots, State, register
from epiviz.policies.lagkv import lag_spread
from epiviz.policies.scoring import SCOPES, average


@dataclass(frozen=True)
class ChannelPolicy(Policy):
    """Base of the policies whose score is a statistic of keys and values.

    Parameters
    ----------
    scope : {"global", "layer", "head"}
        One score for all heads (the paper's), one per layer, or one per layer and KV head.
    """

    scope: str = "global"

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, SCOPES)

    def needs(self, shape) -> Needs:
        return Needs(tracks={"score": torch.float32})

    def rank(self, slots: Slots, state, draws) -> Ranking:
        return Ranking(slots.tracks["score"])


@dataclass(frozen=True)
class VariancePolicy(ChannelPolicy):
    """Rolling mean of the variance over channels of each new key or value, frozen when the token enters.

    Parameters
    ----------
    scope : {"global", "layer", "head"}
    window : int
        Trailing values of the rolling mean; it starts empty at the prompt's and at the generated part's first token.
    score_dtype : {"float32", "bfloat16"}
        Precision of the variance, and of its mean over a layer's heads.
    """

    window: int = signals.WINDOW
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("score_dtype", self.score_dtype, signals.SCORE_DTYPES)
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    def variance(self, new: New) -> torch.Tensor:
        raise NotImplementedError

    def observe(self, new: New, state: State) -> None:
        x = signals.in_score_dtype(self.variance(new), self.score_dtype)
        x = x if self.scope == "head" else average(x, "layer")  # layers are averaged last, in full precision
        x = average(signals.at_least_float32(x), self.scope).transpose(0, 1)  # rows first: state is kept per row
        history = None if new.first else state["window"]
        new.write("score", signals.rolling_mean(x, self.window, history).transpose(0, 1))
        state["window"] = signals.rolling_windows(x, self.window, history)[..., -1, 1:]


@register("key-variance")
@dataclass(frozen=True)
class KeyVariance(VariancePolicy):
    """Keep the tokens whose keys (rotated, as cached) have the largest variance over channels ("kv-key")."""

    def variance(self, new):
        return signals.channel_variance(new.keys)


@register("value-variance")
@dataclass(frozen=True)
class ValueVariance(VariancePolicy):
    """Keep the tokens whose values have the largest variance over channels ("kv-val")."""

    def variance(self, new):
        return signals.channel_variance(new.values)


@dataclass(frozen=True)
class LagPolicy(ChannelPolicy):
    """LagKV made causal: a chunk is measured on the scale of the chunk before it ("lag-kv").

    Each channel of a chunk of ``chunk`` tokens is normalised with minimum and maximum of the previous chunk; a
    token's score is the standard deviation over channels. The first chunk has no previous one.

    Parameters
    ----------
    scope : {"global", "layer", "head"}
    chunk : int
    frozen : bool
        Scores are computed once, over positions, as the paper says. Not frozen, they are computed again at each
        eviction over the slots that are left, whose chunk borders drift, as the public code does.
    layers_first : bool
        Average keys and values over layers before any statistic, as the public code does.
    first_chunk : {"own", "raw"}
        Normalise the first chunk with its own minimum and maximum, or take the raw standard deviation, as the public
        code does; raw values are on another scale than all later ones. A frozen first chunk only knows the tokens so
        far.

    Notes
    -----
    The public code is ``frozen=False, layers_first=True, first_chunk="raw"``.
    """

    chunk: int = 128
    frozen: bool = True
    layers_first: bool = False
    first_chunk: str = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 2:
            raise ValueError(f"chunk must be at least 2, got {self.chunk}")
        check_choice("first_chunk", self.first_chunk, ("own", "raw"))

    def tensors(self, source: New | Slots) -> dict[str, torch.Tensor]:
        """The cached tensors ``[layers, rows, kv_heads, tokens, head_dim]`` that are measured."""
        raise NotImplementedError

    def observe(self, new: New, state: State) -> None:
        if not self.frozen:
            return
        total = 0.0
        for name, x in self.tensors(new).items():
            x = signals.at_least_float32(x)
            x = x.mean(0, keepdim=True) if self.layers_first else x
            total = total + self._frozen_score(name, x, new.positions, state)
        new.write("score", average(total, self.scope))

    def _frozen_score(self, name: str, x: torch.Tensor, positions: torch.Tensor, state: State) -> torch.Tensor:
        """Score tokens one by one, carrying the minimum and maximum of the running and of the previous chunk."""
        now, before = (state.get(f"{name}-{chunk}") for chunk in ("now", "before"))
        if now is None:
            empty = torch.stack([x[:, :, :, 0] + torch.inf, x[:, :, :, 0] - torch.inf]).movedim(2, 0)
            now, before = empty, empty.clone()
        scores = []
        for t in range(x.shape[3]):
            token = x[:, :, :, t].transpose(0, 1)  # [rows, layers, kv_heads, head_dim]
            starts = (positions[:, t] % self.chunk == 0)[:, None, None, None, None]
            blank = torch.stack([token + torch.inf, token - torch.inf], dim=1)
            before, now = torch.where(starts, now, before), torch.where(starts, blank, now)
            now = torch.stack([torch.minimum(now[:, 0], token), torch.maximum(now[:, 1], token)], dim=1)
            first = (positions[:, t] < self.chunk)[:, None, None]
            bounds = torch.where(first[..., None, None], now, before)
            score = lag_spread(token, bounds[:, 0], bounds[:, 1])
            scores.append(torch.where(first, token.std(-1), score) if self.first_chunk == "raw" else score)
        state[f"{name}-now"], state[f"{name}-before"] = now, before
        return torch.stack(scores, dim=-1).transpose(0, 1)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        if self.frozen:
            return super().rank(slots, state, draws)
        total = 0.0
        for x in self.tensors(slots).values():
            layers = [x.float().mean(0)] if self.layers_first else x
            total = total + torch.stack([self._chunked_score(signals.at_least_float32(layer)) for layer in layers])
        return Ranking(average(total, self.scope))

    def _chunked_score(self, x: torch.Tensor) -> torch.Tensor:
        """Score the slots of one layer ``[rows, kv_heads, n, head_dim]`` in chunks of their present order."""
        chunks = x.split(self.chunk, dim=2)
        bounds = [torch.aminmax(chunk, dim=2, keepdim=True) for chunk in (chunks[0], *chunks[:-1])]
        scores = [lag_spread(chunk, low, high) for chunk, (low, high) in zip(chunks, bounds, strict=True)]
        if self.first_chunk == "raw":
            scores[0] = chunks[0].std(-1)
        return torch.cat(scores, dim=-1)


@register("epikv-lag")
@dataclass(frozen=True)
class EpiKVLag(LagPolicy):
    """Causal LagKV of keys plus values: the row that the paper's summary credits to EpiKV uses no hidden states."""

    def tensors(self, source):
        return {"keys": source.keys, "values": source.values}


@register("epikv-lag-key")
@dataclass(frozen=True)
class EpiKVLagKey(LagPolicy):
    """Causal LagKV of keys alone."""

    def tensors(self, source):
        return {"keys": source.keys}
