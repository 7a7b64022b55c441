"""Recompute what is measured here: python data/results/recompute.py grid|positions|accuracy [cache folder]

The first two read the shipped traces and take about an hour on two CPU cores; the last lets the tiny reasoner solve
problems and takes a night. They resume: what is finished is kept in the user's cache directory (or the folder given),
which several processes may share.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

import epiviz as ev
from epiviz import policies, tasks
from epiviz.bench import environment

HERE = Path(__file__).parent
NAMES = ("animals", "sorting", "harbour", "chinese", "kitchen", "trip")  # the shortest first
SHARES = (0.45, 0.8, 0.6, 0.35)  # of the text
PROTECTED = {"sinks": 4, "recent": 16, "buffer": 32, "protect_prompt": True}


def traces(n):
    return [ev.Trace.load(HERE.parent / "traces" / f"{name}.safetensors") for name in NAMES[:n]]


# Where the prompt is protected, the sinks lie in it, and keeping the newest is what streaming does.
APART = [name for name in policies.names() if name != "recency"]


def grid(model, cache):
    """Every policy × four budgets × six traces; the prompt is protected and counts in the budget."""
    budgets = [ev.Budget(share, **PROTECTED) for share in SHARES]
    for texts, limits in ((3, 2), (6, 2), (6, 4)):  # a part that can be read, then more
        yield ev.replay_grid(model, traces(texts), APART, budgets[:limits], cache=cache).frame


def positions(model, cache):
    """Three ways to number kept tokens, evicting every 64 tokens and at each one; four policies, three traces."""
    names, frames = ["random", "streaming", "epikv", "keydiff"], []
    for buffer in (64, 1):
        budget = ev.Budget(0.45, **PROTECTED | {"buffer": buffer})
        for mode in ("absolute", "cache-relative", "rerotated"):
            frames.append(ev.replay_grid(model, traces(3), names, [budget], positions=mode, cache=cache).frame)
        yield pd.concat(frames, ignore_index=True)


# Accuracy: problems with a short prompt, so that it can be protected and leaves room. 80 slots are a quarter of a text.
STATEMENTS, LONGEST_PROMPT, SEED = 24, 64, 7
BUDGETS, PROTECTED_BUDGETS = (80, 112, 144, 208), (112, 144, 176, 208)
LIMITS = {"sinks": 4, "recent": 16, "buffer": 16}
NEW_TOKENS = 340  # the longest solution has 300
MAIN = ("full", "random", "streaming", "epikv", "epikv-lag", "vase-attnv", "vase-dkv", "snapkv", "rkv", "h2o")
STOCHASTIC = {"random", "vase-attnv", "vase-dkv", "random-reserve", "curdkv", "evict-largest(matched=True)"}


def solvable(n):
    """The first n problems with a short prompt."""
    kinds = ("rounds", "ledger")
    return tasks.load("steps", n, SEED, statements=STATEMENTS, kinds=kinds, longest_prompt=LONGEST_PROMPT)


def variants():
    """Policies that differ from VaSE-AttnV, its parts or their opposites in one thing each."""
    for share in (0, 0.125, 0.25, 0.375, 0.5):  # more leaves no slot to draw beside a protected prompt
        yield policies.get("vase-attnv", value_share=share)
        yield policies.get("vase-attnv", value_share=share, allocation="adaptive")
    for statistic in ("variance", "norm"):
        yield policies.get("vase-attnv", statistic=statistic)
    yield policies.get("snapkv")
    yield policies.ReserveValues(policies.get("snapkv"), 0.25)
    yield policies.get("evict-largest")
    yield policies.get("evict-largest", matched=True)
    yield policies.get("random")


def accuracy(model, cache):
    """Every policy × four budgets, prompt protected or not; then the variants and the ways to number kept tokens."""
    plain = [ev.Budget(total, **LIMITS) for total in BUDGETS]
    protected = [ev.Budget(total, **LIMITS, protect_prompt=True) for total in PROTECTED_BUDGETS]
    windows = [replace(budget, sinks=0) for budget in plain]
    others = [name for name in APART if name not in MAIN]
    solved = {}

    def solve(study, names, n, limits, positions="absolute"):
        problems = solvable(n)
        for policy in map(policies.get, names):
            draws = policy.label in STOCHASTIC or policy.label.split("(")[0] in STOCHASTIC
            found = ev.evaluate(
                model, problems, policy, limits, seed=(0, 1, 2) if draws else 0, positions=positions,
                max_new_tokens=NEW_TOKENS, batch_size=96, cache=cache,
            )  # fmt: skip
            protects = found.frame["protect_prompt"].iloc[0]  # unknown for the full cache, which is in both
            solved[study, policy.label, positions, str(protects)] = found.frame.assign(study=study)
        return pd.concat(solved.values(), ignore_index=True)

    # In an order that can be read from early on: few problems under all budgets, then more. Without a protected prompt,
    # recency keeps no sinks either. What differs in one thing only is compared where something is solved.
    parts = ((MAIN, 50, protected), (MAIN, 50, plain), (["recency"], 50, windows), (MAIN, 200, protected))
    for names, n, limits in (*parts, (others, 100, protected)):
        yield solve("main", names, n, limits)
    yield solve("variants", variants(), 100, protected[2:])
    for mode in ("absolute", "cache-relative", "rerotated"):
        yield solve("positions", ["random", "streaming", "epikv"], 100, protected[2:], mode)
    for names, limits in ((MAIN, plain), (["recency"], windows)):
        yield solve("main", names, 200, limits)


# what: the model, the function that measures it part by part, the file, and what to tell beside it
STUDIES = {
    "grid": ("smollm2-135m", grid, "replay_grid", {}),
    "positions": ("smollm2-135m", positions, "replay_positions", {}),
    "accuracy": (
        "tiny-reasoner",
        accuracy,
        "accuracy",
        {"statements": STATEMENTS, "longest_prompt": LONGEST_PROMPT, "seed": SEED, "max_new_tokens": NEW_TOKENS},
    ),
}

if __name__ == "__main__":
    what, cache = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    name, measure, file, told = STUDIES[what]
    model = ev.load(name)
    for frame in measure(model, cache):  # what is there is written at once
        frame.to_parquet(HERE / f"{file}.parquet", index=False)
        limit = "share" if "share" in frame else "budget"
        limits = {f"{limit}s": sorted(frame[limit].dropna().round(2).unique())}
        measured = environment(model) | {"rows": len(frame)} | told | limits
        (HERE / f"{file}.json").write_text(json.dumps(measured, indent=1) + "\n")
        print(f"{len(frame)} rows written to {file}.parquet")
