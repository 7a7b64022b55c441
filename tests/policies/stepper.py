"""Steps a policy through a small cache with made-up keys, values, queries, hidden states and attention."""

from __future__ import annotations

import numpy as np
import torch

from epiviz.attention import RecentQueries
from epiviz.cache import SlotCache, choose
from epiviz.draws import Draws
from epiviz.engine import PassInCache
from epiviz.models import ModelShape
from epiviz.policies import New, Slots

DEPTH = 4  # decoder blocks that the policy believes in


class GivenRows(PassInCache):
    """A pass whose attention rows may be given, ``[q, n]``; else they are recomputed from queries and keys."""

    given: torch.Tensor | None = None

    def rows(self, layer):
        if self.given is None:
            return super().rows(layer)
        return self.given.expand(self.cache.rows, self.cache.shape.heads, *self.given.shape)


class Stepper:
    """Feeds tokens to a policy and evicts when they are due, as the engine does for rows of equal length.

    Parameters
    ----------
    policy : Policy
    budget : ResolvedBudget
    size : int
        Channels of keys and values.
    layers, rows, heads, kv_heads : int
        Of the cache; one each if not given.
    dtype : torch.dtype
        Of keys, values and queries.
    capacity : int
        Slots that the cache has room for.

    Attributes
    ----------
    events : list of (int, int64 ``[layers, rows, kv_heads, kept]``)
        Tokens seen at each eviction, and the positions that stayed.
    rankings : list of ``[layers, rows, kv_heads, n]``
        The priorities that decided it.
    """

    def __init__(
        self, policy, budget, size=3, *, layers=1, rows=1, heads=1, kv_heads=1, dtype=torch.float64, capacity=4096
    ):
        shape = ModelShape(layers, heads, kv_heads, size, hidden=1)
        self.policy, self.budget, self.size = policy.for_model(shape), budget, size
        needs = self.policy.needs(ModelShape(DEPTH, heads, kv_heads, size, hidden=1))
        self.tracks = needs.tracks
        self.cache = SlotCache(shape, rows, capacity, dtype, torch.device("cpu"), needs.tracks)
        self.ring = RecentQueries.empty(shape, rows, max(1, needs.queries), dtype, torch.device("cpu"))
        self.state, self.levels, self.passes, self.prompt, self.events, self.rankings = {}, {}, 0, None, [], []

    def feed(self, q, moves=None, hidden=None, keys=None, values=None, queries=None, rows=None):
        """Feed ``q`` tokens: the first call is the prompt.

        ``moves`` are displacements per block, ``[q]``; or ``hidden`` gives the states, ``[rows, q, channels]``. Keys,
        values and queries broadcast to ``[layers, rows, heads, q, size]`` and are 0 if not given.
        """
        prompt = self.prompt is None
        self.prompt = q if prompt else self.prompt
        hidden = dict(hidden or {})
        for layer, steps in (moves or {}).items():
            path = self.levels.get(layer, 0.0) + np.cumsum(steps)
            self.levels[layer] = float(path[-1])
            hidden[layer] = torch.tensor(path, dtype=torch.float64)[None, :, None]
        held = self.cache.held[0]
        for storage, given in ((self.cache.keys, keys), (self.cache.values, values)):
            storage[:, :, :, held : held + q] = as_tensor(0.0 if given is None else given)
        layers, rows_, heads = self.ring.queries.shape[:3]
        queries = as_tensor(0.0 if queries is None else queries).expand(layers, rows_, heads, q, self.size)
        queries = queries.to(self.ring.queries.dtype)
        made = GivenRows(self.cache, q, dict(enumerate(queries)))
        made.given = None if rows is None else as_tensor(rows)
        for track in self.tracks:
            made.write(track, torch.zeros(()))
        positions = self.cache.new_positions(q)
        first = prompt or self.passes == 1
        self.policy.observe(New(positions, hidden, prompt, first, DEPTH, made), self.state)
        self.passes += 1
        self.cache.advance(q)
        for layer, of_layer in enumerate(queries):
            self.ring.write(layer, of_layer)
        self.ring.advance(positions)
        due = self.policy.due_after_prompt if prompt else self.policy.due
        if due(self.cache.seen[0], self.cache.held[0], self.budget):
            self.evict()

    def room(self, most: int) -> int:
        """Tokens that may be fed at once: up to the next event."""
        seen, held = self.cache.seen[0], self.cache.held[0]
        return next((q for q in range(1, most) if self.policy.due(seen + q, held + q, self.budget)), most)

    @property
    def draws(self) -> Draws:
        rows = range(self.cache.rows)
        return Draws(0, list(rows), [len(self.events) for _ in rows], torch.device("cpu"))

    def slots(self) -> Slots:
        held = self.cache.held[0]
        named = self.cache.slots(range(self.cache.rows), held)
        slot = torch.arange(held)
        return Slots(
            keys=named.pop("keys"),
            values=named.pop("values"),
            positions=named.pop("position"),
            candidates=((slot >= self.budget.front) & (slot < held - self.budget.recent))[None, None, None],
            budget=self.budget,
            tracks=named,
            queries=self.ring.queries,
            query_positions=self.ring.positions,
        )

    def priority(self) -> torch.Tensor:
        """Rank the slots held now, ``[layers, rows, kv_heads, n]`` (or 1 where all are alike)."""
        return self.policy.rank(self.slots(), self.state, self.draws).priority

    def evict(self):
        slots = self.slots()
        priority = self.priority().float().expand(slots.positions.shape)
        self.rankings.append(priority)
        total = min(self.budget.total, slots.n)
        if self.policy.underfills:
            protected = ~slots.candidates.expand(priority.shape)
            total = int(((priority > -torch.inf) | protected).sum(-1).amax())
        keep, _ = choose(priority, self.budget.front, self.budget.recent, total)
        self.events.append((self.cache.seen[0], slots.positions.gather(3, keep)))
        self.cache.evict(range(self.cache.rows), keep, torch.zeros_like(keep, dtype=torch.uint8))

    def positions(self) -> list[int]:
        return self.cache.tracks["position"][0, 0, 0, : self.cache.held[0]].tolist()

    def track(self, name) -> list[float]:
        return self.cache.tracks[name][0, 0, 0, : self.cache.held[0]].tolist()


def as_tensor(x) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x, dtype=float))
