"""Scores that follow from what a cache holds at an eviction: one head, one slot, one channel at a time.

Each function takes a policy, of which it reads the parameters alone, and a :class:`Case`; it returns priorities
``[layers, rows, kv_heads, n]``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from arithmetic import (
    LOT,
    PROJECTION,
    SLOT,
    Vector,
    attention,
    dot,
    mean,
    norm,
    scoped,
    softmax,
    softmax_over,
    spread,
    top,
    uniform,
)
from hypothesis import assume

from epiviz.draws import Draws
from epiviz.policies import Slots

LOWEST = float(np.finfo(np.float32).min)


@dataclass
class Case:
    """Slots, and the key of their random numbers."""

    slots: Slots
    seed: int
    samples: list[int]
    events: list[int]

    @property
    def draws(self) -> Draws:
        return Draws(self.seed, self.samples, self.events, self.slots.keys.device)

    def heads(self) -> Iterator[Head]:
        layers, rows, kv_heads, *_ = self.slots.keys.shape
        for index in np.ndindex(layers, rows, kv_heads):
            yield Head(self, *index)

    def per_head(self, score: Callable[[Head], Vector]) -> np.ndarray:
        out = np.empty(tuple(self.slots.positions.shape))
        for head in self.heads():
            out[head.layer, head.row, head.head] = score(head)
        return out


@dataclass
class Head:
    """One KV head of one row and layer, in lists."""

    case: Case
    layer: int
    row: int
    head: int

    def __post_init__(self) -> None:
        slots, place = self.case.slots, (self.layer, self.row, self.head)
        self.budget, self.n = slots.budget, slots.n
        self.old = slots.n - slots.budget.recent
        self.keys, self.values = slots.keys[place].tolist(), slots.values[place].tolist()
        self.positions = slots.positions[place].tolist()
        self.candidates = slots.candidates.flatten().nonzero().flatten().tolist()
        group = slots.queries.shape[2] // slots.keys.shape[2]
        mine = slice(self.head * group, (self.head + 1) * group)
        self.queries = slots.queries[self.layer, self.row, mine].tolist()  # [group][window]
        self.query_positions = slots.query_positions[self.row].tolist()

    def uniform(self, purpose: int) -> Vector:
        key = self.case.seed, self.case.samples[self.row], self.case.events[self.row], purpose, self.layer, self.head
        return [uniform(*key, position) for position in self.positions]

    def gumbel(self) -> Vector:
        return [-math.log(-math.log(u)) for u in self.uniform(SLOT)]

    def newest_row(self) -> Vector:
        """Attention of the newest query, averaged over the group's heads."""
        return mean([attention(queries[0], self.keys, [True] * self.n) for queries in self.queries])


def recency(policy, case):
    return case.per_head(lambda head: head.positions)


def random(policy, case):
    if policy.scope == "head":
        return case.per_head(lambda head: head.uniform(SLOT))

    def one_for_all_heads(head):
        positions = case.slots.positions[0, head.row, 0].tolist()  # all heads hold the same tokens
        key = case.seed, case.samples[head.row], case.events[head.row], SLOT
        return [uniform(*key, position) for position in positions]

    return case.per_head(one_for_all_heads)


def snapkv(policy, case):
    def score(head):
        pooled = []
        for queries in head.queries:
            rows = []
            for query, position in zip(queries, head.query_positions, strict=True):
                seen = [p <= position for p in head.positions[: head.old]]
                if any(seen):
                    rows.append(attention(query, head.keys[: head.old], seen))
            weights = mean(rows) if rows else [0.0] * head.old
            reach = policy.pool // 2
            padded = [0.0] * reach + weights + [0.0] * reach
            pooled.append([sum(padded[i : i + policy.pool]) / policy.pool for i in range(head.old)])
        largest = getattr(policy, "group", "mean") == "max"
        grouped = [max(column) for column in zip(*pooled, strict=True)] if largest else mean(pooled)
        return grouped + [0.0] * head.budget.recent

    return case.per_head(score)


