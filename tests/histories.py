"""Eviction histories made by a cache of plain sets, for tests of what is computed from births and deaths."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from epiviz.policies.base import Budget, ResolvedBudget
from epiviz.retention import Reason, Retention


class Simulated:
    """A history, its budget, and what every head held after each step."""

    def __init__(self, history: Retention, budget: ResolvedBudget, held: dict[int, list[list[set[int]]]]):
        self.history, self.budget, self.held = history, budget, held


def simulate(
    seed: int, tokens: int, layers: int, heads: int, budget: ResolvedBudget, prompt_length: int, evicts: tuple[int, ...]
) -> Simulated:
    """Feed a prompt at once and then token by token; evict at random when the budget + buffer is reached."""
    generator = np.random.default_rng(seed)
    sets = [[set() for _ in range(heads)] for _ in range(layers)]
    death = np.full((layers, heads, tokens), -1, dtype=np.int32)
    steps, held = [], {0: [[set() for _ in range(heads)] for _ in range(layers)]}
    for step in range(1, tokens + 1):
        for layer in sets:
            for head in layer:
                head.add(step - 1)
        if step < prompt_length:
            continue  # nobody looks inside a prefill
        count = len(sets[evicts[0]][0])
        if (step == prompt_length and count > budget.total) or (step > prompt_length and count >= budget.peak):
            for layer in evicts:
                for head in range(heads):
                    open_to_choice = [t for t in sets[layer][head] if budget.front <= t < step - budget.recent]
                    for token in generator.permutation(open_to_choice)[: count - budget.total]:
                        sets[layer][head].remove(int(token))
                        death[layer, head, token] = len(steps)
            steps.append(step)
        held[step] = [[set(head) for head in layer] for layer in sets]
    death[death < 0] = len(steps)
    reason = np.full_like(death, int(Reason.TOP), dtype=np.uint8)
    history = Retention(np.array(steps, dtype=np.int64), death, reason, prompt_length, evicts)
    return Simulated(history, budget, held)


@st.composite
def simulations(draw, count: int = 1):
    """One small random history, or ``count`` of one text under one budget."""
    tokens, prompt = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    sinks, recent, free = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(0, 5))
    protect = draw(st.booleans())
    front = max(sinks, prompt) if protect else sinks
    total = max(1, front + recent + free)
    budget = Budget(total, sinks, recent, draw(st.integers(1, 6)), protect).resolve(prompt, 0)
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    evicts = draw(st.sampled_from([tuple(range(layers)), (layers - 1,)]))
    made = [
        simulate(draw(st.integers(0, 2**20)), tokens, layers, heads, budget, min(prompt, tokens), evicts)
        for _ in range(count)
    ]
    return made[0] if count == 1 else made
