"""Attention recall: how much of what the full model looks at later is still in the evicted cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from epiviz import policies
from epiviz.decode import progress_bar
from epiviz.engine import Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Needs, New
from epiviz.replays import Replay
from epiviz.trace import Trace

BLOCK = 128  # queries at a time: [heads, block, tokens] weights exist, never tokens × tokens


def attention_recall(
    model: Model, trace: Trace, replays: Sequence[Replay], *, progress: bool = True
) -> list[np.ndarray]:
    """Return the share of the full model's attention mass that falls on slots which a replay still holds.

    One pass of the full cache serves all replays.

    Parameters
    ----------
    model : Model
    trace : Trace
    replays : sequence of Replay
        Of this trace. For a selection it is the share of the mass on the slots that it attended.
    progress : bool

    Returns
    -------
    list of float32 ``[layers, kv_heads, tokens]``
        For each replay and each query after the prompt, 0 … 1, mean over the query heads that share a KV head. 1 in
        sliding layers, which evict nothing; NaN for the prompt's tokens and for the last, which attends to nothing.

    Raises
    ------
    ValueError
        A replay of another trace.
    ForeignTraceError
        The trace's ids mean something else to this model.
    """
    trace.check_model(model)
    for found in replays:
        if found.trace.fingerprint != trace.fingerprint:
            raise ValueError(f"a replay of {found.trace.name!r} cannot be measured on the trace {trace.name!r}")
    full, prompt, fed = policies.get("full"), trace.tokens[: trace.prompt_length].tolist(), len(trace) - 1
    rest = torch.tensor(trace.tokens[trace.prompt_length : fed], dtype=torch.int64, device=model.device)[None]
    recorder = _Recorder(model, replays, len(trace))
    row = make_rows([prompt], full, None, rest.shape[1] + 1)
    with (
        Session(model, full, row, rest.shape[1] + 1, 0, recorder=recorder) as session,
        progress_bar(rest.shape[1], "attention recall", progress) as bar,
    ):
        session.prefill()
        for start in range(0, rest.shape[1], BLOCK):
            block = rest[:, start : start + BLOCK]
            session.feed(block)
            bar.update(block.shape[1])
    return recorder.recalled


class _Recorder:
    """Weighs each pass's attention rows with what every replay held then."""

    needs = Needs(rows=True)

    def __init__(self, model: Model, replays: Sequence[Replay], tokens: int):
        self.shape, device = model.shape, model.device
        size = (self.shape.layers, self.shape.kv_heads, tokens)
        self.recalled = [np.full(size, np.nan, dtype=np.float32) for _ in replays]
        self.held = [_Attended(found, device) if found.attended else _Alive(found, device) for found in replays]

    def observe(self, new: New, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        if new.prompt:
            return
        query = new.positions[0]
        place = slice(int(query[0]), int(query[-1]) + 1)
        for recalled in self.recalled:
            recalled[..., place] = 1.0
        for index, layer in enumerate(self.shape.evicts):
            rows = new.rows(index)[0]
            rows = rows.unflatten(0, (self.shape.kv_heads, -1)).mean(1)  # of the heads that share keys and values
            for recalled, held in zip(self.recalled, self.held, strict=True):
                mass = torch.where(held(layer, query, rows.shape[-1]), rows, 0.0).sum(-1)
                recalled[layer, :, place] = mass.float().cpu().numpy()


class _Alive:
    """Which slots a replay held when a query came, bool ``[kv_heads, q, n]``."""

    def __init__(self, replay: Replay, device: torch.device):
        self.left = torch.from_numpy(replay.retention.death_steps()).to(device)

    def __call__(self, layer: int, query: torch.Tensor, n: int) -> torch.Tensor:
        return self.left[layer, :, None, :n] > query[:, None]


class _Attended:
    """Which slots the query of a selection attended, bool ``[kv_heads, q, n]``."""

    def __init__(self, replay: Replay, device: torch.device):
        attended = replay.attended
        if attended.steps is None:
            raise ValueError(f"{replay.policy!r} kept no record of what each query attended: the trace is too long")
        self.steps, self.block = torch.from_numpy(attended.steps).to(device), attended.block
        self.first = attended.prompt_length

    def __call__(self, layer: int, query: torch.Tensor, n: int) -> torch.Tensor:
        blocks = self.steps[layer, :, query - self.first]
        return blocks.repeat_interleave(self.block, dim=-1)[..., :n]
