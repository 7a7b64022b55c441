"""Replay against stepping through the same trace, and where rounding decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from epiviz import policies
from epiviz.bench.machine import environment
from epiviz.cache import choose
from epiviz.engine import Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Budget, Policy, Ranking, Slots
from epiviz.policies.compose import Wrapper
from epiviz.policies.reserve import ReserveValues
from epiviz.recall import attention_recall
from epiviz.replays import noise_floor, replay
from epiviz.retention import Retention
from epiviz.signals import at_least_float32
from epiviz.trace import Trace, record


def long_trace(model: Model, tokens: int) -> Trace:
    """Return a trace of so many tokens that the model reads: numbered sentences, which need no recording."""
    sentence = "Step {n}: we carry {a} over, add {b}, and keep {c} for later; so far nothing contradicts line {d}.\n"
    text, ids = "", []
    for n in range(1, tokens):
        text += sentence.format(n=n, a=n * 7 % 97, b=n * 13 % 89, c=n * 29 % 101, d=n // 2)
        ids = model.encode(text, raw=True)
        if len(ids) >= tokens:
            break
    return record(model, ids[:64], tokens=ids[64:tokens], name=f"{tokens} tokens", progress=False)


def bench_replay(
    model: Model,
    trace: Trace,
    names: Sequence[str] = ("epikv", "vase-attnv"),
    budget: Budget | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measure replay against plain stepping on one trace.

    Parameters
    ----------
    model : Model
    trace : Trace
    names : sequence of str
        Policies, each measured on its own.
    budget : Budget, optional
        By default 256 slots and a buffer of 64.
    say : callable
        Gets a line when something was measured.

    Returns
    -------
    dict
        ``environment``, ``tokens``, ``budget``, ``noise_floor`` (full cache, other chunking), and for each policy:
        seconds of ``stepping`` (retention + NLL), ``replay`` (the same), ``compared`` (KL and agreement besides) and
        ``recall``; ``speedup`` = stepping ÷ replay; and ``decisions``, see :func:`compare_decisions`.
    """
    budget = budget or Budget(256, buffer=64)
    floor, took = _timed(lambda: noise_floor(model, trace, progress=False))
    say(f"full cache against itself in other chunks: {took:.1f} s")
    found = {
        "environment": environment(model),
        "trace": trace.name,
        "tokens": len(trace),
        "budget": vars(budget),
        "noise_floor": {
            "nll": float(np.abs(floor.nll - floor.full_nll)[floor.predicted].max()),
            "kl": float(floor.kl[floor.predicted].max()),
            "top1": floor.top1_agreement,
            "n": len(trace) - trace.prompt_length,
        },
        "policies": {},
    }
    for name in names:
        found["policies"][name] = _bench_one(model, trace, policies.get(name), budget)
        one = found["policies"][name]
        say(f"{name}: stepping {one['stepping']:.1f} s, replay {one['replay']:.1f} s, ratio {one['speedup']:.1f}")
    return found


def _bench_one(model: Model, trace: Trace, policy: Policy, budget: Budget) -> dict[str, object]:
    replay(model, trace, policy, budget, compare=False, progress=False)  # the first pass pays for what later ones reuse
    slow, quick = _Witness(policy), _Witness(policy)  # both runs remember alike, so the ratio stays fair
    _, replaying = _timed(lambda: replay(model, trace, quick, budget, compare=False, progress=False))
    (stepped, nll), stepping = _timed(lambda: step(model, trace, slow, budget))
    compared, comparing = _timed(lambda: replay(model, trace, policy, budget, progress=False))
    _, recalling = _timed(lambda: attention_recall(model, trace, [compared], progress=False))
    led = _Witness(policy, follow=stepped)
    same = replay(model, trace, led, budget, compare=False, progress=False)
    return {
        "stepping": stepping,
        "replay": replaying,
        "compared": comparing,
        "recall": recalling,
        "speedup": stepping / replaying,
        "largest_nll_difference": float(np.abs(same.nll[same.predicted] - nll).max()),
        "decisions": compare_decisions(slow.seen, led.seen),
    }


