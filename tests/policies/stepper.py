"""Steps a policy through a cache of one layer and one head, with made-up keys, values, hidden states and attention."""

from __future__ import annotations

import numpy as np
import torch

from epiviz.cache import SlotCache, choose
from epiviz.engine import PassInCache
from epiviz.models import ModelShape
from epiviz.policies import New, Slots


class GivenRows(PassInCache):
    """A pass whose attention rows ``[q, n]`` are given."""

    given: torch.Tensor

    def rows(self, layer):
        return self.given[None, None]


class Stepper:
    """Feeds tokens to a policy and evicts when the budget overflows, as the engine does for a row."""

    def __init__(self, policy, budget, size=3):
        self.policy, self.budget, self.size = policy, budget, size
        shape = ModelShape(layers=1, heads=1, kv_heads=1, head_dim=size, hidden=1)
        tracks = policy.needs(ModelShape(layers=4, heads=1, kv_heads=1, head_dim=size, hidden=1)).tracks
        self.cache = SlotCache(shape, 1, 4096, torch.float64, torch.device("cpu"), tracks)
        self.state, self.levels, self.passes, self.prompt = {}, {}, 0, None

    def feed(self, q, moves=None, keys=None, values=None, rows=None, query=None):
        """Feed ``q`` tokens: the first call is the prompt. ``moves`` are displacements per layer."""
        prompt = self.prompt is None
        self.prompt = q if prompt else self.prompt
        hidden = {}
        for layer, steps in (moves or {}).items():
            path = self.levels.get(layer, 0.0) + np.cumsum(steps)
            self.levels[layer] = float(path[-1])
            hidden[layer] = torch.tensor(path, dtype=torch.float64)[None, :, None]
        zeros = np.zeros((q, self.size))
        for storage, given in ((self.cache.keys, keys), (self.cache.values, values)):
            storage[0, 0, 0, self.cache.held[0] : self.cache.held[0] + q] = torch.as_tensor(
                np.asarray(zeros if given is None else given, dtype=float)
            )
        made = GivenRows(self.cache, q, {})
        made.given = None if rows is None else torch.as_tensor(np.asarray(rows, dtype=float))
        for track in self.policy.needs(ModelShape(4, 1, 1, self.size, 1)).tracks:
            made.write(track, torch.zeros(()))
        first = prompt or self.passes == 1
        self.policy.observe(New(self.cache.new_positions(q), hidden, prompt, first, 4, made), self.state)
        self.passes += 1
        self.cache.advance(q)
        if self.cache.held[0] > self.budget.total:
            self.evict(query)

    def slots(self, query=None) -> Slots:
        held = self.cache.held[0]
        named = self.cache.slots([0], held)
        slot = torch.arange(held)
        return Slots(
            keys=named.pop("keys"),
            values=named.pop("values"),
            positions=named.pop("position"),
            candidates=((slot >= self.budget.front) & (slot < held - self.budget.recent))[None, None, None],
            budget=self.budget,
            tracks=named,
            queries=None if query is None else torch.as_tensor(query, dtype=torch.float64)[None, None, None],
            query_positions=torch.tensor([[self.cache.seen[0] - 1]]),
        )

    def evict(self, query=None):
        slots = self.slots(query)
        priority = self.policy.rank(slots, self.state, None).priority.expand(slots.positions.shape)
        keep, _ = choose(priority, self.budget.front, self.budget.recent, self.budget.total)
        self.cache.evict([0], keep, torch.zeros_like(keep, dtype=torch.uint8))

    def positions(self) -> list[int]:
        return self.cache.tracks["position"][0, 0, 0, : self.cache.held[0]].tolist()

    def track(self, name) -> list[float]:
        return self.cache.tracks[name][0, 0, 0, : self.cache.held[0]].tolist()
