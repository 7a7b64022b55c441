"""Retention: what every head kept and lost, as births, deaths and reasons.

Eviction is permanent, so one integer per token and head tells the whole story. Everything a view or a metric asks
about an eviction history is computed from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np

from epiviz.results import write_atomically


class Reason(IntEnum):
    """Why a slot was kept at the last eviction it survived."""

    NONE = 0  # never faced an eviction
    SINK = 1
    RECENT = 2
    PROMPT = 3
    RESERVED = 4
    SAMPLED = 5
    TOP = 6


@dataclass(frozen=True)
class Retention:
    """The eviction history of one sequence.

    Attributes
    ----------
    event_steps : int64 ``[events]``
        Tokens seen (prompt included) when each eviction fired.
    death : int32 ``[layers, kv_heads, tokens]``
        Index of the event at which the slot left; ``len(event_steps)`` if it never did. Covers the tokens that were
        fed to the model.
    reason : uint8 ``[layers, kv_heads, tokens]``
        A :class:`Reason`: why the slot was kept at the last event it survived.
    prompt_length : int
        Tokens of the prompt; births before it all happened in the prefill.
    evicts : tuple of int
        The layers that evict. In hybrid models the sliding layers keep their window and are not listed; their rows
        of ``death`` are all "never".
    positions : int64 ``[tokens]``, optional
        The rotary position each token was fed at; None: its index.
    """

    event_steps: np.ndarray
    death: np.ndarray
    reason: np.ndarray
    prompt_length: int
    evicts: tuple[int, ...] = field(default=())
    positions: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.death.ndim != 3 or self.death.shape != self.reason.shape:
            raise ValueError(
                f"death {self.death.shape} and reason {self.reason.shape} must both be [layers, kv_heads, tokens]"
            )

    @property
    def tokens(self) -> int:
        """Tokens that were fed."""
        return self.death.shape[-1]

    @property
    def events(self) -> int:
        """Number of evictions."""
        return len(self.event_steps)

    @property
    def evicting(self) -> list[int]:
        """The layers that evict; all of them if none is named."""
        return list(self.evicts) or list(range(self.death.shape[0]))

    def fired(self, step: int) -> int:
        """Return how many evictions have fired once ``step`` tokens were seen, ``step`` in ``0 … tokens``."""
        if not 0 <= step <= self.tokens:
            raise ValueError(f"step {step} is outside 0 … {self.tokens}, the tokens this run has seen")
        return int(np.searchsorted(self.event_steps, step, side="right"))

    def death_steps(self) -> np.ndarray:
        """Return the tokens seen when each slot left, int64 ``[layers, kv_heads, tokens]``; never = ``tokens + 1``."""
        return np.append(self.event_steps, self.tokens + 1)[self.death]

    def alive(self, step: int) -> np.ndarray:
        """Return which slots are held once ``step`` tokens were seen and the evictions due by then have fired.

        Parameters
        ----------
        step : int
            Tokens seen, prompt included, in ``0 … tokens``.

        Returns
        -------
        bool ``[layers, kv_heads, tokens]``
        """
        alive = self.death >= self.fired(step)
        alive[:, :, step:] = False  # not yet born
        return alive

    def held(self, step: int) -> np.ndarray:
        """Return the share of the evicting heads that hold each token at ``step``, float64 ``[tokens]``."""
        fired = self.fired(step)
        heads = sum((self.death[layer] >= fired).sum(axis=0) for layer in self.evicting)
        share = heads / (len(self.evicting) * self.death.shape[1])
        share[step:] = 0
        return share

    def visible(self) -> np.ndarray:
        """Return what each query saw, bool ``[layers, kv_heads, tokens (query), tokens (key)]``.

        A query at position p sees key j ≤ p in a head if the slot never left, or left at an event that fired after p.
        This is n × n: for tests and short texts.
        """
        query = np.arange(self.tokens)[:, None]
        key = np.arange(self.tokens)[None, :]
        return (key <= query) & (self.death_steps()[:, :, None, :] > query)

    def save(self, path: str | Path) -> None:
        """Write the history as one safetensors file."""
        from safetensors.numpy import save_file

        header = {"prompt_length": self.prompt_length, "evicts": list(self.evicts)}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        arrays = {"event_steps": self.event_steps, "death": self.death, "reason": self.reason}
        if self.positions is not None:
            arrays["positions"] = self.positions
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        metadata = {"epiviz_retention": json.dumps(header)}
        write_atomically(Path(path), lambda temporary: save_file(arrays, str(temporary), metadata=metadata))

    @classmethod
    def load(cls, path: str | Path) -> Retention:
        """Read a history written by :meth:`save`."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        except SafetensorError as error:
            raise ValueError(f"{path} is cut off, damaged or no eviction history ({error}); write it again") from error
        if "epiviz_retention" not in metadata:
            raise ValueError(f"{path} is not an eviction history of epiviz; write one with Retention.save")
        header = json.loads(metadata["epiviz_retention"])
        return cls(prompt_length=header["prompt_length"], evicts=tuple(header["evicts"]), **arrays)
