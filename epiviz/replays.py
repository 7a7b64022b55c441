"""Replay: a policy run over a recorded trace, exactly, with the recorded tokens forced.

Between two evictions nothing leaves a cache, so the trace goes through the same engine as generation in chunks that run
to the next event: the kept sets are those of single steps, at the speed of a prefill. The full cache goes ahead block
by block, so that what eviction does to the predictions is measured token by token and no logits are kept. Several
policies may share its pass.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm.auto import tqdm

from epiviz import policies
from epiviz.attended import Attended
from epiviz.decode import progress_bar
from epiviz.engine import Meter, Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Budget, Policy, ResolvedBudget, Slots
from epiviz.results import write_atomically
from epiviz.retention import Retention
from epiviz.signals import at_least_float32
from epiviz.trace import Trace

BLOCK = 256  # tokens of the reference at a time: bounds the logits that are compared at once
COMPARED = ("full_nll", "kl", "agrees", "margin")  # what only a comparison with the full cache measures
FORMAT = "epiviz-replay-1"


_HISTORY = ("event_steps", "death", "reason", "positions")


class ReplayFileError(ValueError):
    """A file that holds no replay of the trace at hand."""


@dataclass(frozen=True, eq=False)
class Replay:
    """What a policy keeps of a trace, and what that does to the model's predictions.

    Attributes
    ----------
    trace : Trace
    retention : Retention
        Over all tokens but the last, which predicts nothing.
    meter : Meter
    nll, full_nll : float32 ``[tokens]``
        −log p of each token in nats, under eviction and under the full cache. NaN in the prompt.
    kl : float32 ``[tokens]``
        KL(full ‖ evicted) of the distributions that predict each token, in nats. NaN in the prompt.
    agrees : bool ``[tokens]``
        Both put the same token first. False in the prompt.
    margin : float32 ``[tokens]``
        Gap between the two highest logits under the full cache: how near a tie a disagreement is.
    policy, model, positions : str
    budget : ResolvedBudget or None
    seed : int
    attended : Attended or None
        What a selection attended; None if the policy selects nothing.

    Notes
    -----
    A replay that was not compared with the full cache has None for ``full_nll``, ``kl``, ``agrees`` and ``margin``.
    """

    trace: Trace
    retention: Retention
    meter: Meter
    nll: np.ndarray
    full_nll: np.ndarray | None
    kl: np.ndarray | None
    agrees: np.ndarray | None
    margin: np.ndarray | None
    policy: str
    model: str
    positions: str
    budget: ResolvedBudget | None
    seed: int
    attended: Attended | None = None

    @property
    def predicted(self) -> slice:
        """The tokens that were predicted: those after the prompt."""
        return slice(self.trace.prompt_length, len(self.trace))

    @property
    def nll_increase(self) -> float:
        """Mean −log p under eviction minus that under the full cache, in nats per token."""
        return float((self.nll - self._compared("full_nll"))[self.predicted].mean())

    @property
    def top1_agreement(self) -> float:
        """Share of tokens at which both caches put the same token first."""
        return float(self._compared("agrees")[self.predicted].mean())

    @property
    def first_divergence(self) -> int | None:
        """The first token at which they do not, None if they always do."""
        apart = np.flatnonzero(~self._compared("agrees")[self.predicted])
        return int(apart[0]) + self.trace.prompt_length if len(apart) else None

    @property
    def first_margin(self) -> float | None:
        """Gap between the two highest logits of the full cache at the first divergence, None if there is none."""
        at = self.first_divergence
        return None if at is None else float(self.margin[at])

    def save(self, path: str | os.PathLike) -> Path:
        """Write everything but the trace to one safetensors file with a JSON header."""
        arrays = {name: getattr(self, name) for name in ("nll", *COMPARED)} | {
            f"retention.{name}": getattr(self.retention, name) for name in _HISTORY
        }
        header = {
            "format": FORMAT,
            "trace": self.trace.fingerprint,
            "meter": asdict(self.meter),
            "prompt_length": self.retention.prompt_length,
            "evicts": self.retention.evicts,
            "budget": None if self.budget is None else asdict(self.budget),
            **{name: getattr(self, name) for name in ("policy", "model", "positions", "seed")},
        }
        if self.attended is not None:
            stored = asdict(self.attended)
            arrays |= {f"attended.{name}": x for name, x in stored.items() if isinstance(x, np.ndarray)}
            header["attended"] = {name: x for name, x in stored.items() if not isinstance(x, np.ndarray)}
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items() if x is not None}
        path = Path(path)
        metadata = {"epiviz": json.dumps(header)}
        write_atomically(path, lambda temporary: save_file(arrays, str(temporary), metadata=metadata))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike, trace: Trace) -> Replay:
        """Read a replay of ``trace``; no model is needed.

        Raises
        ------
        ReplayFileError
            The file is cut off, damaged, something else, or of another trace.
        """
        try:
            with safe_open(str(path), framework="np") as file:
                header = json.loads((file.metadata() or {}).get("epiviz", "{}"))
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ReplayFileError(f"{path} is cut off, damaged or no replay ({error}); replay again") from error
        if header.pop("format", None) != FORMAT:
            raise ReplayFileError(f"{path} is no replay in the format {FORMAT}; replay again")
        if header.pop("trace") != trace.fingerprint:
            raise ReplayFileError(f"{path} is a replay of another trace than {trace.name!r}")
        history = {name: arrays.get(f"retention.{name}") for name in _HISTORY}
        retention = Retention(**history, prompt_length=header.pop("prompt_length"), evicts=tuple(header.pop("evicts")))
        meter, budget, chosen = Meter(**header.pop("meter")), header.pop("budget"), header.pop("attended", None)
        if chosen is not None:
            chosen["layers"] = tuple(chosen["layers"])
            named = {name: arrays.get(f"attended.{name}") for name in ("count", "last", "steps")}
            chosen = Attended(**(named | chosen))
        return cls(
            trace=trace,
            retention=retention,
            meter=meter,
            budget=None if budget is None else ResolvedBudget(**budget),
            attended=chosen,
            **{name: arrays.get(name) for name in ("nll", *COMPARED)},
            **header,
        )

    def _compared(self, name: str) -> np.ndarray:
        values = getattr(self, name)
        if values is None:
            raise ValueError(f"this replay of {self.policy!r} was not compared with the full cache: compare=True does")
        return values


@dataclass(frozen=True)
class Job:
    """One policy under one budget, to be replayed."""

    policy: Policy
    budget: Budget | None
    seed: int = 0
    positions: str = "absolute"
    on_event: Callable[[Slots], None] | None = None


def replay(
    model: Model,
    trace: Trace,
    policy: str | Policy = "full",
    budget: Budget | None = None,
    seed: int = 0,
    *,
    positions: str = "absolute",
    compare: bool = True,
    chunk: int = BLOCK,
    on_event: Callable[[Slots], None] | None = None,
    progress: bool = True,
) -> Replay:
    """Run a policy over a recorded trace.

    Parameters
    ----------
    model : Model
        With the tokenizer that the trace was recorded with.
    trace : Trace
    policy, budget, seed, positions, progress
        As in :func:`epiviz.generate`; a budget that is a share is one of the trace.
    compare : bool
        Run the full cache beside it and compare predictions; without, only ``nll`` is measured, in half the time.
    chunk : int
        At most so many tokens per forward pass; 1 is plain stepping.
    on_event : callable, optional
        Called after each eviction with the :class:`~epiviz.policies.base.Slots` that stay, to be looked at and not
        changed; for instance a :class:`epiviz.diversity.DiversityRecorder`.

    Returns
    -------
    Replay

    Raises
    ------
    ForeignTraceError
        The trace's ids mean something else to this model.
    ValueError
        The trace has no tokens after its prompt, or other bad input as in :func:`epiviz.generate`.
    """
    job = Job(policies.get(policy), budget, seed, positions, on_event)
    return replay_together(model, trace, [job], compare=compare, chunk=chunk, progress=progress)[0]


def noise_floor(model: Model, trace: Trace, *, chunk: int = 64, progress: bool = True) -> Replay:
    """Compare the full cache with itself, fed in other chunks: what rounding alone does to every measure."""
    return replay(model, trace, "full", chunk=chunk, progress=progress)


def replay_together(
    model: Model,
    trace: Trace,
    jobs: Sequence[Job],
    *,
    compare: bool = True,
    chunk: int = BLOCK,
    progress: bool = True,
) -> list[Replay]:
    """Replay several policies over one trace, beside one pass of the full cache for all; see :func:`replay`."""
    trace.check_model(model)
    prompt, rest = trace.tokens[: trace.prompt_length].tolist(), trace.tokens[trace.prompt_length :]
    if not len(rest):
        raise ValueError(f"the trace {trace.name!r} has {len(prompt)} prompt tokens and none after them to predict")
    if operator.index(chunk) < 1:
        raise ValueError(f"a chunk has at least 1 token, got {chunk}")
    nothing = policies.get("full")
    rows = [make_rows([prompt], job.policy, job.budget, len(rest))[0] for job in jobs]
    sessions = [
        Session(model, job.policy, [row], len(rest), job.seed, job.positions, on_event=job.on_event)
        for job, row in zip(jobs, rows, strict=True)
    ]
    full = Session(model, nothing, make_rows([prompt], nothing, None, len(rest)), len(rest), 0) if compare else None
    tokens = torch.tensor(rest, dtype=torch.int64, device=model.device)[None]
    label = f"replay {jobs[0].policy.label}" if len(jobs) == 1 else f"replay {len(jobs)} policies"
    with ExitStack() as stack, progress_bar(len(rest) * len(jobs), label, progress) as bar:
        for session in [*sessions, *([full] if compare else [])]:
            stack.enter_context(session)
        measured = _feed(sessions, full, tokens, chunk, bar)
        for session in sessions:
            session.finish(session.rows)
    return [
        Replay(
            trace=trace,
            retention=row.retention,
            meter=row.meter,
            **_columns(parts, len(prompt)),
            policy=session.policy.label,
            model=model.name,
            positions=job.positions,
            budget=row.budget,
            seed=job.seed,
            attended=row.attended,
        )
        for job, row, session, parts in zip(jobs, rows, sessions, measured, strict=True)
    ]


def _feed(
    sessions: Sequence[Session], full: Session | None, tokens: torch.Tensor, chunk: int, bar: tqdm
) -> list[list[dict[str, torch.Tensor]]]:
    """Feed the tokens ``[1, n]`` behind the prompt to all sessions; return per session what its pieces measured.

    The full cache, if it is there to compare with, reads each block first.
    """
    reference = _Reference.of(full.prefill(), tokens[0, :1]) if full else None
    measured = [[_measure(session.prefill(), tokens[0, :1], reference)] for session in sessions]
    last = tokens.shape[1] - 1  # the last token predicts nothing
    for at in range(0, last, BLOCK):
        block = tokens[:, at : min(at + BLOCK, last)]
        targets = tokens[0, at + 1 : at + 1 + block.shape[1]]
        reference = _Reference.of(full.feed(block)[0], targets) if full else None
        for session, parts in zip(sessions, measured, strict=True):
            for piece, logits in _in_chunks(session, block, chunk):
                parts.append(_measure(logits, targets[piece], reference and reference[piece]))
                bar.update(len(logits))
    return measured


def _in_chunks(session: Session, block: torch.Tensor, chunk: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Feed a block ``[1, n]`` from event to event; yield each piece and its logits ``[q, vocabulary]``."""
    start, n = 0, block.shape[1]
    while start < n:
        piece = slice(start, start + min(session.room(), chunk, n - start))
        yield piece, session.feed(block[:, piece])[0]
        start = piece.stop