def tova(policy, case):
    return scoped(case.per_head(Head.newest_row), "layer")


def longflow(policy, case):
    size = case.per_head(lambda head: [sum(map(abs, value)) for value in head.values])
    return scoped(case.per_head(Head.newest_row), policy.scope) * scoped(size, policy.scope)


def unit(key: Vector) -> Vector:
    """A key of length 1; 1e-8 more in the length, as in VaSE's code, keeps a key of zeros finite."""
    return [x / (norm(key) + 1e-8) for x in key]


def cosines(keys: list[Vector]) -> list[Vector]:
    """Similarity of every pair, 0 on the diagonal."""
    units = [unit(key) for key in keys]
    return [[0.0 if i == j else dot(a, b) for j, b in enumerate(units)] for i, a in enumerate(units)]


def rkv(policy, case):
    def standardised(scores, candidates):
        inside = [scores[i] for i in candidates]
        return [(x - statistics.fmean(inside)) / max(statistics.pstdev(inside), 1e-12) for x in scores]

    def score(head):
        rows = []
        for w, position in enumerate(head.query_positions):
            seen = [p <= position for p in head.positions[: head.old]]
            if any(seen):
                group = [[dot(q[w], key) / math.sqrt(len(key)) for key in head.keys[: head.old]] for q in head.queries]
                rows.append(softmax_over([max(logits) for logits in zip(*group, strict=True)], seen))
        weights, reach = mean(rows) if rows else [0.0] * head.old, policy.pool // 2
        importance = [max(weights[max(0, i - reach) : i + reach + 1]) for i in range(head.old)]
        importance += [0.0] * head.budget.recent
        similar = cosines(head.keys)
        for row in similar:
            assume(all(abs(x - policy.threshold) > 1e-9 for x in row))
            copies = [j for j, x in enumerate(row) if x > policy.threshold]
            if copies:
                row[copies[-1]] = 0.0
        redundancy = softmax(mean(similar))
        if policy.standardise:
            for x in (importance, redundancy):
                inside = [x[i] for i in head.candidates]
                assume(max(inside) - min(inside) > 1e-6 or len(inside) == 1)
            importance, redundancy = (standardised(x, head.candidates) for x in (importance, redundancy))
        return [policy.balance * i - (1 - policy.balance) * r for i, r in zip(importance, redundancy, strict=True)]

    return case.per_head(score)


def rkv_simple(policy, case):
    def redundancy(head):
        return softmax(mean(cosines(head.keys[: head.old]))) + [0.0] * head.budget.recent

    return policy.balance * snapkv(policy, case) - (1 - policy.balance) * case.per_head(redundancy)


def keydiff(policy, case):
    def score(head):
        units = [unit(key) for key in head.keys]
        centre = mean(units)
        assume(norm(centre) == 0 or norm(centre) > 1e-3)  # directions that cancel have no mean
        return [-dot(u, centre) / norm(u) / norm(centre) if norm(u) and norm(centre) else 0.0 for u in units]

    return case.per_head(score)


def knorm(policy, case):
    return case.per_head(lambda head: [-norm(key) for key in head.keys])


def leverage(case, size: int, fixed: bool, local: int):
    def score(head):
        channels = len(head.keys[0])
        key = case.seed, case.samples[head.row], 0 if fixed else case.events[head.row], PROJECTION, head.layer
        count = channels * size
        draw = [
            math.sqrt(-2 * math.log(uniform(*key, i))) * math.cos(2 * math.pi * uniform(*key, count + i))
            for i in range(count)
        ]
        columns = [[draw[c * size + j] / math.sqrt(size) for c in range(channels)] for j in range(size)]
        columns = columns or np.eye(channels).tolist()  # size 0: no projection
        product = [1.0] * head.n
        for vectors in (head.keys, head.values):
            squares = [sum(dot(x, column) ** 2 for column in columns) for x in vectors]
            for i, square in enumerate(squares):
                first = i - i % local if local else 0
                total = sum(squares[first : first + local]) if local else 1.0
                product[i] *= square / total if total else 0.0
        return product

    return case.per_head(score)


