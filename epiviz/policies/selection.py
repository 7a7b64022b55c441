"""The other contract: a selection evicts nothing, it chooses which blocks of the cache each query attends.

Every query of the decoding is asked about in every layer, inside its attention call, because the choice depends on the
layer's own query. A selection weighs the blocks before the query's own; the engine adds the own block (the newest, and
as a rule unfinished), takes the heaviest that fit the budget and masks the rest. The prompt is read densely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from epiviz.policies.base import Policy
from epiviz.policies.order import rank_from_top

if TYPE_CHECKING:
    from epiviz.draws import BlockDraws
    from epiviz.models import ModelShape


@dataclass(frozen=True)
class Query:
    """The queries of one layer's new tokens.

    Attributes
    ----------
    layer : int
        Decoder block.
    states : ``[rows, heads, q, head_dim]``
        Rotated, on the scale at which logits are ``q · k / √head_dim``. A gate that was trained on states before their
        rotation turns them back by ``positions``.
    positions : int64 ``[rows, q]``
        Absolute positions; as nothing is evicted, these are their slots too.
    """

    layer: int
    states: torch.Tensor
    positions: torch.Tensor


@dataclass
class Blocks:
    """What a selection chooses from: one layer's slots, cut into blocks of ``size`` from each row's first token on.

    Attributes
    ----------
    size : int
    keys : ``[rows, kv_heads, n, head_dim]``
        Rotated keys of all slots, new ones included.
    visible : bool ``[rows, 1, q, n]``
        The slots up to each query's own.
    candidates : bool ``[rows, 1, q, blocks]``
        The blocks before each query's own; all of them are complete.
    own : bool, same shape
        The block that each query's own slot is in; it is always attended.
    room : int64 ``[rows, 1, q]``
        Candidates that fit the budget beside the own block.
    summaries : mapping of str to ``[rows, kv_heads, blocks, width]``
        What the policy wrote down of each complete block.
    nan : bool scalar
        Some priority was not a number; the run raises at its end.
    """

    size: int
    keys: torch.Tensor
    visible: torch.Tensor
    candidates: torch.Tensor
    own: torch.Tensor
    room: torch.Tensor
    summaries: Mapping[str, torch.Tensor]
    nan: torch.Tensor

    @property
    def count(self) -> int:
        return self.candidates.shape[-1]

    def take(self, priority: torch.Tensor) -> torch.Tensor:
        """Return the candidates of highest priority that fit the budget, bool like ``priority``.

        Parameters
        ----------
        priority : ``[rows, kv_heads or 1, q, blocks]``
            The newer wins among equals (in float32); −∞ is not attended even if there is room.
        """
        self.nan = self.nan | (priority.isnan() & self.candidates).any()
        priority = torch.where(self.candidates, priority, -torch.inf).float()
        return (rank_from_top(priority) < self.room[..., None]) & (priority > -torch.inf)


@dataclass(frozen=True)
class Selection(Policy):
    """Base of all selections: ``budget.total`` is the number of slots a query may attend.

    The budget's other fields name what no policy may evict; nothing is evicted here, so they change nothing. A
    subclass has a parameter ``block`` and implements :meth:`weigh`, or :meth:`select` if taking the heaviest is not
    what it does.
    """

    evicts: ClassVar[bool] = False
    selects: ClassVar[bool] = True
    bounded: ClassVar[bool] = False

    block: int = 64

    def sparse_layers(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the layers that select; the others attend everything."""
        return shape.evicts

    def summarise(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what to remember of complete blocks, once each: the summaries of :class:`Needs`.

        Parameters
        ----------
        layer : int
            Decoder block.
        keys : ``[kv_heads, blocks, block, head_dim]``
            Rotated.
        positions : int64 ``[blocks, block]``

        Returns
        -------
        dict of str to ``[kv_heads, blocks, width]``
        """
        return {}

    def weigh(self, query: Query, blocks: Blocks, draws: BlockDraws) -> torch.Tensor:
        """Return the log-weight of each candidate, ``[rows, kv_heads, q, blocks]``; −∞ is never attended."""
        raise NotImplementedError(f"{type(self).__name__} must implement weigh()")

    def select(self, query: Query, blocks: Blocks, draws: BlockDraws) -> torch.Tensor:
        """Return the candidates that each query attends beside its own block, bool ``[rows, kv_heads, q, blocks]``."""
        return blocks.take(self.weigh(query, blocks, draws))
