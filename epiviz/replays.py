"""Replay: a policy run over a recorded trace, exactly, with the recorded tokens forced.

Between two evictions nothing leaves a cache, so the trace goes through the same engine as generation in chunks that run
to the next event: the kept sets are those of single steps, at the speed of a prefill. The full cache goes along in
lock-step, so that what eviction does to the predictions is measured token by token and no logits are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from epiviz import policies
from epiviz.attended import Attended
from epiviz.decode import progress_bar
from epiviz.engine import Meter, Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Budget, Policy, ResolvedBudget, Slots
from epiviz.retention import Retention
from epiviz.signals import at_least_float32
from epiviz.trace import Trace

CHUNK = 256  # most tokens per pass: bounds the logits that are compared at a time


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
    """

    trace: Trace
    retention: Retention
    meter: Meter
    nll: np.ndarray
    full_nll: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
    margin: np.ndarray
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
        return float((self.nll - self.full_nll)[self.predicted].mean())

    @property
    def top1_agreement(self) -> float:
        """Share of tokens at which both caches put the same token first."""
        return float(self.agrees[self.predicted].mean())

    @property
    def first_divergence(self) -> int | None:
        """The first token at which they do not, None if they always do."""
        apart = np.flatnonzero(~self.agrees[self.predicted])
        return int(apart[0]) + self.trace.prompt_length if len(apart) else None


def replay(
    model: Model,
    trace: Trace,
    policy: str | Policy = "full",
    budget: Budget | None = None,
    seed: int = 0,
    *,
    positions: str = "absolute",
    progress: bool = True,
    on_event: Callable[[Slots], None] | None = None,
) -> Replay:
    """Run a policy over a recorded trace.

    Parameters
    ----------
    model : Model
        With the tokenizer that the trace was recorded with.
    trace : Trace
    policy, budget, seed, positions, progress
        As in :func:`epiviz.generate`; a budget that is a share is one of the trace.
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
    trace.check_model(model)
    prompt, rest = trace.tokens[: trace.prompt_length].tolist(), trace.tokens[trace.prompt_length :]
    if not len(rest):
        raise ValueError(f"the trace {trace.name!r} has {len(prompt)} prompt tokens and none after them to predict")
    policy = policies.get(policy)
    rows = [make_rows([prompt], each, budget, len(rest)) for each in (policy, policies.get("full"))]
    evicted = Session(model, policy, rows[0], len(rest), seed, positions, on_event=on_event)
    full = Session(model, policies.get("full"), rows[1], len(rest), seed)
    measured = []
    tokens = torch.tensor(rest, dtype=torch.int64, device=model.device)[None]
    with evicted, full, progress_bar(len(rest), f"replay {policy.label}", progress) as bar:
        logits = [session.prefill() for session in (evicted, full)]
        measured.append(_compare(*logits, tokens[0, :1]))
        at = 0
        while at < len(rest) - 1:
            q = min(evicted.room(), CHUNK, len(rest) - 1 - at)
            logits = [session.feed(tokens[:, at : at + q])[0] for session in (evicted, full)]
            measured.append(_compare(*logits, tokens[0, at + 1 : at + 1 + q]))
            at += q
            bar.update(q)
        evicted.finish(evicted.rows)
    columns = [torch.cat(parts).cpu().numpy() for parts in zip(*measured, strict=True)]
    nll, full_nll, kl, agrees, margin = (_behind_prompt(column, len(prompt)) for column in columns)
    return Replay(
        trace=trace,
        retention=rows[0][0].retention,
        meter=rows[0][0].meter,
        nll=nll,
        full_nll=full_nll,
        kl=kl,
        agrees=agrees,
        margin=margin,
        policy=policy.label,
        model=model.name,
        positions=positions,
        budget=rows[0][0].budget,
        seed=seed,
        attended=rows[0][0].attended,
    )


def _compare(evicted: torch.Tensor, full: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compare logits ``[n, vocabulary]`` that predict ``tokens`` ``[n]``: both NLLs, KL, agreement, margin."""
    log_p = [at_least_float32(logits).log_softmax(-1) for logits in (evicted, full)]
    nll, full_nll = (-each.gather(1, tokens[:, None])[:, 0] for each in log_p)
    kl = (log_p[1].exp() * (log_p[1] - log_p[0])).sum(-1)
    top = at_least_float32(full).topk(2, dim=-1)
    return nll, full_nll, kl, evicted.argmax(-1) == top.indices[:, 0], top.values[:, 0] - top.values[:, 1]


def _behind_prompt(column: np.ndarray, prompt_length: int) -> np.ndarray:
    """Put the prompt's places, NaN or False, before a column of measurements."""
    if column.dtype == bool:
        return np.concatenate([np.zeros(prompt_length, dtype=bool), column])
    return np.concatenate([np.full(prompt_length, np.nan), column]).astype(np.float32)
