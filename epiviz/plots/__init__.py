"""Figures: frames in, Axes out.

Every function draws into ``ax`` (a new figure of 6.4 × 3.6 inches if none is given) and returns it; none shows or
saves. Frames come from :mod:`epiviz.frames`, looks from :mod:`epiviz.palette`. Titles state what was found, in
numbers of the frame at hand.
"""

from epiviz.palette import name_part
from epiviz.plots.accuracy import (
    accuracy,
    accuracy_at,
    evicted_accuracy,
    outcomes,
    paired_accuracy,
    published_accuracy,
)
from epiviz.plots.bands import band_anatomy, score_anatomy
from epiviz.plots.budgets import against_control, budget_curves, differences
from epiviz.plots.costs import cost, meter
from epiviz.plots.histories import kept_share, overlap
from epiviz.plots.pareto import pareto, pareto_hover
from epiviz.plots.positions import position_modes
from epiviz.plots.recall import recall
from epiviz.plots.survivors import diversity, inclusion, lifetimes, survival
from epiviz.plots.traces import displacement, positional_trend, score, trend_by_layer, zscores
from epiviz.plots.training import training_accuracy, training_loss
from epiviz.plots.values import carriers, head_map, sink_ranks, value_ranges, value_tail

__all__ = [
    "accuracy",
    "accuracy_at",
    "against_control",
    "band_anatomy",
    "budget_curves",
    "carriers",
    "cost",
    "differences",
    "displacement",
    "diversity",
    "evicted_accuracy",
    "head_map",
    "inclusion",
    "kept_share",
    "lifetimes",
    "meter",
    "name_part",
    "outcomes",
    "overlap",
    "paired_accuracy",
    "pareto",
    "pareto_hover",
    "position_modes",
    "positional_trend",
    "published_accuracy",
    "recall",
    "score",
    "score_anatomy",
    "sink_ranks",
    "survival",
    "training_accuracy",
    "training_loss",
    "trend_by_layer",
    "value_ranges",
    "value_tail",
    "zscores",
]
