"""Counter-based random draws: a number is a function of what it is for, never of what was drawn before.

Every draw is keyed by (seed, sample, event, layer, head, position), so a batch, its order, finished rows and the
device do not change what a sample draws. The mixing function is SplitMix64's finaliser (Steele et al., 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

# What a draw is for; two purposes never share numbers.
TOKEN, SLOT, PROJECTION, LOT, BLOCK = range(5)


def sample_key(tokens: Sequence[int], repeat: int = 0) -> int:
    """Return the identity of a sample: a hash of its prompt's ids and its running number among equal prompts."""
    data = ",".join(map(str, tokens)) + f"#{repeat}"
    return int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "little")


def sample_keys(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return one key per prompt of a batch; the n-th copy of a prompt gets repeat n wherever it stands."""
    seen: dict[tuple[int, ...], int] = {}
    keys = []
    for prompt in map(tuple, prompts):
        keys.append(sample_key(prompt, seen.get(prompt, 0)))
        seen[prompt] = seen.get(prompt, 0) + 1
    return keys


def combine(*parts: int) -> int:
    """Hash integers into one 64-bit key (on the host)."""
    key = 0
    for part in parts:
        key = _mix_int(((key ^ (part & _MASK)) + _GOLDEN) & _MASK)
    return key


def _mix_int(x: int) -> int:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the same bits: torch multiplies int64 modulo 2**64."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ _shift_right(x, shift)) * _signed(multiplier)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> keeps the sign


def hash_with(key: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Mix another integer into int64 keys, elementwise with broadcasting."""
    return _mix((key ^ part) + _signed(_GOLDEN))


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """Map hashed int64 to float64 in the open interval (0, 1)."""
    return (_shift_right(bits, 11).double() + 0.5) * 2.0**-53


@dataclass(frozen=True)
class Draws:
    """The random numbers of one eviction event, for the rows that evict in it.

    Attributes
    ----------
    seed : int
    samples, events : sequences of int
        Per row: the key of the sample and the index of its event.
    device : torch.device
    """

    seed: int
    samples: Sequence[int]
    events: Sequence[int]
    device: torch.device

    def _rows(self, purpose: int) -> torch.Tensor:
        keys = [
            _signed(combine(self.seed, sample, event, purpose))
            for sample, event in zip(self.samples, self.events, strict=True)
        ]
        return torch.tensor(keys, dtype=torch.int64, device=self.device)

    def uniform(self, positions: torch.Tensor, *, per_head: bool = True, purpose: int = SLOT) -> torch.Tensor:
        """Return one uniform number per slot, float64, shaped like ``positions`` ``[layers, rows, kv_heads, n]``.

        Without ``per_head`` a position draws the same number in every layer and head. Numbers of another ``purpose``
        are independent.
        """
        key = self._rows(purpose)[None, :, None, None]
        if per_head:
            layers, _, heads, _ = positions.shape
            key = hash_with(key, torch.arange(layers, device=self.device)[:, None, None, None])
            key = hash_with(key, torch.arange(heads, device=self.device)[None, None, :, None])
        return to_uniform(hash_with(key, positions.long()))

    def gumbel(self, positions: torch.Tensor) -> torch.Tensor:
        """Return −log Exp(1) per slot and head: added to a log-weight it makes the largest sums an exponential race."""
        return -torch.log(-torch.log(self.uniform(positions)))

    def normal(self, layers: int, *shape: int, fixed: bool = False) -> torch.Tensor:
        """Return standard normal numbers ``[layers, rows, *shape]``, one block per sample, layer and event.

        With ``fixed`` every event of a sample gets the same block.
        """
        events = [0] * len(self.events) if fixed else self.events
        key = Draws(self.seed, self.samples, events, self.device)._rows(PROJECTION)[None, :, None]
        key = hash_with(key, torch.arange(layers, device=self.device)[:, None, None])
        count = math.prod(shape)
        pair = torch.arange(2 * count, device=self.device)
        first, second = to_uniform(hash_with(key, pair)).split(count, dim=-1)
        normal = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)  # Box–Muller
        return normal.reshape(layers, len(self.samples), *shape)


@dataclass(frozen=True)
class BlockDraws:
    """The random numbers of one layer's queries, for a selection: keyed by the query, never by the pass it came in.

    Attributes
    ----------
    seed : int
    samples : sequence of int
        Per row: the key of the sample.
    layer : int
    positions : int64 ``[rows, q]``
        Absolute positions of the queries.
    """

    seed: int
    samples: Sequence[int]
    layer: int
    positions: torch.Tensor

    def gumbel(self, kv_heads: int, blocks: int) -> torch.Tensor:
        """Return −log Exp(1) per KV head, query and block, float64 ``[rows, kv_heads, q, blocks]``."""
        device = self.positions.device
        keys = [_signed(combine(self.seed, sample, self.layer, BLOCK)) for sample in self.samples]
        key = torch.tensor(keys, device=device)[:, None, None, None]
        key = hash_with(key, torch.arange(kv_heads, device=device)[:, None, None])
        key = hash_with(key, self.positions[:, None, :, None])
        return -torch.log(-torch.log(to_uniform(hash_with(key, torch.arange(blocks, device=device)))))


def token_uniform(seed: int, samples: Sequence[int], steps: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return one uniform number per row for drawing its next token, float64 ``[rows]``."""
    keys = [_signed(combine(seed, sample, step, TOKEN)) for sample, step in zip(samples, steps, strict=True)]
    return to_uniform(_mix(torch.tensor(keys, dtype=torch.int64, device=device)))
