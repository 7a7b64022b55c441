"""Orders of slots: by score, and the order in which VaSE's public code lays down what it kept.

That code writes the kept slots in the order of its selector, by descending score or draw, and the next smoothing runs
over neighbours in that order instead of neighbours in the text. Slots are sorted by position here, so a policy that
wants those neighbours keeps a track: each slot's place, counted from 1, at the last eviction that could have taken it;
0 for slots that were still recent then, which lie behind all others, oldest first.
"""

from __future__ import annotations

import torch

from epiviz.policies.base import Slots

PLACE = "place"


def newest_first_order(priority: torch.Tensor) -> torch.Tensor:
    """Return the indices of the last axis by descending priority, later indices first among equals."""
    n = priority.shape[-1]
    return n - 1 - priority.flip(-1).argsort(dim=-1, descending=True, stable=True)


def rank_from_top(scores: torch.Tensor) -> torch.Tensor:
    """Return each entry's place in descending order along the last axis, the later first among equals."""
    order = newest_first_order(scores)
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def largest(x: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """Mark the ``count`` largest along the last axis, bool like ``x``; of equal ones (in float32) the newer win.

    ``count`` may differ along the other axes, ``[…, 1]``.
    """
    return rank_from_top(x.float()) < count


def laid_down(place: torch.Tensor) -> torch.Tensor:
    """Return the indices of slots in the order in which the public code holds them, from a track of places."""
    behind = torch.iinfo(place.dtype).max
    return torch.where(place > 0, place, behind).argsort(dim=-1, stable=True)


def remember_order(slots: Slots, priority: torch.Tensor, ties: torch.Tensor | None = None) -> None:
    """Write each slot's place by descending priority into the track, if the policy keeps one.

    The outermost of several wrapped policies writes last, so the places are those of the ranking that counts. Protected
    slots stay in front, recent ones get no place. ``ties`` orders slots of equal priority, the larger first; without
    it the newer comes first.
    """
    if PLACE not in slots.tracks:
        return
    place = slots.tracks[PLACE]
    old = slots.n - slots.budget.recent
    ties = slots.positions if ties is None else ties
    ties, priority = (
        x.float().expand(place.shape)[..., :old].masked_fill(~slots.candidates[..., :old], torch.inf)
        for x in (ties, priority)
    )
    order = newest_first_order(ties)
    order = order.gather(-1, priority.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    place[..., :old].scatter_(
        -1, order, torch.arange(1, old + 1, dtype=place.dtype, device=place.device).expand_as(order)
    )
    place[..., old:] = 0
