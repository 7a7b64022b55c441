"""SeerAttention-R (arXiv 2506.08889) without its trained gate: the oracle that gates learn from, and Quest's bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from epiviz.policies.base import BudgetError, Needs, register
from epiviz.policies.selection import Blocks, Query, Selection
from epiviz.signals import at_least_float32


@dataclass(frozen=True)
class BlockSelection(Selection):
    """Attend the blocks of highest score, per layer, KV head and query, and always the newest one.

    Parameters
    ----------
    block : int
        Slots per block (64 in the paper).
    threshold : float
        Attend only blocks whose softmax score among the candidates exceeds it, even where the budget has room for
        more; 0 fills the budget. The paper's threshold mode is this with a budget as long as the text.
    first_block : bool
        Always attend the first block too (the paper: in threshold mode).
    dense_layers : int
        The first so many decoder blocks attend everything.
    """

    threshold: float = 0.0
    first_block: bool = False
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1 slot, got {self.block}")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must lie in [0, 1), got {self.threshold}")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers must be at least 0, got {self.dense_layers}")

    def check(self, budget, shape) -> None:
        least = self.block * (2 if self.first_block else 1)
        if budget.total < least:
            what = "the first and the newest block" if self.first_block else "the newest block"
            raise BudgetError(
                f"policy {self.label!r} always attends {what} of {self.block} slots, which a budget of {budget.total} "
                f"does not hold; raise total to {least} or lower block to {self.block * budget.total // least}"
            )
        if not self.sparse_layers(shape):
            raise ValueError(f"dense_layers={self.dense_layers} leaves no layer of {shape.layers} to select in")

    def sparse_layers(self, shape) -> tuple[int, ...]:
        return tuple(layer for layer in shape.evicts if layer >= self.dense_layers)

    def scores(self, query: Query, blocks: Blocks) -> torch.Tensor:
        """Return one logit per block, ``[rows, kv_heads, q, blocks]``: what a gate would say; only candidates count."""
        raise NotImplementedError(f"{type(self).__name__} must implement scores()")

    def weigh(self, query: Query, blocks: Blocks, draws) -> torch.Tensor:
        log_share = log_softmax(self.scores(query, blocks), blocks.candidates)
        if self.threshold:
            log_share = log_share.masked_fill(log_share <= math.log(self.threshold), -torch.inf)
        if self.first_block:
            log_share[..., 0] = torch.inf
        return log_share


@register("seer-oracle")
@dataclass(frozen=True)
class SeerOracle(BlockSelection):
    """Attend the blocks that hold the largest attention weight: what SeerAttention-R's gates learn (section 3).

    A block's score is its largest softmax weight under full attention, over its slots and the query heads of the
    group. It costs what full attention costs and is a ceiling, not a method to deploy.
    """

    def scores(self, query: Query, blocks: Blocks) -> torch.Tensor:
        logits = group_logits(query.states, blocks.keys)
        # In logarithms: a block whose weight would round to zero still has its place in the order.
        log_weight = log_softmax(logits, blocks.visible[:, :, None]).amax(2)
        padded = torch.nn.functional.pad(
            log_weight, (0, blocks.count * blocks.size - log_weight.shape[-1]), value=-torch.inf
        )
        return padded.unflatten(-1, (blocks.count, blocks.size)).amax(-1)


@register("seer-quest")
@dataclass(frozen=True)
class SeerQuest(BlockSelection):
    """Attend the blocks whose keys could agree most with the query (Quest, arXiv 2406.10774, section 3).

    Of every complete block the smallest and the largest value of each key channel are kept. Their bound
    ``Σ_c max(q_c · low_c, q_c · high_c) / √head_dim`` is at least the logit of every slot of the block.

    Notes
    -----
    Quest selects per query head, which a cache shared by a group cannot: here each head's bounds are a softmax over
    the candidates, so that heads are comparable, and a block gets the largest of its group, as in ``seer-oracle``.
    Quest's page is 16 slots; ``block=16`` is that.
    """

    def needs(self, shape) -> Needs:
        return Needs(summaries={"low": shape.head_dim, "high": shape.head_dim})

    def summarise(self, layer, keys, positions) -> dict[str, torch.Tensor]:
        low, high = torch.aminmax(keys, dim=-2)
        return {"low": low, "high": high}

    def scores(self, query: Query, blocks: Blocks) -> torch.Tensor:
        low, high = blocks.summaries["low"], blocks.summaries["high"]
        # max(q · low, q · high) is q · high where q > 0 and q · low where it is not.
        bound = group_logits(query.states.clamp(min=0), high) + group_logits(query.states.clamp(max=0), low)
        return log_softmax(bound, blocks.candidates[:, :, None]).amax(2)


def group_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return ``q · k / √head_dim``, ``[rows, kv_heads, group, q, n]``, at least float32.

    Parameters
    ----------
    queries : ``[rows, heads, q, head_dim]``
    keys : ``[rows, kv_heads, n, head_dim]``
    """
    queries = at_least_float32(queries).unflatten(1, (keys.shape[1], -1))
    return queries @ at_least_float32(keys).unsqueeze(2).transpose(-1, -2) / queries.shape[-1] ** 0.5


def log_softmax(logits: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return log-softmax over the entries of the last axis marked in ``among``, −∞ for the others."""
    return torch.where(among, logits.masked_fill(~among, -torch.inf).log_softmax(-1), -torch.inf)
