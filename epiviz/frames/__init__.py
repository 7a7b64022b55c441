"""Tidy frames of traces and runs: what figures draw and notebooks record.

Every function here takes a trace or runs and returns a pandas frame; none of them needs a model.
"""

from epiviz.frames.accuracy import (
    accuracy,
    accuracy_over_budgets,
    outcomes,
    paired_accuracy,
    pass_at_k,
    same_answers,
    seed_spreads,
)
from epiviz.frames.bands import band_anatomy, score_anatomy
from epiviz.frames.budgets import budget_curves
from epiviz.frames.costs import replays, runs
from epiviz.frames.histories import attended, kept, overlap
from epiviz.frames.pareto import pareto
from epiviz.frames.positions import position_modes
from epiviz.frames.recall import recall
from epiviz.frames.survivors import diversity, inclusion, lifetimes, survival
from epiviz.frames.traces import displacements, positional_trend, scores, token_classes, top_tokens
from epiviz.frames.values import (
    TAIL_FACTOR,
    carriers,
    large_values,
    sink_ranks,
    value_heads,
    value_ranges,
    value_tail,
)

__all__ = [
    "TAIL_FACTOR",
    "accuracy",
    "accuracy_over_budgets",
    "attended",
    "band_anatomy",
    "budget_curves",
    "carriers",
    "displacements",
    "diversity",
    "inclusion",
    "kept",
    "large_values",
    "lifetimes",
    "outcomes",
    "overlap",
    "paired_accuracy",
    "pareto",
    "pass_at_k",
    "position_modes",
    "positional_trend",
    "recall",
    "replays",
    "runs",
    "same_answers",
    "score_anatomy",
    "scores",
    "seed_spreads",
    "sink_ranks",
    "survival",
    "token_classes",
    "top_tokens",
    "value_heads",
    "value_ranges",
    "value_tail",
]
