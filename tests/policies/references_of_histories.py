"""Scores that accumulate, or are frozen, while tokens come in: one head, one query, one channel at a time.

Each function takes a policy, of which it reads the parameters alone, and a :class:`History`; it returns the priorities
``[layers, rows, kv_heads, n]`` of the slots that are left.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from arithmetic import Vector, attention, mean, norm, per_part, rolling_mean, scoped, spread, zscore
from hypothesis import assume


@dataclass
class History:
    """Everything a policy saw: float64 ``[layers, rows, heads, tokens, size]``, and ``[rows, tokens, channels]``."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    hidden: dict[int, np.ndarray]
    prompt: int
    events: list
    held: np.ndarray  # int64 [layers, rows, kv_heads, n]: the positions that are left
    budget: object

    @property
    def tokens(self) -> int:
        return self.keys.shape[3]

    def seen_by(self, layer: int, row: int, head: int) -> Iterator[list[int]]:
        """Yield the positions that each token's queries saw, itself last."""
        alive, events = [], list(self.events)
        for position in range(self.tokens):
            if events and events[0][0] == position:
                alive = events.pop(0)[1][layer, row, head].tolist()
            alive = [*alive, position]
            yield alive

    def of_held(self, score: Callable[[int, int, int], Vector]) -> np.ndarray:
        """Look up the scores of the slots that are left, from a list per head with one entry per token."""
        out = np.empty(self.held.shape)
        for place in np.ndindex(self.held.shape[:3]):
            scores = score(*place)
            out[place] = [scores[position] for position in self.held[place]]
        return out

    def attention(self, layer: int, row: int, head: int, scope: str) -> Iterator[dict[int, float]]:
        """Yield what each query gave each position: summed over a group, or averaged over a layer's or all heads."""
        layers, _, kv_heads = self.held.shape[:3]
        group = self.queries.shape[2] // kv_heads
        everywhere = {
            "head": [(layer, head)],
            "layer": [(layer, h) for h in range(kv_heads)],
            "global": [(a, h) for a in range(layers) for h in range(kv_heads)],
        }[scope]
        for position, alive in enumerate(self.seen_by(layer, row, head)):
            total = dict.fromkeys(alive, 0.0)
            for a, h in everywhere:
                keys = [self.keys[a, row, h, p].tolist() for p in alive]
                for query in range(h * group, (h + 1) * group):
                    weights = attention(self.queries[a, row, query, position].tolist(), keys, [True] * len(keys))
                    for p, w in zip(alive, weights, strict=True):
                        total[p] += w if scope == "head" else w / group / len(everywhere)
            yield total


def h2o(policy, history):
    def score(layer, row, head):
        mass = [0.0] * history.tokens
        for position, received in enumerate(history.attention(layer, row, head, policy.scope)):
            if position < history.prompt and not policy.prompt_rows:
                continue
            if policy.accumulate == "decay":
                mass = [policy.decay * m for m in mass]
            for p, w in received.items():
                mass[p] += w
        if policy.accumulate == "mean":
            return [m / (history.tokens - p) for p, m in enumerate(mass)]
        return mass

    return history.of_held(score)


def raas(policy, history):
    def score(layer, row, head):
        stamps = list(range(history.tokens))
        for position, received in enumerate(history.attention(layer, row, head, policy.scope)):
            counted = sorted((w for p, w in received.items() if p >= history.prompt and w > 0), reverse=True)
            if position < history.prompt or not counted:
                continue
            threshold = counted[min(math.floor(len(counted) * policy.share), len(counted) - 1)]
            assume(all(w == threshold or abs(w - threshold) > 1e-12 for w in counted))
            assume(counted.count(threshold) == 1)  # ties up to rounding: either answer is right
            for p, w in received.items():
                if p >= history.prompt and w >= threshold:
                    stamps[p] = position
        return stamps

    return history.of_held(score)


def displacement(history, row: int, layer: int) -> Vector:
    states = history.hidden[layer][row].tolist()
    steps = itertools.pairwise(states)
    return [0.0, *(norm([b - a for a, b in zip(old, new, strict=True)]) for old, new in steps)]


def band(history, row: int, layers) -> Vector:
    first, last = (layers, layers) if isinstance(layers, int) else layers
    return mean([displacement(history, row, layer) for layer in range(first, last + 1)])


def of_hidden_states(policy, history, combine: Callable, statistic: Callable) -> np.ndarray:
    def score(layer, row, head):
        low, high = (
            per_part(statistic, band(history, row, layers), history.prompt, policy.window) for layers in policy.layers
        )
        return [combine(a, b) for a, b in zip(low, high, strict=True)]

    return history.of_held(score)


def epikv(policy, history):
    return of_hidden_states(policy, history, lambda a, b: a - b, zscore)


def epikv_mean(policy, history):
    return of_hidden_states(policy, history, lambda a, b: a - b, rolling_mean)


def epikv_band(policy, history):
    low, high = policy.weights_of_bands
    return of_hidden_states(policy, history, lambda a, b: low * a - high * b, zscore)


def epikv_attn(policy, history):
    @dataclass
    class Sum:
        accumulate = "sum"
        prompt_rows = True
        scope = "head"

    def scaled(x):
        inside = x[..., history.budget.front : x.shape[-1] - history.budget.recent]
        low, high = inside.min(-1, keepdims=True), inside.max(-1, keepdims=True)
        assume(inside.shape[-1] == 1 or (high - low).min() > 1e-3)
        return (x - low) / (high - low + 1e-9)

    z = of_hidden_states(policy, history, lambda a, b: a, zscore)
    return scaled(scoped(h2o(Sum(), history), policy.scope)) + scaled(z)


def of_new_tensors(tensor: np.ndarray, policy, history) -> np.ndarray:
    variance = scoped(np.var(tensor, axis=-1, ddof=1), policy.scope)
    return history.of_held(
        lambda *place: per_part(rolling_mean, variance[place].tolist(), history.prompt, policy.window)
    )


def key_variance(policy, history):
    return of_new_tensors(history.keys, policy, history)


def value_variance(policy, history):
    return of_new_tensors(history.values, policy, history)


def epikv_lag(policy, history):
    """Frozen: chunks of positions, each on the scale of the one before; the first on the scale of what came so far."""
    total = 0.0
    for tensor in (history.keys, history.values) if policy.name == "epikv-lag" else (history.keys,):
        x = np.broadcast_to(tensor.mean(0), tensor.shape) if policy.layers_first else tensor
        scores = np.empty(x.shape[:-1])
        for layer, row, head, t in np.ndindex(scores.shape):
            tokens, start = x[layer, row, head].tolist(), t // policy.chunk * policy.chunk
            if start:
                scores[layer, row, head, t] = spread(tokens[t], tokens[start - policy.chunk : start])
            elif policy.first_chunk == "raw":
                scores[layer, row, head, t] = statistics.stdev(tokens[t])
            else:
                scores[layer, row, head, t] = spread(tokens[t], tokens[: t + 1])
        total = total + scores
    score = scoped(total, policy.scope)
    return history.of_held(lambda *place: score[place])
