"""Attended: which blocks the queries of a selection looked at. Nothing was evicted, so there are no deaths to tell.

It is to a selection what :class:`epiviz.Retention` is to an eviction: everything a view or a metric asks is computed
from it, and such a view says *attended*, never *evicted*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Attended:
    """What the queries of one sequence attended while decoding; the prompt was read densely and is not counted.

    Attributes
    ----------
    block : int
        Slots per block; block b holds the tokens b · block … (b + 1) · block − 1.
    tokens : int
        Tokens that were fed.
    prompt_length : int
    layers : tuple of int
        The layers that select. The others attend all they hold: everything, or their window in a hybrid model.
    count : int32 ``[layers, kv_heads, blocks]``
        Queries that attended each block.
    last : int32 ``[layers, kv_heads, blocks]``
        Position of the last query that did; −1 if none.
    steps : bool ``[layers, kv_heads, queries, blocks]`` or None
        Which blocks each query attended. None for runs so long that this would take more memory than they may use.
    """

    block: int
    tokens: int
    prompt_length: int
    layers: tuple[int, ...]
    count: np.ndarray
    last: np.ndarray
    steps: np.ndarray | None

    @property
    def queries(self) -> int:
        """Queries that selected: one for each token after the prompt."""
        return self.tokens - self.prompt_length

    def share(self) -> np.ndarray:
        """Return how often each token was attended, float64 ``[tokens]``, 0 … 1.

        Of the queries since the token existed, in all heads of the layers that select; NaN if there was none.
        """
        token = np.arange(self.tokens)
        first = np.maximum(token, self.prompt_length)  # the first query that could attend the token
        # A block is attended from its first token on: queries before the token itself do not count for it.
        before = np.maximum(0, token - np.maximum(self.prompt_length, token - token % self.block))
        attended = self._per_token(self.count) - before
        queries = (self.tokens - first).astype(np.float64)
        queries[queries == 0] = np.nan
        return attended.mean(axis=(0, 1)) / queries

    def last_query(self) -> np.ndarray:
        """Return the position of the last query that attended each token in any head, int32 ``[tokens]``; −1: none."""
        return self._per_token(self.last).max(axis=(0, 1))

    def at(self, step: int) -> np.ndarray:
        """Return the share of heads in which the newest of ``step`` tokens attended each token, float64 ``[tokens]``.

        Raises
        ------
        ValueError
            That token was part of the prompt or never fed, or the blocks of each query were not kept.
        """
        if not self.prompt_length < step <= self.tokens:
            raise ValueError(
                f"step {step} is outside {self.prompt_length + 1} … {self.tokens}, the steps at which this run selected"
            )
        blocks = self._steps()[list(self.layers), :, step - 1 - self.prompt_length].mean(axis=(0, 1))
        return np.where(np.arange(self.tokens) < step, np.repeat(blocks, self.block)[: self.tokens], 0.0)

    def visible(self) -> np.ndarray:
        """Return what each query saw, bool ``[layers, kv_heads, tokens (query), tokens (key)]``.

        This is n × n: for tests and short texts. Windows of sliding layers are not cut out.
        """
        steps = self._steps()
        causal = np.tril(np.ones((self.tokens, self.tokens), dtype=bool))
        seen = np.broadcast_to(causal, (*steps.shape[:2], *causal.shape)).copy()
        layers = list(self.layers)
        attended = np.repeat(steps[layers], self.block, axis=-1)[..., : self.tokens]
        seen[layers, :, self.prompt_length :] &= attended
        return seen

    def _steps(self) -> np.ndarray:
        if self.steps is None:
            raise ValueError(
                f"the blocks of each of {self.queries} queries were not kept, this run is too long for that; use "
                "share() and last_query(), or a shorter run"
            )
        return self.steps

    def _per_token(self, per_block: np.ndarray) -> np.ndarray:
        return np.repeat(per_block[list(self.layers)], self.block, axis=-1)[..., : self.tokens]