def step(model: Model, trace: Trace, policy: Policy, budget: Budget) -> tuple[Retention, np.ndarray]:
    """Feed a trace token by token, as decoding would; return its history and each token's −log p (nats)."""
    prompt, rest = trace.tokens[: trace.prompt_length].tolist(), trace.tokens[trace.prompt_length :]
    rows = make_rows([prompt], policy, budget, len(rest))
    tokens = torch.tensor(rest, dtype=torch.int64, device=model.device)[None]
    nll = []
    with Session(model, policy, rows, len(rest), 0) as session:
        logits = session.prefill()
        for at in range(len(rest)):
            log_p = at_least_float32(logits[0]).log_softmax(-1)
            nll.append(-log_p[tokens[0, at]])
            if at < len(rest) - 1:
                logits = session.feed(tokens[:, at : at + 1])[:, -1]
        session.finish(session.rows)
    return rows[0].retention, torch.stack(nll).cpu().numpy()


# -- where rounding decides --------------------------------------------------------------------------------------------


# One stage of a decision: scores, float [layers, kv_heads, n], NaN where there was no choice; and what was chosen.
Stage = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Witness(Wrapper):
    """Remembers by what slots were chosen at every event; with ``follow`` that history is evicted instead."""

    follow: Retention | None = None
    seen: list[list[Stage]] = field(default_factory=list)

    def _composition(self) -> str:
        return self.policy.label

    def rank(self, slots, state, draws) -> Ranking:
        ranking = self.policy.rank(slots, state, draws)
        priority = ranking.priority.double().expand(slots.positions.shape)
        self.seen.append(self._stages(slots, priority))
        return ranking if self.follow is None else Ranking(self._survives(slots))

    def _stages(self, slots: Slots, priority: torch.Tensor) -> list[Stage]:
        budget, candidates = slots.budget, slots.candidates.expand(priority.shape)
        _, evicted = choose(priority, budget.front, budget.recent, budget.total)
        kept, stages = candidates.scatter(-1, evicted, False), []
        if isinstance(self.policy, ReserveValues):  # it chooses twice, by different numbers
            reserved = candidates & (priority == torch.inf)
            stages, kept = [(self.policy.size(slots).double(), reserved)], kept & ~reserved
        stages.append((priority, kept))
        return [
            (
                scores.masked_fill(~candidates | scores.isinf(), torch.nan)[:, 0].cpu().numpy(),
                chosen[:, 0].cpu().numpy(),
            )
            for scores, chosen in stages
        ]

    def _survives(self, slots: Slots) -> torch.Tensor:
        death = torch.from_numpy(self.follow.death[list(self.follow.evicting)]).to(slots.positions.device)
        return (death.gather(-1, slots.positions[:, 0]) >= len(self.seen)).double()[:, None]


def compare_decisions(slow: Sequence[Sequence[Stage]], fast: Sequence[Sequence[Stage]]) -> dict[str, float]:
    """Compare the decisions of a replay with those of stepping, on the same history.

    Chunks round other than single steps, so scores that nearly tie may swap. The replay evicts what stepping evicted,
    so that each decision stands for itself and none follows from an earlier one.

    Parameters
    ----------
    slow, fast : sequence of sequence of (float, bool) ``[layers, kv_heads, n]``
        Per event and stage of a choice: the scores, NaN where there was no choice, and what was chosen. A reserve
        chooses twice; a second choice counts where the first was the same.

    Returns
    -------
    dict
        ``decisions`` (heads × events); ``differing``, and their ``share``; ``noise``, the largest difference of a score
        between both runs in decisions that agree, relative to the spread of that head's scores; ``margin``, the
        largest gap, on the same scale, between two slots that swapped. Two scores that are each off by the noise can
        swap over twice as much.
    """
    decisions, differing, noise, margin = 0, 0, 0.0, 0.0
    for ours, theirs in zip(slow, fast, strict=True):
        same = np.ones(ours[0][0].shape[:2], dtype=bool)
        decisions += same.size
        for (p, kept), (q, wished) in zip(ours, theirs, strict=True):
            spread = np.nanstd(p, axis=-1)
            spread[spread == 0] = 1.0
            swapped = same & (kept != wished).any(-1)
            same &= ~swapped
            noise = max(noise, (np.nanmax(np.abs(p - q), axis=-1) / spread)[same].max(initial=0.0))
            lost = np.where(kept & ~wished, p, -np.inf).max(-1)
            won = np.where(wished & ~kept, p, np.inf).min(-1)
            margin = max(margin, ((lost - won) / spread)[swapped].max(initial=0.0))
            differing += int(swapped.sum())
    return {
        "decisions": decisions,
        "differing": differing,
        "share": differing / max(1, decisions),
        "noise": float(noise),
        "margin": float(margin),
    }


def _timed(call: Callable) -> tuple[object, float]:
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start
