"""The selector: asks a selection, layer by layer, what the queries of a pass attend, and keeps account of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from epiviz.attended import Attended
from epiviz.cache import SlotCache
from epiviz.draws import BlockDraws
from epiviz.policies.selection import Blocks, Query, Selection

STEPS_LIMIT = 32 * 2**20  # bytes of one row: up to here it is remembered which blocks every single query attended


class Selector:
    """Selects for the rows of a cache from which nothing is evicted, so that a token's slot is its position.

    What a pass selects is counted by :meth:`advance`, once all layers are through.

    Parameters
    ----------
    policy : Selection
    cache : SlotCache
        Holding the prompts.
    totals : sequence of int
        Per row: slots that a query may attend.
    seed : int
    samples : sequence of int
        Per row: the key of the sample, for draws.
    new_tokens : int
        At most so many queries follow.

    Attributes
    ----------
    summaries : dict of str to ``[layers, rows, kv_heads, blocks, width]``
    slots : int64 ``[rows]``
        Slots attended so far, summed over queries, layers and KV heads.
    nan : bool scalar
    """

    def __init__(
        self,
        policy: Selection,
        cache: SlotCache,
        totals: Sequence[int],
        seed: int,
        samples: Sequence[int],
        new_tokens: int,
    ):
        self.policy, self.cache, self.seed, self.samples = policy, cache, seed, list(samples)
        self.sparse = policy.sparse_layers(cache.shape)
        device = cache.keys.device
        self.totals = torch.tensor(totals, device=device)
        blocks = self._blocks(cache.capacity)
        heads = (len(cache.shape.evicts), cache.rows, cache.shape.kv_heads)
        self.summaries = {
            name: torch.zeros(*heads, blocks, width, dtype=cache.keys.dtype, device=device)
            for name, width in policy.needs(cache.shape).summaries.items()
        }
        self.count = torch.zeros(*heads, blocks, dtype=torch.int32, device=device)
        self.last = torch.full_like(self.count, -1)
        self.slots = torch.zeros(cache.rows, dtype=torch.int64, device=device)
        self.nan = torch.zeros((), dtype=torch.bool, device=device)
        small = heads[0] * heads[2] * new_tokens * blocks <= STEPS_LIMIT
        self.steps = torch.zeros(*heads, new_tokens, blocks, dtype=torch.bool, device=device) if small else None
        self._queries = 0
        self._new: dict[int, torch.Tensor] = {}
        for layer in range(heads[0]):
            self._summarise(layer, [0] * cache.rows, cache.held)

    def _blocks(self, slots: int) -> int:
        return -(-slots // self.policy.block)

    # -- inside a pass -----------------------------------------------------------------------------------------------

    def visible(self, layer: int, queries: torch.Tensor) -> torch.Tensor | None:
        """Return the slots that one layer's new tokens attend, bool ``[rows, heads, q, slots]``; None for all of them.

        Parameters
        ----------
        layer : int
            Among the layers that could evict.
        queries : ``[rows, heads, q, head_dim]``
            Rotated; the cache already holds the new tokens' keys.
        """
        cache, q = self.cache, queries.shape[2]
        self._summarise(layer, cache.held, [held + q for held in cache.held])
        blocks = self._cut(layer, q)
        number, positions = cache.shape.evicts[layer], cache.next_slots(q)
        dense = number not in self.sparse
        chosen = blocks.candidates
        if not dense:
            draws = BlockDraws(self.seed, self.samples, number, positions)
            chosen = chosen & self.policy.select(Query(number, queries, positions), blocks, draws)
            self.nan |= blocks.nan
        chosen = self._new[layer] = (chosen | blocks.own).expand(-1, cache.shape.kv_heads, -1, -1)
        if dense:
            return None
        slots = chosen.repeat_interleave(blocks.size, dim=-1)[..., : blocks.keys.shape[2]] & blocks.visible
        return slots.repeat_interleave(cache.shape.group, dim=1)

    def _cut(self, layer: int, q: int) -> Blocks:
        cache, size = self.cache, self.policy.block
        n = max(cache.held) + q
        slot = cache.next_slots(q)[:, None]
        block = torch.arange(self._blocks(n), device=slot.device)
        own = (slot // size)[..., None]
        return Blocks(
            size=size,
            keys=cache.keys[layer, :, :, :n],
            visible=cache.visible(q),
            candidates=block < own,
            own=block == own,
            room=(self.totals[:, None, None] - slot % size - 1) // size,
            summaries={name: x[layer, :, :, : len(block)] for name, x in self.summaries.items()},
            nan=torch.zeros((), dtype=torch.bool, device=slot.device),
        )

    def _summarise(self, layer: int, before: Sequence[int], after: Sequence[int]) -> None:
        """Summarise the blocks of each row that became complete when it grew from ``before`` to ``after`` slots."""
        if not self.summaries:
            return
        size = self.policy.block
        for row in range(self.cache.rows):
            first, stop = before[row] // size, after[row] // size
            if first < stop:
                keys = self.cache.keys[layer, row, :, first * size : stop * size].unflatten(1, (-1, size))
                positions = torch.arange(first * size, stop * size, device=keys.device).unflatten(0, (-1, size))
                found = self.policy.summarise(self.cache.shape.evicts[layer], keys, positions)
                for name, summary in found.items():
                    self.summaries[name][layer, row, :, first:stop] = summary

    # -- between passes ----------------------------------------------------------------------------------------------

    def advance(self, positions: torch.Tensor) -> None:
        """Count what the queries at ``positions`` ``[rows, q]`` attended, once all layers have selected."""
        new = torch.stack([self._new[layer] for layer in range(len(self.count))])  # [layers, rows, kv_heads, q, blocks]
        blocks, q, size = new.shape[-1], new.shape[3], self.policy.block
        self.count[..., :blocks] += new.sum(3, dtype=torch.int32)
        where = torch.where(new, positions[None, :, None, :, None], -1).amax(3).int()
        self.last[..., :blocks] = torch.maximum(self.last[..., :blocks], where)
        own = positions % size + 1
        self.slots += (((new.sum(-1) - 1) * size) + own[None, :, None]).sum((0, 2, 3))
        if self.steps is not None:
            self.steps[:, :, :, self._queries : self._queries + q, :blocks] = new
        self._queries += q
        self._new.clear()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(list(rows), device=self.count.device)
        self.summaries = {name: x.index_select(1, index) for name, x in self.summaries.items()}
        self.count, self.last = self.count.index_select(1, index), self.last.index_select(1, index)
        self.totals, self.slots = self.totals[index], self.slots[index]
        self.samples = [self.samples[row] for row in rows]
        if self.steps is not None:
            self.steps = self.steps.index_select(1, index)

    def mean_slots(self, row: int) -> float:
        """Slots that a query of this row attended, mean over queries, layers and KV heads."""
        layers, _, kv_heads, _ = self.count.shape
        return int(self.slots[row]) / (self._queries * layers * kv_heads)

    def summary_bytes(self, capacity: int) -> int:
        """Bytes of the summaries of one row that needs ``capacity`` slots."""
        each = sum(x[:, :1, :, :1].numel() * x.element_size() for x in self.summaries.values())
        return each * self._blocks(capacity)

    def history(self, row: int, prompt_length: int) -> Attended:
        """Return what a row's queries attended."""
        seen, shape = self.cache.seen[row], self.cache.shape
        blocks = self._blocks(seen)

        def every_layer(x: torch.Tensor, never: int) -> np.ndarray:
            return shape.every_layer(x.cpu().numpy(), never)

        return Attended(
            block=self.policy.block,
            tokens=seen,
            prompt_length=prompt_length,
            layers=self.sparse,
            count=every_layer(self.count[:, row, :, :blocks], 0),
            last=every_layer(self.last[:, row, :, :blocks], -1),
            steps=None if self.steps is None else every_layer(self.steps[:, row, :, : self._queries, :blocks], 0),
        )
