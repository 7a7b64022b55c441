"""epiviz: which key-value pairs may a reasoning model forget, and what happens when it does?

Names are imported when they are first used: torch and transformers take seconds, which reading a table of results or
asking the command line for help need not pay.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epiviz import diversity, frames, inclusion, lifetimes, plots, policies, signals, stats, tasks
    from epiviz.collected import MixedVersionsError, collect
    from epiviz.decode import Run, generate
    from epiviz.evaluation import Evaluation, evaluate
    from epiviz.grids import ReplayGrid, replay_grid
    from epiviz.models import Model, ModelNotFoundError, UnsupportedModelError, load
    from epiviz.papers import published
    from epiviz.policies import Budget, BudgetError, UnknownPolicyError
    from epiviz.recall import attention_recall
    from epiviz.replays import Replay, noise_floor, replay
    from epiviz.results import save_results
    from epiviz.retention import Reason, Retention
    from epiviz.trace import ForeignTraceError, Trace, TraceFileError, record
    from epiviz.widgets import HeadMap, LayerMap, Timeline, TraceReader, Workbench
    from epiviz.widgets.live import live
    from epiviz.widgets.monitor import sweep_monitor

__version__ = "0.1.0"

_HOME = {
    "Budget": "policies",
    "BudgetError": "policies",
    "Evaluation": "evaluation",
    "ForeignTraceError": "trace",
    "HeadMap": "widgets",
    "LayerMap": "widgets",
    "MixedVersionsError": "collected",
    "Model": "models",
    "ModelNotFoundError": "models",
    "Reason": "retention",
    "Replay": "replays",
    "ReplayGrid": "grids",
    "Retention": "retention",
    "Run": "decode",
    "Timeline": "widgets",
    "Trace": "trace",
    "TraceFileError": "trace",
    "TraceReader": "widgets",
    "UnknownPolicyError": "policies",
    "UnsupportedModelError": "models",
    "Workbench": "widgets",
    "attention_recall": "recall",
    "collect": "collected",
    "evaluate": "evaluation",
    "generate": "decode",
    "live": "widgets.live",
    "load": "models",
    "record": "trace",
    "noise_floor": "replays",
    "published": "papers",
    "replay": "replays",
    "replay_grid": "grids",
    "save_results": "results",
    "sweep_monitor": "widgets.monitor",
}
_MODULES = ("diversity", "frames", "inclusion", "lifetimes", "plots", "policies", "signals", "stats", "tasks")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"epiviz.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"epiviz.{name}")
    raise AttributeError(f"module 'epiviz' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