def vase_dkv(policy, case):
    return leverage(case, policy.size, fixed=False, local=0)


def curdkv(policy, case):
    return leverage(case, policy.size, fixed=True, local=policy.local)


STATISTICS = {
    "range": lambda v: max(v) - min(v),
    "variance": statistics.variance,
    "norm": norm,
}


def race(weights: np.ndarray, case, temperature: float) -> np.ndarray:
    """Exponential race of non-negative weights, in logarithms; those of weight 0 come last."""
    noise = case.per_head(Head.gumbel)
    out = np.full(weights.shape, LOWEST)
    out[weights > 0] = np.log(weights[weights > 0]) / temperature + noise[weights > 0]
    return out


def with_reserve(order: np.ndarray, rest: np.ndarray, count: int, case) -> np.ndarray:
    """The ``count`` candidates that come first in ``order`` above all, then the rest."""
    out = rest.copy()
    for head in case.heads():
        place = head.layer, head.row, head.head
        for i in top({i: order[place][i] for i in head.candidates}, count):
            out[place][i] = math.inf
    return out


def reserved(share: float, budget) -> int:
    return max(0, round(share * budget.total) - budget.sinks)


def vase_attnv(policy, case):
    sample = policy.policy
    size = case.per_head(lambda head: [STATISTICS[policy.statistic](value) for value in head.values])
    drawn = race(snapkv(sample.policy, case), case, sample.temperature)
    return with_reserve(size, drawn, reserved(policy.share, case.slots.budget), case)


def random_reserve(policy, case):
    lot = case.per_head(lambda head: head.uniform(LOT))
    drawn = race(snapkv(policy.policy.policy, case), case, policy.policy.temperature)
    return with_reserve(lot, drawn, reserved(policy.share, case.slots.budget), case)


def evict_largest(policy, case):
    size = case.per_head(lambda head: [STATISTICS["range"](value) for value in head.values])
    if not policy.matched:
        return -size
    lot = case.per_head(lambda head: head.uniform(SLOT))
    group = with_reserve(size, np.zeros_like(size), reserved(policy.share, case.slots.budget), case)
    return np.where(np.isinf(group), -1.0, lot)


def lag_scores(head: Head, lag: int, first: int, partitions: int) -> list[Vector]:
    """Of each partition from slot ``first`` on, on the scale of the next one."""
    out = []
    for start in range(first, first + partitions * lag, lag):
        total = [0.0] * lag
        for vectors in (head.keys, head.values):
            following = vectors[start + lag : start + 2 * lag]
            shares = softmax([spread(token, following) for token in vectors[start : start + lag]])
            total = [a + b for a, b in zip(total, shares, strict=True)]
        out.append(total)
    return out