@dataclass(frozen=True)
class _Reference:
    """What the full cache predicts for some tokens."""

    log_p: torch.Tensor  # [n, vocabulary]
    nll: torch.Tensor
    top: torch.Tensor
    margin: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, tokens: torch.Tensor) -> _Reference:
        log_p = at_least_float32(logits).log_softmax(-1)
        best = log_p.topk(2, dim=-1).values
        # argmax, as for the evicted pass: of equal ones topk may name another, and equal logits are common in bfloat16
        return cls(log_p, _nll(log_p, tokens), log_p.argmax(-1), best[:, 0] - best[:, 1])

    def __getitem__(self, piece: slice) -> _Reference:
        return _Reference(self.log_p[piece], self.nll[piece], self.top[piece], self.margin[piece])


def _measure(logits: torch.Tensor, tokens: torch.Tensor, full: _Reference | None) -> dict[str, torch.Tensor]:
    """Measure logits ``[n, vocabulary]`` that predict ``tokens`` ``[n]``."""
    log_p = at_least_float32(logits).log_softmax(-1)
    measured = {"nll": _nll(log_p, tokens)}
    if full is not None:
        measured["full_nll"] = full.nll
        measured["kl"] = (full.log_p.exp() * (full.log_p - log_p)).sum(-1)
        measured["agrees"] = log_p.argmax(-1) == full.top
        measured["margin"] = full.margin
    return measured


def _nll(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return -log_p.gather(1, tokens[:, None])[:, 0]


def _columns(parts: list[dict[str, torch.Tensor]], prompt_length: int) -> dict[str, np.ndarray | None]:
    """Join measurements and put the prompt's places, NaN or False, before them."""
    columns: dict[str, np.ndarray | None] = dict.fromkeys(("nll", *COMPARED))
    for name in parts[0]:
        column = torch.cat([part[name] for part in parts]).cpu().numpy()
        empty = np.zeros(prompt_length, dtype=bool) if column.dtype == bool else np.full(prompt_length, np.nan)
        joined = np.concatenate([empty, column])
        columns[name] = joined if joined.dtype == bool else joined.astype(np.float32)
    return columns
