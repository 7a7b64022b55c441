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
NAMES = ("animals", "sorting", "harbour", "chinese", "kitchen", "trip")  # the shortest first
SHARES = (0.45, 0.8, 0.6, 0.35)  # of the text
PROTECTED = {"sinks": 4, "recent": 16, "buffer": 32, "protect_prompt": True}


def grid(model, traces, cache):
    """Every policy × four budgets × six traces; the prompt is protected and counts in the budget."""
    budgets = [ev.Budget(share, **PROTECTED) for share in SHARES]
    for texts, limits in ((3, 2), (6, 2), (6, 4)):  # a part that can be read, then more
        yield ev.replay_grid(model, traces[:texts], ev.policies.names(), budgets[:limits], cache=cache).frame


def positions(model, traces, cache):
    """Three ways to number kept tokens, evicting every 64 tokens and at each one; four policies, three traces."""
    names, frames = ["random", "streaming", "epikv", "keydiff"], []
    for buffer in (64, 1):
        budget = ev.Budget(0.45, **PROTECTED | {"buffer": buffer})
        for mode in ("absolute", "cache-relative", "rerotated"):
            frames.append(ev.replay_grid(model, traces[:3], names, [budget], positions=mode, cache=cache).frame)
        yield pd.concat(frames, ignore_index=True)


if __name__ == "__main__":
    what, cache = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    model = ev.load("smollm2-135m")
    traces = [ev.Trace.load(HERE.parent / "traces" / f"{name}.safetensors") for name in NAMES]
    for frame in {"grid": grid, "positions": positions}[what](model, traces, cache):  # what is there is written at once
        frame.to_parquet(HERE / f"replay_{what}.parquet", index=False)
        measured = environment(model) | {
            "rows": len(frame),
            "shares": sorted(frame["share"].dropna().round(2).unique()),
        }
        (HERE / f"replay_{what}.json").write_text(json.dumps(measured, indent=1) + "\n")
        print(f"{len(frame)} rows written to replay_{what}.parquet")
