"""Eviction policies, one file per method family. ``names()`` lists them, ``get(name, **parameters)`` makes one."""

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
from epiviz.policies.epikv import EpiKV
from epiviz.policies.simple import Full, Random, Streaming
from epiviz.policies.snapkv import SnapKV
from epiviz.policies.vase import VaseDKV, vase_attnv

__all__ = [
    "Budget",
    "BudgetError",
    "EpiKV",
    "Full",
    "Needs",
    "New",
    "Policy",
    "Random",
    "Ranking",
    "ReserveValues",
    "ResolvedBudget",
    "Sample",
    "Slots",
    "SnapKV",
    "State",
    "Streaming",
    "UnknownPolicyError",
    "VaseDKV",
    "get",
    "names",
    "register",
    "vase_attnv",
]
