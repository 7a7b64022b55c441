"""What was kept, and what a selection attended: histories side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import lifetimes

if TYPE_CHECKING:
    from epiviz.decode import Run
    from epiviz.replays import Replay

CHANCE = "chance"  # the row and column of a random eviction with the same sizes


def overlap(replays: Sequence[Replay], step: int | None = None, contested: bool = False) -> pd.DataFrame:
    """Return how much of their kept sets policies share: Jaccard index of each pair, mean over heads.

    Policies that draw use the same random numbers under the same seed, so that two of them look more alike than they
    are; give one another seed to compare them.

    Parameters
    ----------
    replays : sequence of Replay
        Of one trace.
    step : int, optional
        Tokens seen; the last step if not given.
    contested : bool
        Count only tokens that a policy could have evicted, and put "chance" beside the policies: a random eviction
        with the same sizes. What the budget protects is kept by all and makes any two policies look alike.

    Returns
    -------
    pandas.DataFrame
        Square, policies as index and columns. A selection keeps everything, whatever it attends.
    """
    names, table = [each.policy for each in replays], np.eye(len(replays))
    open_to_choice = [lifetimes.contested(each.retention, each.budget, step) for each in replays]
    for i, j in combinations(range(len(replays)), 2):
        among = open_to_choice[i] | open_to_choice[j] if contested else None
        shared = lifetimes.overlap(replays[i].retention, replays[j].retention, step, among=among)
        table[i, j] = table[j, i] = shared.overall
    if contested:
        by_chance = [lifetimes.overlap_by_chance(each.retention, each.budget, step).overall for each in replays]
        table = np.block([[table, np.array(by_chance)[:, None]], [np.array(by_chance), np.ones(1)]])
        names = [*names, CHANCE]
    return pd.DataFrame(table, index=names, columns=names)


def kept(runs: Sequence[Run], step: int | None = None) -> pd.DataFrame:
    """Return the share of the heads that hold each token, for each run; of a selection all do, see :func:`attended`.

    Parameters
    ----------
    runs : sequence of Run
    step : int, optional
        Tokens seen; a run's last step if it is not given or the run is shorter.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``position``, ``part``, ``kept``; only tokens that exist at the step.
    """
    parts = []
    for run in runs:
        history = run.retention
        last = history.tokens if step is None else min(step, history.tokens)
        position = np.arange(last)
        part = np.where(position < history.prompt_length, "prompt", "generated")
        held = history.held(last)[:last]
        parts.append(pd.DataFrame({"policy": run.policy, "position": position, "part": part, "kept": held}))
    return pd.concat(parts, ignore_index=True)


def attended(runs: Sequence[Run | Replay]) -> pd.DataFrame:
    """Return how often each token was attended, for each run of a selection.

    Raises
    ------
    ValueError
        A run selects nothing: there is nothing to tell apart from what it held, :func:`kept`.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``position``, ``part``, ``attended`` (share of queries since the token existed, and of heads),
        ``last_query`` (position of the last query that attended it in any head; −1 if none did).
    """
    parts = []
    for run in runs:
        history = run.attended
        if history is None:
            raise ValueError(f"policy {run.policy!r} selects nothing, its queries attend all that is held; use kept()")
        position = np.arange(history.tokens)
        part = np.where(position < history.prompt_length, "prompt", "generated")
        columns = {"attended": history.share(), "last_query": history.last_query()}
        parts.append(pd.DataFrame({"policy": run.policy, "position": position, "part": part, **columns}))
    return pd.concat(parts, ignore_index=True)
