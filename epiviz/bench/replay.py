"""Replay against stepping through the same trace, and where rounding decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from epiviz import policies
from epiviz.bench.machine import environment
from epiviz.engine import Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Budget, Policy, Ranking
from epiviz.policies.compose import Wrapper
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
    fast, replaying = _timed(lambda: replay(model, trace, quick, budget, compare=False, progress=False))
    (stepped, nll), stepping = _timed(lambda: step(model, trace, slow, budget))
    compared, comparing = _timed(lambda: replay(model, trace, policy, budget, progress=False))
    _, recalling = _timed(lambda: attention_recall(model, trace, [compared], progress=False))
    away = np.abs(fast.nll[fast.predicted] - nll)
    return {
        "stepping": stepping,
        "replay": replaying,
        "compared": comparing,
        "recall": recalling,
        "speedup": stepping / replaying,
        "largest_nll_difference": float(away.max()),
        "decisions": compare_decisions(stepped, fast.retention, slow.seen, quick.seen),
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


@dataclass(frozen=True)
class _Witness(Wrapper):
    """Remembers the priorities at every event."""

    seen: list[np.ndarray] = field(default_factory=list)

    def _composition(self) -> str:
        return self.policy.label

    def rank(self, slots, state, draws) -> Ranking:
        ranking = self.policy.rank(slots, state, draws)
        shape = slots.positions.shape
        priority = ranking.priority.float().expand(shape)
        priority = priority.masked_fill(~slots.candidates.expand(shape) | priority.isinf(), torch.nan)
        self.seen.append(priority[:, 0].cpu().numpy())
        return ranking


def compare_decisions(
    stepped: Retention, replayed: Retention, slow: Sequence[np.ndarray], fast: Sequence[np.ndarray]
) -> dict[str, float]:
    """Compare the decisions of a replay with those of stepping, head by head up to the first that differs.

    Chunks round other than single steps, so priorities that nearly tie may swap. Later differences of a head follow
    from its first, so only the first counts.

    Parameters
    ----------
    stepped, replayed : Retention
        Histories of the same text.
    slow, fast : sequence of float ``[layers, kv_heads, n]``
        The priorities behind each, per event; NaN where there was no choice.

    Returns
    -------
    dict
        ``heads``; ``differing`` (heads with any difference); ``decisions`` and ``share`` (of the decisions up to and
        with the first difference, how many differ); ``noise`` (largest difference of a priority between both runs in
        heads that agree, relative to that head's spread); ``margin`` (largest gap, on the same scale, between two
        slots that swapped at a first difference): rounding explains the differences if it is below the noise.
    """
    layers = stepped.evicting
    a, b = stepped.death[layers], replayed.death[layers]
    heads = a.shape[0] * a.shape[1]
    agree = np.ones(a.shape[:2], dtype=bool)
    decisions, noise, margin = 0, 0.0, 0.0
    for event in range(stepped.events):
        seen = int(stepped.event_steps[event])
        for layer, head in zip(*np.nonzero(agree), strict=True):
            alive = a[layer, head, :seen] >= event  # the same in both, as nothing has differed yet
            decisions += 1
            p, q = slow[event][layer, head], fast[event][layer, head]
            spread = np.nanstd(p) or 1.0
            left = [death[layer, head, :seen][alive] == event for death in (a, b)]
            swapped = left[0] != left[1]
            if swapped.any():
                agree[layer, head] = False
                kept, dropped = p[swapped & ~left[0]], p[swapped & left[0]]
                gap = (np.nanmax(kept, initial=-np.inf) - np.nanmin(dropped, initial=np.inf)) / spread
                margin = max(margin, float(gap))
            else:
                noise = max(noise, float(np.nanmax(np.abs(p - q)) / spread))
    differing = int((~agree).sum())
    return {
        "heads": heads,
        "differing": differing,
        "decisions": decisions,
        "share": differing / max(1, decisions),
        "noise": noise,
        "margin": margin,
    }


def _timed(call: Callable) -> tuple[object, float]:
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start
