"""How much of the full model's attention the kept slots still hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from epiviz import stats

if TYPE_CHECKING:
    from epiviz.replays import Replay


def recall(replays: Sequence[Replay], recalled: Sequence[np.ndarray], seed: int = 0) -> pd.DataFrame:
    """Return the mean attention recall of each replay, over tokens and over heads.

    Only the tokens after the first eviction count: before it nothing could be missing.

    Parameters
    ----------
    replays : sequence of Replay
    recalled : sequence of float32 ``[layers, kv_heads, tokens]``
        From :func:`epiviz.attention_recall`.
    seed : int
        Of the moving-block bootstrap over tokens behind the interval.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``recall`` (mean share, 0 … 1) with ``low`` and ``high``; ``worst_heads`` (mean of the tenth of the
        heads that lose most), ``n`` (tokens). Replays in which no token follows an eviction have no row.
    """
    rows = []
    for replay, share in zip(replays, recalled, strict=True):
        retention = replay.retention
        if not retention.events and replay.attended is None:
            continue
        first = int(retention.event_steps[0]) if retention.events else replay.trace.prompt_length
        if first >= retention.tokens:  # no token was left to look back
            continue
        heads = share[retention.evicting][..., first : retention.tokens].reshape(-1, retention.tokens - first)
        token = heads.mean(0, dtype=np.float64)
        found = stats.bootstrap(lambda index, x=token: x[index].mean(-1), len(token), seed=seed)
        lowest = np.sort(heads.mean(1, dtype=np.float64))[: max(1, len(heads) // 10)]
        rows.append({"policy": replay.policy, "recall": found.value, "low": found.low, "high": found.high}
                    | {"worst_heads": lowest.mean(), "n": len(token)})  # fmt: skip
    return pd.DataFrame(rows, columns=["policy", "recall", "low", "high", "worst_heads", "n"])
