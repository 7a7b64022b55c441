"""How diverse a kept set is: how alike its keys are, how many directions they span, how they spread over the text.

VaSE (arXiv 2606.03928) samples instead of taking the top because that keeps a more diverse set. These are the numbers
to hold that against, beside those of a random set of the same size. What sampling promises each single token is in
:mod:`epiviz.inclusion`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from epiviz.policies.base import Slots
from epiviz.signals import at_least_float32

WINDOW = 16  # tokens of a stretch of text that counts as covered if one of them is kept: about a sentence


def mean_pairwise_cosine(keys: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine between two different keys of a set.

    With unit keys u the sum over all pairs is (‖Σu‖² − Σ‖u‖²) / 2, so it costs O(n·d) and needs no n × n matrix. A key
    of length zero points nowhere and counts as orthogonal to all others.

    Parameters
    ----------
    keys : ``[..., n, head_dim]``

    Returns
    -------
    At least float32, ``[...]``; NaN for fewer than two keys. 1: all alike. 0: no common direction.
    """
    n = keys.shape[-2]
    unit = torch.nn.functional.normalize(at_least_float32(keys), dim=-1)
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    return pairs / (n * (n - 1)) if n > 1 else torch.full_like(pairs, torch.nan)


def effective_rank(keys: torch.Tensor) -> torch.Tensor:
    """Return how many directions a set of keys spans: exp of the entropy of its singular values (Roy, Vetterli 2007).

    Parameters
    ----------
    keys : ``[..., n, head_dim]``

    Returns
    -------
    At least float32, ``[...]``, from 1 (all on one line) to min(n, head_dim); NaN if no key points anywhere.
    """
    values = torch.linalg.svdvals(at_least_float32(keys))
    total = values.sum(-1)
    rank = torch.special.entr(values / total[..., None]).sum(-1).exp()
    return torch.where(total > 0, rank, torch.nan)


def coverage(positions: torch.Tensor, start, stop, window: int = WINDOW) -> torch.Tensor:
    """Return the share of the stretches of ``window`` tokens in ``start … stop − 1`` that hold at least one slot.

    Parameters
    ----------
    positions : int64 ``[..., n]``
        Ascending, within ``start … stop − 1``.
    start, stop : int or int64 ``[...]``
    window : int
    """
    stretch = (positions - _column(start)) // window
    covered = (stretch.diff(dim=-1) > 0).sum(-1) + min(1, stretch.shape[-1])
    return covered / -((start - stop) // window)


def gap_evenness(positions: torch.Tensor, start, stop) -> torch.Tensor:
    """Return how evenly slots lie in ``start … stop − 1``: the effective number of gaps ÷ their number.

    The gaps are those between neighbours and to both ends; their effective number is the exponential of the entropy of
    their shares. 1: equally spaced. Near 0: one gap takes nearly all of the text.

    Parameters
    ----------
    positions, start, stop
        As in :func:`coverage`.
    """
    gaps = _gaps(positions, start, stop).double()
    share = gaps / gaps.sum(-1, keepdim=True)
    return (torch.special.entr(share).sum(-1).exp() / gaps.shape[-1]).float()


def largest_gap(positions: torch.Tensor, start, stop) -> torch.Tensor:
    """Return the longest run of tokens in ``start … stop − 1`` without a slot, int64 ``[...]``.

    Parameters
    ----------
    positions, start, stop
        As in :func:`coverage`.
    """
    return _gaps(positions, start, stop).amax(-1) - 1


def _gaps(positions: torch.Tensor, start, stop) -> torch.Tensor:
    """Distances between neighbouring slots, as if one stood right before the first token and one behind the last."""
    ends = [
        torch.as_tensor(_column(end), device=positions.device).expand(*positions.shape[:-1], 1) for end in (start, stop)
    ]
    return torch.cat([ends[0] - 1, positions, ends[1]], dim=-1).diff(dim=-1)


def _column(x):
    return x[..., None] if isinstance(x, torch.Tensor) else torch.tensor([x])


MEASURES = ("key_cosine", "effective_rank", "coverage", "gap_evenness", "largest_gap")


@dataclass(frozen=True)
class Diversity:
    """The diversity of what one run kept, after each eviction.

    Attributes
    ----------
    steps : int64 ``[events]``
        Tokens seen when each eviction fired.
    slots : int64 ``[events]``
        Slots measured in each head.
    measures : dict of str to float32 ``[events, evicting layers, kv_heads]``
        One entry for each of :data:`MEASURES`: mean pairwise cosine and effective rank of the keys as the cache holds
        them (rotated); coverage, evenness and largest gap of the positions.
    """

    steps: np.ndarray
    slots: np.ndarray
    measures: dict[str, np.ndarray]


class DiversityRecorder:
    """Measures the kept set after each eviction: ``ev.replay(…, on_event=recorder)``, then ``recorder.result()``.

    Parameters
    ----------
    chosen : bool
        Only the slots that the policy chose. Sinks, recent tokens and a protected prompt are the same for every policy
        and would hide what differs; False counts them in.
    """

    def __init__(self, chosen: bool = True):
        self.chosen = chosen
        self._steps: list[int] = []
        self._slots: list[int] = []
        self._measures: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}

    def __call__(self, slots: Slots) -> None:
        """Measure the slots that an eviction left, of one sequence."""
        if slots.positions.shape[1] != 1:
            raise ValueError(f"diversity is recorded for one sequence at a time, got {slots.positions.shape[1]}")
        seen, budget = int(slots.seen), slots.budget
        start, stop = (budget.front, seen - budget.recent) if self.chosen else (0, seen)
        where = slots.candidates[0, 0, 0] if self.chosen else torch.ones_like(slots.candidates[0, 0, 0])
        positions = slots.positions[:, 0][..., where]
        found = {
            "key_cosine": torch.stack([mean_pairwise_cosine(keys[0][:, where]) for keys in slots.keys]),
            "effective_rank": torch.stack([effective_rank(keys[0][:, where]) for keys in slots.keys]),
            "coverage": coverage(positions, start, stop),
            "gap_evenness": gap_evenness(positions, start, stop),
            "largest_gap": largest_gap(positions, start, stop),
        }
        self._steps.append(seen)
        self._slots.append(positions.shape[-1])
        for name, measured in found.items():
            self._measures[name].append(measured.float().cpu().numpy())

    def result(self) -> Diversity:
        """Return what was measured so far."""
        measures = {name: np.array(measured, dtype=np.float32) for name, measured in self._measures.items()}
        return Diversity(np.array(self._steps, dtype=np.int64), np.array(self._slots, dtype=np.int64), measures)
