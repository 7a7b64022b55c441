"""What the references of scores are made of, in plain Python: nothing here is shared with the package."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(a: Vector) -> float:
    return math.sqrt(dot(a, a))


def softmax(logits: Vector) -> Vector:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def softmax_over(logits: Vector, seen: list[bool]) -> Vector:
    """Softmax over the marked entries, 0 elsewhere."""
    weights = iter(softmax([x for x, s in zip(logits, seen, strict=True) if s])) if any(seen) else iter(())
    return [next(weights) if s else 0.0 for s in seen]


def attention(query: Vector, keys: list[Vector], seen: list[bool]) -> Vector:
    return softmax_over([dot(query, key) / math.sqrt(len(query)) for key in keys], seen)


def mean(columns: list[Vector]) -> Vector:
    return [statistics.fmean(column) for column in zip(*columns, strict=True)]


def zscore(values: Vector, window: int) -> Vector:
    """Of each value in the trailing window that it ends; 0 while the window holds one value."""
    out = []
    for t, x in enumerate(values):
        last = values[max(0, t + 1 - window) : t + 1]
        out.append(0.0 if len(last) < 2 else (x - statistics.fmean(last)) / (statistics.pstdev(last) + 1e-6))
    return out


def rolling_mean(values: Vector, window: int) -> Vector:
    return [statistics.fmean(values[max(0, t + 1 - window) : t + 1]) for t in range(len(values))]


def per_part(function: Callable, values: Vector, prompt: int, window: int) -> Vector:
    """Prompt and generated part have windows of their own."""
    return function(values[:prompt], window) + function(values[prompt:], window)


def spread(token: Vector, reference: list[Vector]) -> float:
    """Standard deviation over channels, each on the scale of the reference tokens."""
    scaled = []
    for channel, x in enumerate(token):
        of_channel = [other[channel] for other in reference]
        scaled.append((x - min(of_channel)) / (max(of_channel) - min(of_channel) + 1e-9))
    return statistics.stdev(scaled)


def top(scores: dict[int, float], count: int) -> set[int]:
    """The ``count`` highest, in float32; of equal ones the newer."""
    return set(sorted(scores, key=lambda i: (np.float32(scores[i]), i), reverse=True)[:count])


def scoped(x: np.ndarray, scope: str) -> np.ndarray:
    """Average over what a scope shares."""
    axes = {"head": (), "layer": (2,), "global": (0, 2)}[scope]
    return np.broadcast_to(x.mean(axes, keepdims=True), x.shape)


SLOT, PROJECTION, LOT = 1, 2, 3  # what a number is drawn for


def uniform(*key: int) -> float:
    """A number in (0, 1) from the parts of a key, folded with SplitMix64's finaliser."""
    x = 0
    for part in key:
        x = ((x ^ part) + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return ((x >> 11) + 0.5) * 2.0**-53