def lagkv(policy, case):
    def score(head):
        front, lag = head.budget.front, policy.lag
        scored = max(0, (head.n - front) // lag - 1)
        out = [10.0 + i for i in range(head.n)]  # above every score, the newest highest
        out[front : front + scored * lag] = [x for part in lag_scores(head, lag, front, scored) for x in part]
        return out

    return case.per_head(score)


def lagkv_ratio(policy, case):
    """Every partition that is complete, has a complete next one and is not cut yet keeps its share; the rest stays."""

    def score(head):
        front, lag, kept = head.budget.front, policy.lag, round(policy.ratio * policy.lag)
        cut = 0 if kept == lag else (head.positions[-1] + 1 - head.n) // (lag - kept)
        first = front + cut * kept
        out = [1.0] * head.n
        for number, scores in enumerate(lag_scores(head, lag, first, (head.n - first) // lag - 1)):
            best = top(dict(enumerate(scores)), kept)
            for i, x in enumerate(scores):
                out[first + number * lag + i] = x if i in best else -math.inf
        return out

    return case.per_head(score)


def epikv_lag_of_slots(policy, case):
    """Recomputed at each eviction, as the public code does; chunks are of the slots that are left."""
    slots, chunk = case.slots, policy.chunk
    layers, rows, kv_heads, n, _ = slots.keys.shape
    out = np.zeros((layers, rows, kv_heads, n))
    for tensor in (slots.keys, slots.values) if policy.name == "epikv-lag" else (slots.keys,):
        x = tensor.double().numpy()
        x = np.broadcast_to(x.mean(0), x.shape) if policy.layers_first else x
        for layer, row, head, i in np.ndindex(out.shape):
            tokens, start = x[layer, row, head].tolist(), i // chunk * chunk
            if start == 0 and policy.first_chunk == "raw":
                out[layer, row, head, i] += statistics.stdev(tokens[i])
            else:
                before = max(0, start - chunk)
                out[layer, row, head, i] += spread(tokens[i], tokens[before : before + chunk])
    return scoped(out, policy.scope)


def segments(policy, case, summary: Callable[[int, range], float], score: np.ndarray, entropy: bool) -> np.ndarray:
    """Quotas of segments of ``policy.segment`` slots by the tertiles of a summary; ``score`` is ``[rows, n]``."""
    slots = case.slots
    out = np.full((slots.keys.shape[1], slots.n), -math.inf)
    free = set(slots.candidates.flatten().nonzero().flatten().tolist())
    for row in range(len(out)):
        old = slots.n - slots.budget.recent
        blocks = [range(a, min(a + policy.segment, old)) for a in range(0, old, policy.segment)]
        if policy.merge_tail and len(blocks) > 1 and len(blocks[-1]) == 1:
            blocks[-2:] = [range(blocks[-2].start, old)]
        summaries = [summary(row, block) for block in blocks]
        ordered = sorted(summaries)
        for a, b in itertools.pairwise(ordered):
            assume(a == b == 0 or b - a > 1e-9)
        low, high = ordered[len(blocks) // 3], ordered[2 * len(blocks) // 3]
        room = slots.budget.free
        for block, x in zip(blocks, summaries, strict=True):
            if entropy:
                quota = policy.quotas[0 if x <= low else 1 if x <= high else 2]
            else:
                quota = policy.quotas[0 if x >= high else 1 if x >= low else 2]
            best = top({i: score[row, i] for i in block if i in free}, min(quota, room))
            room -= len(best)
            for i in best:
                out[row, i] = score[row, i]
    return np.broadcast_to(out[None, :, None], tuple(slots.positions.shape))


def mean_attention(case, layers: int) -> np.ndarray:
    """The newest query's attention averaged over the heads of the last layers, ``[rows, n]``."""
    return case.per_head(Head.newest_row)[-layers:].mean((0, 2))


def entropy_of(attention: np.ndarray) -> Callable:
    def summary(row, block):
        total = sum(attention[row, i] for i in block) + 1e-9
        return -sum(attention[row, i] / total * math.log(attention[row, i] / total + 1e-12) for i in block)

    return summary


def epikv_seg(policy, case):
    variance = case.per_head(lambda head: [statistics.variance(key) for key in head.keys]).mean((0, 2))
    score = case.slots.tracks["score"][0, :, 0].numpy()
    return segments(policy, case, lambda row, block: statistics.fmean(variance[row, i] for i in block), score, False)


def segment_hs(policy, case):
    score = case.slots.tracks["score"][0, :, 0].numpy()
    return segments(policy, case, entropy_of(mean_attention(case, 4)), score, True)


def thinkv_tertiles(policy, case):
    return segments(policy, case, entropy_of(mean_attention(case, 4)), mean_attention(case, 1), True)
