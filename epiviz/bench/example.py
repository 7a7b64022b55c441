"""A long trace and its replays without a model: the recorded traces one after another, cut by a rule of a few lines.

It exists to measure views at lengths for which nothing is recorded. Text, ids, scores and value ranges are real,
their sequence is not, and what is kept follows from value ranges or from a draw, not from a policy of this library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from epiviz.policies.base import ResolvedBudget
from epiviz.retention import Reason, Retention
from epiviz.text import join_bytes
from epiviz.trace import Trace

FOLDER = Path(__file__).parents[2] / "data" / "traces"
SINKS, RECENT = 4, 64
METHODS = ("largest values", "random")


@dataclass(frozen=True)
class Example:
    """What a view reads of a replay."""

    trace: Trace
    policy: str
    budget: ResolvedBudget
    retention: Retention
    attended: None = None  # no selection


def long_example(
    tokens: int = 32_768,
    budgets: tuple[int, ...] = (512, 1024, 2048, 4096),
    buffer: int = 128,
    layers: int = 10,
    folder: Path = FOLDER,
) -> tuple[Trace, list[Example]]:
    """Return a trace of so many tokens, and a history of each of :data:`METHODS` under each budget.

    Parameters
    ----------
    tokens : int
    budgets : tuple of int
        Slots per layer and KV head.
    buffer : int
        Tokens between two evictions.
    layers : int
        Layers that the histories tell of, evenly chosen among those of the traces.
    folder : path
        Of the recorded traces.

    Raises
    ------
    FileNotFoundError
        There are no traces: the package was installed without the repository's data.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"there are no traces in {folder}: they are in data/traces/ of a source checkout. Install epiviz from a "
            "clone with `pip install -e .`, or pass the folder of a copy"
        )
    trace = join([Trace.load(file) for file in files], tokens)
    chosen = np.linspace(0, len(trace.value_range) - 1, layers).round().astype(int)
    ranges = trace.value_range[chosen]
    draws = np.random.default_rng(0).random(ranges.shape, dtype=np.float32)
    return trace, [
        Example(trace, method, limits, cut(priority, limits, reason, trace.prompt_length))
        for method, priority, reason in zip(METHODS, (ranges, draws), (Reason.RESERVED, Reason.SAMPLED), strict=True)
        for limits in (ResolvedBudget(total, SINKS, RECENT, buffer, False, SINKS) for total in budgets)
    ]


def join(traces: Sequence[Trace], tokens: int) -> Trace:
    """Return the traces one after another, then their tokens again in other orders until there are so many.

    In another order, because a file that repeats itself would be smaller than any real one.
    """
    once = sum(map(len, traces))
    shuffle = np.random.default_rng(0).permutation
    order = np.concatenate([np.arange(once), *(shuffle(once) for _ in range(tokens // once))])[:tokens]
    pieces = [piece for trace in traces for piece in trace.spans.pieces]
    names = ("tokens", "displacement", "value_range", "surprisal", "entropy")
    arrays = {name: np.concatenate([getattr(trace, name) for trace in traces], axis=-1)[..., order] for name in names}
    spans = join_bytes(pieces[index].encode() for index in order)
    return replace(traces[0], spans=spans, name=f"{tokens:,} tokens", **arrays)


def cut(priority: np.ndarray, budget: ResolvedBudget, reason: Reason, prompt: int) -> Retention:
    """Return the history of a cache in which the highest fixed priorities stay, beside sinks and recent tokens.

    Parameters
    ----------
    priority : float32 ``[layers, kv_heads, tokens]``
    budget : ResolvedBudget
    reason : Reason
        Why a slot stays that is neither a sink nor recent.
    prompt : int
    """
    layers, heads, tokens = priority.shape
    priority = priority.reshape(layers * heads, tokens)
    rows, buffer = np.arange(len(priority))[:, None], budget.buffer
    steps = np.arange(budget.peak, tokens, buffer)  # the last token is never fed
    death = np.full((len(priority), tokens - 1), len(steps), dtype=np.int32)
    reasons = np.zeros(death.shape, dtype=np.uint8)
    held = np.broadcast_to(np.arange(budget.peak), (len(priority), budget.peak))
    for event, step in enumerate(steps):
        open_to_choice = held[:, budget.sinks : -budget.recent]
        lowest = np.argpartition(priority[rows, open_to_choice], buffer, axis=-1)[:, :buffer]
        death[rows, open_to_choice[rows, lowest]] = event
        stays = np.ones(held.shape, dtype=bool)
        stays[rows, budget.sinks + lowest] = False
        held = held[stays].reshape(len(priority), budget.total)
        reasons[rows, held] = reason
        reasons[rows, held[:, -budget.recent :]] = Reason.RECENT
        new = np.broadcast_to(np.arange(step, step + buffer), (len(priority), buffer))
        held = np.concatenate([held, new], axis=-1)
    reasons[:, : budget.sinks] = Reason.SINK
    shape = (layers, heads, tokens - 1)
    return Retention(steps, death.reshape(shape), reasons.reshape(shape), prompt)
