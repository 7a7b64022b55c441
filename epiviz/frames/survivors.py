"""Who survives eviction: by class of token, by age, how diverse the survivors are, and what a draw promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import lifetimes as algebra
from epiviz import stats
from epiviz.frames.traces import token_classes

if TYPE_CHECKING:
    from epiviz.diversity import Diversity
    from epiviz.inclusion import Inclusion
    from epiviz.replays import Replay


def survival(
    replays: Sequence[Replay],
    groups: np.ndarray | None = None,
    step: int | None = None,
    block: int = stats.BLOCK,
    draws: int = stats.DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Return which tokens each policy keeps, beside a random eviction with the same sizes.

    Only contested tokens count: those that a policy could have evicted by then (:mod:`epiviz.lifetimes`). A policy that
    never evicts has none and no row.

    Parameters
    ----------
    replays : sequence of Replay
        Of one trace.
    groups : ``[tokens]``, optional
        One value for each token, for instance a label; the token classes if not given.
    step : int, optional
        Tokens seen; the last step if not given.
    block, draws, seed : int
        Of the moving-block bootstrap over contested tokens behind the interval.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``group``, ``tokens`` (contested), ``kept`` and ``expected`` (share of tokens × heads that is held,
        and would be by chance), ``excess`` (the difference) with its interval ``low``, ``high``.
    """
    rows = []
    for replay in replays:
        history, budget = replay.retention, replay.budget
        mine = token_classes(replay.trace) if groups is None else np.asarray(groups)
        found = algebra.survival(history, mine, budget, step)
        last = history.tokens if step is None else step
        among = np.flatnonzero(algebra.contested(history, budget, last))
        better = (history.held(last) - algebra.held_by_chance(history, budget, last))[among]
        for name, tokens, kept, expected in zip(found.groups, found.tokens, found.kept, found.expected, strict=True):
            if tokens:
                excess = stats.mean_interval(better, mine[among] == name, block, draws, seed)
                rows.append(
                    (replay.policy, name, tokens, kept.mean(), expected.mean(), excess.value, excess.low, excess.high)
                )
    columns = ["policy", "group", "tokens", "kept", "expected", "excess", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def lifetimes(replays: Sequence[Replay], member: np.ndarray | None = None) -> pd.DataFrame:
    """Return the share of slots that each policy still holds at each age (Kaplan and Meier).

    Parameters
    ----------
    replays : sequence of Replay
        Of one trace.
    member : bool ``[tokens]``, optional
        Only these tokens. What the budget protects for ever, sinks and a protected prompt, is left out anyway.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``age`` (later tokens seen), ``held``.
    """
    parts = []
    for replay in replays:
        history = replay.retention
        own = np.arange(history.tokens) >= (replay.budget.front if replay.budget else 0)
        own &= True if member is None else np.asarray(member, dtype=bool)[: history.tokens]
        held = algebra.survival_curve(algebra.lifetimes(history), own)
        parts.append(pd.DataFrame({"policy": replay.policy, "age": np.arange(len(held)), "held": held}))
    return pd.concat(parts, ignore_index=True)


def diversity(found: Mapping[str, Diversity]) -> pd.DataFrame:
    """Return the diversity of each policy's kept set after each eviction, one row for each head.

    Parameters
    ----------
    found : mapping of str to Diversity
        By policy: ``{replay.policy: recorder.result()}``.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``event``, ``step`` (tokens seen), ``slots`` (measured), ``layer`` (place among the layers that
        evict), ``head``, and a column for each of :data:`epiviz.diversity.MEASURES`.
    """
    parts = []
    for policy, diversity in found.items():
        event, layer, head = np.indices(next(iter(diversity.measures.values())).shape).reshape(3, -1)
        columns = {"event": event, "step": diversity.steps[event], "slots": diversity.slots[event]}
        columns |= {"layer": layer, "head": head}
        columns |= {name: measured.ravel() for name, measured in diversity.measures.items()}
        parts.append(pd.DataFrame({"policy": policy, **columns}))
    return pd.concat(parts, ignore_index=True)


def inclusion(found: Inclusion, level: float = stats.LEVEL) -> pd.DataFrame:
    """Return what a draw promised each token and what came of it, largest share first.

    Returns
    -------
    pandas.DataFrame
        ``token`` (place in the weights), ``share`` (a/Z), ``bound`` (VaSE's), ``exact``, ``frequency`` over ``seeds``
        with its exact interval ``low``, ``high``; ``draws``.
    """
    low, high = found.interval(level)
    frame = pd.DataFrame(
        {
            "token": np.arange(len(found.share)),
            "share": found.share,
            "bound": found.bound,
            "exact": found.exact,
            "frequency": found.frequency,
            "low": low,
            "high": high,
            "draws": found.draws,
            "seeds": found.seeds,
        }
    )
    return frame.sort_values("share", ascending=False, ignore_index=True, kind="stable")
