"""epiviz: which key-value pairs may a reasoning model forget, and what happens when it does?"""

from epiviz import policies, signals
from epiviz.decode import Run, generate
from epiviz.models import Model, ModelNotFoundError, UnsupportedModelError, load
from epiviz.policies import Budget, BudgetError, UnknownPolicyError
from epiviz.results import collect, save_results
from epiviz.retention import Reason, Retention
from epiviz.trace import ForeignTraceError, Trace, TraceFileError, record

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "ForeignTraceError",
    "Model",
    "ModelNotFoundError",
    "Reason",
    "Retention",
    "Run",
    "Trace",
    "TraceFileError",
    "TraceReader",
    "UnknownPolicyError",
    "UnsupportedModelError",
    "collect",
    "generate",
    "load",
    "policies",
    "record",
    "save_results",
    "signals",
]


def __getattr__(name: str):
    # Widgets are imported when they are asked for: sweeps and tests on bare kernels need none.
    if name == "TraceReader":
        from epiviz.widgets import TraceReader

        return TraceReader
    raise AttributeError(f"module 'epiviz' has no attribute {name!r}")
