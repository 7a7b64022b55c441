"""Recompute what is measured here: python data/results/recompute.py grid|positions [cache folder]

Both read the shipped traces and take about an hour on two CPU cores. They resume: finished replays are kept in the
user's cache directory (or the folder given), which several processes may share.
"""

import json
import sys
from pathlib import Path

import pandas as pd

import epiviz as ev
from epiviz.bench import environment

HERE = Path(__file__).parent
NAMES = ("trip", "animals", "sorting", "chinese", "harbour", "kitchen")
SHARES = (0.35, 0.45, 0.6, 0.8)
PROTECTED = {"sinks": 4, "recent": 16, "buffer": 32, "protect_prompt": True}


def grid(model, traces, cache):
    """Every policy × four budgets × six traces; the prompt is protected and counts in the budget."""
    budgets = [ev.Budget(share, **PROTECTED) for share in SHARES]
    return ev.replay_grid(model, traces, ev.policies.names(), budgets, cache=cache).frame


def positions(model, traces, cache):
    """Three ways to number kept tokens, evicting at every token and every 64, for four policies."""
    names = ["random", "streaming", "epikv", "keydiff"]
    frames = [
        ev.replay_grid(
            model, traces, names, [ev.Budget(0.45, **PROTECTED | {"buffer": buffer})], positions=mode, cache=cache
        ).frame
        for buffer in (64, 1)
        for mode in ("absolute", "cache-relative", "rerotated")
    ]
    return pd.concat(frames, ignore_index=True)


if __name__ == "__main__":
    what, cache = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    model = ev.load("smollm2-135m")
    traces = [ev.Trace.load(HERE.parent / "traces" / f"{name}.safetensors") for name in NAMES]
    frame = {"grid": grid, "positions": positions}[what](model, traces, cache)
    frame.to_parquet(HERE / f"replay_{what}.parquet", index=False)
    (HERE / f"replay_{what}.json").write_text(json.dumps(environment(model) | {"rows": len(frame)}, indent=1) + "\n")
    print(f"{len(frame)} rows written to replay_{what}.parquet")
