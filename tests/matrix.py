"""The table of cells in which every policy must hold, and what must hold in a cell.

A cell is a policy on a tiny random model of one architecture, head layout and dtype. Tests run :data:`CI`; the whole
product, :data:`FULL`, is what ``make test-full`` runs and writes down in ``data/results/matrix.csv``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from oracle import deviation, evicting_run
from tiny import random_prompt, tiny_model

import epiviz as ev

BUDGET = ev.Budget(total=40, sinks=2, recent=8, buffer=8)
PROMPTS = (12, 57, 102)  # a batch whose prompts differ by 90 tokens, two of them longer than the budget
POLICIES = ev.policies.names()
# memory grows with the text, and the meter says so
UNBOUNDED = ("full", "lagkv-ratio", "seer-oracle", "seer-quest", "snapkv-prefill")
FIRST_SIX = ("full", "random", "streaming", "epikv", "vase-attnv", "vase-dkv")
REPRESENTATIVES = ("random", "epikv", "vase-attnv", "vase-dkv", "h2o", "rkv")  # one for each kind of need
HEADS = [(name, *heads) for name in ("llama", "qwen3") for heads in ((4, 2), (1, 1), (8, 1))]
MODELS = [*HEADS, *((name, 4, 2) for name in ("qwen2", "mistral", "phi3", "smollm3", "gemma3"))]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MODEL = ("qwen3", 4, 2)
ALONE, SHUFFLED, ALL = (1,), (2, 0, 1), (0, 1, 2)
LONG = 300  # tokens that half precision must survive


@dataclass(frozen=True)
class Cell:
    """One combination, and how many tokens it generates."""

    policy: str
    architecture: str
    heads: int
    kv_heads: int
    dtype: torch.dtype = torch.float64
    positions: str = "absolute"
    tokens: int = 32
    rows: tuple[int, ...] = (1, 2)  # of the prompts
    orders: tuple[tuple[int, ...], ...] = (ALONE,)  # rows that must do the same without the rest, or in another order

    @property
    def half(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def tolerance(self) -> float:
        """Largest difference to the oracle; in single precision as a share of the largest logit.

        Models that do not normalise queries and keys have large attention logits here: even their full cache differs
        from a full pass by 6e-6 in single precision.
        """
        if self.dtype == torch.float64:
            return 1e-9
        return 1e-5 if self.architecture in ("qwen3", "gemma3") else 4e-5

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [self.policy, self.architecture, f"{self.heads}:{self.kv_heads}", dtype]
        return " ".join(parts if self.positions == "absolute" else [*parts, self.positions])


def _table() -> list[Cell]:
    """The cells of CI; of two that differ only in what they run, the later one stays."""
    halves = [dtype for dtype in DTYPES if dtype.itemsize == 2]
    exact_and_half = (torch.float64, torch.bfloat16)
    cells = [Cell(policy, *model, dtype) for policy, model, dtype in product(REPRESENTATIVES, MODELS, exact_and_half)]
    cells += [Cell(policy, *model, dtype) for policy, model, dtype in product(REPRESENTATIVES, HEADS, DTYPES)]
    cells += [Cell(policy, *MODEL, dtype, tokens=LONG) for policy, dtype in product(REPRESENTATIVES, halves)]
    cells += [Cell(policy, *model, tokens=96, rows=ALL) for policy, model in product(FIRST_SIX, HEADS)]
    cells += [Cell(policy, *MODEL, positions="cache-relative") for policy in REPRESENTATIVES]
    cells += [
        Cell(policy, *MODEL, tokens=200 if policy in FIRST_SIX else 64, rows=ALL, orders=((0,), ALONE, (2,), SHUFFLED))
        for policy in POLICIES
    ]
    return list({str(cell): cell for cell in cells}.values())


CI = _table()
FULL = [
    Cell(policy, *model, dtype, tokens=LONG if dtype.itemsize == 2 and model == MODEL else 64, rows=ALL,
         orders=(ALONE, SHUFFLED))
    for policy, model, dtype in product(POLICIES, MODELS, DTYPES)
] + [Cell(policy, *MODEL, positions="cache-relative", tokens=64, rows=ALL) for policy in POLICIES]  # fmt: skip


def check(cell: Cell) -> dict[str, float]:
    """Assert everything that must hold in a cell; return what was measured.

    In float64 the rows of a batch, in any order, do exactly what each does alone, and all equal the oracle. Single
    precision stays within rounding of it; half precision stays finite. What happens at each event (slots sorted and
    distinct, no more than the budget, kept ones bit for bit) is asserted by the session that :func:`evicting_run` uses.
    """
    model = tiny_model(cell.architecture, cell.heads, cell.kv_heads, cell.dtype)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(PROMPTS)]

    def run(which: tuple[int, ...]) -> dict:
        chosen = [prompts[i] for i in which]
        return dict(
            zip(which, evicting_run(model, chosen, cell.policy, BUDGET, cell.tokens, 3, cell.positions), strict=True)
        )

    batch = run(cell.rows)
    for row in batch.values():
        _check_row(cell, model, row)
    worst = 0.0 if cell.half else max(deviation(model, row) for row in batch.values())
    if cell.dtype == torch.float64:
        for order in cell.orders:
            for i, row in run(order).items():
                same(batch[i], row)
                worst = max(worst, deviation(model, row))
    scale = max(1.0, *(torch.stack(row.logits).abs().max().item() for row in batch.values()))
    assert worst <= cell.tolerance * (1.0 if cell.dtype == torch.float64 else scale)
    return {"deviation": worst, "events": min(row.retention.events for row in batch.values())}


def _check_row(cell: Cell, model, row) -> None:
    retention, logits = row.retention, torch.stack(row.logits)
    assert logits.isfinite().all() and logits.dtype == cell.dtype
    assert len(row.tokens) == cell.tokens
    assert row.meter.bounded == (cell.policy not in UNBOUNDED)
    evicted = (retention.death < retention.events).any(axis=(1, 2))
    assert not evicted[list(model.shape.slides)].any() and retention.evicts == model.shape.evicts
    if cell.policy in UNBOUNDED:
        return  # their evictions have tests of their own
    assert retention.events >= 3
    assert evicted[list(model.shape.evicts)].all()
    assert row.meter.peak_slots <= BUDGET.total + BUDGET.buffer


def same(a, b) -> None:
    """Assert that two rows wrote and kept the same."""
    assert a.tokens == b.tokens and a.status == b.status
    assert np.array_equal(a.retention.event_steps, b.retention.event_steps)
    assert np.array_equal(a.retention.death, b.retention.death)
    assert np.array_equal(a.retention.reason, b.retention.reason)
