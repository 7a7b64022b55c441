"""R-KV (arXiv 2505.24133): importance by recent attention, minus redundancy among the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from epiviz.policies.base import Needs, Policy, Ranking, Slots, register
from epiviz.policies.order import remember_order
from epiviz.policies.scoring import standardise, unit_keys
from epiviz.policies.snapkv import SnapKV
from epiviz.signals import at_least_float32, in_score_dtype


@register("rkv")
@dataclass(frozen=True)
class RKV(Policy):
    """Keep ``balance · importance − (1 − balance) · redundancy``, per layer and KV head (section 3).

    Importance: logits of the last ``window`` queries, the maximum over a group's heads, softmax over the slots outside
    the window, mean over queries, max-pooled over ``pool`` neighbours. Redundancy: mean cosine similarity of a key to
    all others, softmaxed; of keys more similar than ``threshold`` the newest copy is not counted as redundant.

    Parameters
    ----------
    balance : float
        λ: 0.1 in the paper, 0.07 in its code.
    window, pool : int
    threshold : float
        Cosine above which two keys count as copies.
    standardise : bool
        Bring both terms to mean 0 and sd 1 first. Without it the redundancy term is nearly constant and counts for
        little, whatever λ says.
    """

    balance: float = 0.1
    window: int = 8
    pool: int = 7
    threshold: float = 0.5
    standardise: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance must lie in [0, 1], got {self.balance}")
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"window must be at least 1 and pool odd, got {self.window} and {self.pool}")

    def needs(self, shape) -> Needs:
        return Needs(queries=self.window)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        layers = range(slots.layers)
        importance = torch.stack([self._importance(slots, layer) for layer in layers])
        redundancy = torch.stack([last_copy_redundancy(keys, self.threshold) for keys in slots.keys])
        if self.standardise:
            importance, redundancy = (standardise(x, slots.candidates) for x in (importance, redundancy))
        return Ranking(self.balance * importance - (1 - self.balance) * redundancy)

    def _importance(self, slots: Slots, layer: int) -> torch.Tensor:
        old = slots.n - slots.budget.recent
        keys = at_least_float32(slots.keys[layer, :, :, :old])
        queries = at_least_float32(slots.queries[layer]).unflatten(1, (keys.shape[1], -1))
        logits = torch.einsum("rhgwd,rhnd->rhgwn", queries, keys).amax(2) / keys.shape[-1] ** 0.5
        seen = slots.positions[layer, :, :, None, :old] <= slots.query_positions[:, None, :, None]
        voters = seen.any(-1).sum(-1, keepdim=True).clamp(min=1)  # a window longer than the text has empty places
        weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0).sum(2) / voters
        pooled = functional.max_pool1d(weights, self.pool, stride=1, padding=self.pool // 2)
        return functional.pad(pooled, (0, slots.budget.recent))


@register("rkv-simple")
@dataclass(frozen=True)
class RKVSimple(Policy):
    """R-KV as VaSE's code runs it: SnapKV's score and the mean cosine, λ = 0.5, no copies told apart.

    Without the threshold the mean cosine is linear in the sum of the unit keys, so it takes O(n · d), not n × n.

    Parameters
    ----------
    balance : float
        λ, the weight of importance.
    window, pool, pool_over, score_dtype
        As in :class:`~epiviz.policies.snapkv.SnapKV`.
    """

    balance: float = 0.5
    window: int = 64
    pool: int = 5
    pool_over: str = "position"
    score_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance must lie in [0, 1], got {self.balance}")
        self.snapkv()  # checks the others

    def snapkv(self) -> SnapKV:
        return SnapKV(self.window, self.pool, self.pool_over, self.score_dtype)

    def needs(self, shape) -> Needs:
        return self.snapkv().needs(shape)

    def rank(self, slots: Slots, state, draws) -> Ranking:
        importance = self.snapkv().rank(slots, state, draws).priority
        old = slots.n - slots.budget.recent
        redundancy = functional.pad(
            torch.stack([self._redundancy(keys[:, :, :old]) for keys in slots.keys]), (0, slots.n - old)
        )
        scores = self.balance * importance - (1 - self.balance) * redundancy
        remember_order(slots, scores)
        return Ranking(scores)

    def _redundancy(self, keys: torch.Tensor) -> torch.Tensor:
        cosine = in_score_dtype(mean_cosine(in_score_dtype(keys, self.score_dtype)), self.score_dtype)
        return in_score_dtype(at_least_float32(cosine).softmax(-1), self.score_dtype)


def mean_cosine(keys: torch.Tensor) -> torch.Tensor:
    """Return each key's mean cosine similarity to the others (itself counted as 0), ``[rows, kv_heads, n]``."""
    unit = unit_keys(keys)
    total = unit.sum(-2, keepdim=True)
    return ((unit * total).sum(-1) - unit.square().sum(-1)) / keys.shape[-2]


def last_copy_redundancy(keys: torch.Tensor, threshold: float, block: int = 512) -> torch.Tensor:
    """Return R-KV's redundancy ``[rows, kv_heads, n]``: softmax of the mean cosine over the other keys.

    In each key's row of similarities the entry of the newest key more similar than ``threshold`` is dropped, so that
    one copy of a repeated key survives. The n × n matrix is made in blocks of rows.
    """
    unit = unit_keys(keys)
    n = unit.shape[-2]
    column = torch.arange(n, device=keys.device)
    total = torch.zeros_like(unit[..., 0])
    for start in range(0, n, block):
        row = column[start : start + block]
        similar = unit[:, :, start : start + block] @ unit.transpose(-1, -2)
        similar = similar.masked_fill(row[:, None] == column, 0.0)
        newest = torch.where(similar > threshold, column, -1).amax(-1, keepdim=True)
        similar = similar.masked_fill(column == newest, 0.0)
        total += similar.sum(-2)
    return (total / n).softmax(-1)
