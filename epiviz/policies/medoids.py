"""k-means without chance: the tokens nearest to the cluster centres of a segment's keys, in many heads at once."""

from __future__ import annotations

import torch
from torch.nn.functional import one_hot

from epiviz.policies.order import largest

ITERATIONS = 20  # at most; clusters of at most some hundred keys settle sooner
SLACK = 1e-5  # of the largest squared distance: members of a cluster that differ by less are equally near


def medoids(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Mark ``count`` tokens of each head that stand for all of them.

    Lloyd's algorithm from a farthest-first start; each cluster is represented by its member nearest to the centre. No
    number is drawn, and ties go to the newer token. With no fewer centres than tokens all are marked. A cluster that
    ends up empty (equal keys) leaves its place to the newest of the other tokens.

    Parameters
    ----------
    keys : ``[heads, n, head_dim]``
        In the order of the text.
    count : int

    Returns
    -------
    bool ``[heads, n]``, ``min(count, n)`` of each head
    """
    heads, n, _ = keys.shape
    if not 0 < count < n:
        return torch.full((heads, n), count > 0, device=keys.device)
    # float32 for float64 models too: near ties must not hang on how many tokens a forward pass took at once.
    points = keys.float().flip(1)  # the newest first: where two are equally good, argmin and argmax take the first
    points = points - points[:, :1]  # what is subtracted does not matter; equal keys become exact zeros
    centres = farthest_first(points, count)
    settled = None
    for _ in range(ITERATIONS):
        cluster = squared_distances(points, centres).argmin(2)
        if settled is not None and torch.equal(cluster, settled):
            break
        member = one_hot(cluster, count).to(points.dtype).transpose(1, 2)  # [heads, count, n]
        size = member.sum(2, keepdim=True)
        centres = torch.where(size > 0, member @ points / size.clamp(min=1), centres)
        settled = cluster
    own, cluster = squared_distances(points, centres).min(2)
    within = one_hot(cluster, count).bool()
    distance = own[..., None].masked_fill(~within, torch.inf)
    # The two members of a pair are equally near to its centre: rounding must not choose between them.
    slack = SLACK * points.square().sum(2).amax(1)[:, None, None]
    nearest = within & (distance <= distance.amin(1, keepdim=True) + slack)
    medoid = nearest.int().argmax(1)  # [heads, count]
    represents = torch.zeros_like(cluster).scatter_add_(1, medoid, within.any(1).long()) > 0
    return largest(represents.flip(1), count)


def farthest_first(points: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` of each head's points, ``[heads, count, head_dim]``: the first, then always the farthest."""
    chosen = torch.zeros(points.shape[0], count, dtype=torch.int64, device=points.device)
    gap = torch.full(points.shape[:2], torch.inf, device=points.device)  # to the nearest chosen point; −1 if chosen
    for number in range(count):
        if number:
            chosen[:, number] = gap.argmax(1)
        newest = chosen[:, number, None]
        centre = points.gather(1, newest[..., None].expand(-1, 1, points.shape[2]))
        gap = torch.minimum(gap, squared_distances(points, centre)[..., 0]).scatter_(1, newest, -1.0)
    return points.gather(1, chosen[..., None].expand(-1, -1, points.shape[2]))


def squared_distances(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Return the squared distances ``[heads, n, count]`` of points to centres."""
    across = points @ centres.transpose(1, 2)
    squares = points.square().sum(2)[:, :, None] + centres.square().sum(2)[:, None]
    return (squares - 2 * across).clamp_(min=0)
