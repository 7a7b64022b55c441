"""Eviction policies, one file per method family. ``names()`` lists them, ``get(name, **parameters)`` makes one."""

from epiviz.policies import epikv, simple, snapkv, vase
from epiviz.policies.base import (
    Budget,
    BudgetError,
    Needs,
    New,
    Policy,
    Ranking,
    ResolvedBudget,
    Slots,
    State,
    UnknownPolicyError,
    get,
    names,
    register,
)
from epiviz.policies.compose import ReserveValues, Sample

__all__ = [
    "Budget",
    "BudgetError",
    "Needs",
    "New",
    "Policy",
    "Ranking",
    "ReserveValues",
    "ResolvedBudget",
    "Sample",
    "Slots",
    "State",
    "UnknownPolicyError",
    "epikv",
    "get",
    "names",
    "register",
    "simple",
    "snapkv",
    "vase",
]
