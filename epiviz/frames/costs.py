"""What runs and replays used, and what eviction cost them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import stats
from epiviz.text import first_divergence

if TYPE_CHECKING:
    from epiviz.decode import Run
    from epiviz.engine import Meter
    from epiviz.policies.base import ResolvedBudget
    from epiviz.replays import Replay


def runs(runs: Sequence[Run], reference: Run | None = None) -> pd.DataFrame:
    """Return one row for each run: how it ended, what it used, and where it left the reference's text.

    Parameters
    ----------
    runs : sequence of Run
    reference : Run, optional
        Usually the full cache's run; without one there is no divergence to tell.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``status``, ``tokens`` (generated), ``evictions``, ``mean_slots``, ``peak_slots``,
        ``prefill_peak_slots``, ``attended_slots``, ``kv_mib``, ``state_mib``, ``same_tokens`` (generated tokens that
        agree with the reference before the first that differs; all of them if none does).
    """
    rows = []
    for run in runs:
        split = None if reference is None else first_divergence(run.tokens, reference.tokens)
        rows.append(
            {
                "policy": run.policy,
                "status": run.status,
                "tokens": len(run.tokens),
                **_used(run.meter),
                "same_tokens": (len(run.tokens) if split is None else split) if reference is not None else None,
            }
        )
    return pd.DataFrame(rows)


def replays(replays: Iterable[Replay], seed: int = 0) -> pd.DataFrame:
    """Return one row for each replay: what it used and what it did to the predictions of its trace.

    Parameters
    ----------
    replays : iterable of Replay
    seed : int
        Of the moving-block bootstrap over tokens behind the interval.

    Returns
    -------
    pandas.DataFrame
        ``trace``, ``policy``, ``budget`` (slots; missing for the full cache) and its ``share`` of the trace's tokens,
        ``sinks``, ``recent``, ``buffer``, ``protect_prompt``, ``seed``, ``positions``; ``evictions``, ``mean_slots``,
        ``peak_slots``, ``prefill_peak_slots``, ``attended_slots``, ``kv_mib``, ``state_mib``, ``bounded``; ``n``
        (predicted tokens), ``nll``, ``full_nll`` and their difference ``nll_increase`` with ``low`` and ``high`` (nats
        per token), ``kl`` (mean), ``top1`` (share of tokens at which both put the same token first),
        ``first_divergence`` (a token) and ``first_margin`` (the full cache's gap between its two highest logits there).
    """
    rows = []
    for replay in replays:
        nll, full_nll, kl = (x[replay.predicted].astype(np.float64) for x in (replay.nll, replay.full_nll, replay.kl))
        difference = nll - full_nll
        increase = stats.bootstrap(lambda i, x=difference: x[i].mean(-1), len(difference), seed=seed)
        rows.append(
            {
                "trace": replay.trace.name,
                "policy": replay.policy,
                **_limits(replay.budget),
                "share": None if replay.budget is None else replay.budget.total / len(replay.trace),
                "seed": replay.seed,
                "positions": replay.positions,
                **_used(replay.meter),
                "bounded": replay.meter.bounded,
                "n": len(difference),
                "nll": nll.mean(),
                "full_nll": full_nll.mean(),
                "nll_increase": increase.value,
                "low": increase.low,
                "high": increase.high,
                "kl": kl.mean(),
                "top1": replay.top1_agreement,
                "first_divergence": replay.first_divergence,
                "first_margin": replay.first_margin,
            }
        )
    return pd.DataFrame(rows)


def _limits(budget: ResolvedBudget | None) -> dict[str, object]:
    names = {"budget": "total"} | {name: name for name in ("sinks", "recent", "buffer", "protect_prompt")}
    return {column: None if budget is None else getattr(budget, name) for column, name in names.items()}


def _used(meter: Meter) -> dict[str, float]:
    """What a run used, in the columns that every comparison shares."""
    return {
        "evictions": meter.evictions,
        "mean_slots": meter.mean_slots,
        "peak_slots": meter.peak_slots,
        "prefill_peak_slots": meter.prefill_peak_slots,
        "attended_slots": meter.attended_slots,
        "kv_mib": meter.kv_bytes / 2**20,
        "state_mib": meter.state_bytes / 2**20,
    }
