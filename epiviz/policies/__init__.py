"""Eviction policies, one file per method family. ``names()`` lists them, ``get(name, **parameters)`` makes one.

``base`` is the contract; what several families share is in ``order``, ``scoring`` and ``compose``.
"""

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
from epiviz.policies.channels import EpiKVLag, EpiKVLagKey, KeyVariance, ValueVariance
from epiviz.policies.compose import Sample
from epiviz.policies.epikv import EpiKV, EpiKVAttention, EpiKVBand, EpiKVMean
from epiviz.policies.h2o import H2O
from epiviz.policies.harness import Preset, paper_harness, presets
from epiviz.policies.keys import KeyDiff, KNorm
from epiviz.policies.lagkv import LagKV, LagKVRatio
from epiviz.policies.lastrow import TOVA, LongFlow
from epiviz.policies.raas import RaaS
from epiviz.policies.reserve import ReserveValues
from epiviz.policies.rkv import RKV, RKVSimple
from epiviz.policies.seer import SeerOracle, SeerQuest
from epiviz.policies.segments import EpiKVSeg, SegmentHS, ThinKVTertiles
from epiviz.policies.selection import Blocks, Query, Selection
from epiviz.policies.simple import Full, Random, Recency, Streaming
from epiviz.policies.snapkv import SnapKV, SnapKVPrefill
from epiviz.policies.thinkv import ThinKV
from epiviz.policies.vase import CurDKV, EvictLargest, RandomReserve, VaseDKV, vase_attnv

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "Blocks",
    "Budget",
    "BudgetError",
    "CurDKV",
    "EpiKV",
    "EpiKVAttention",
    "EpiKVBand",
    "EpiKVLag",
    "EpiKVLagKey",
    "EpiKVMean",
    "EpiKVSeg",
    "EvictLargest",
    "Full",
    "KNorm",
    "KeyDiff",
    "KeyVariance",
    "LagKV",
    "LagKVRatio",
    "LongFlow",
    "Needs",
    "New",
    "Policy",
    "Preset",
    "Query",
    "RKVSimple",
    "RaaS",
    "Random",
    "RandomReserve",
    "Ranking",
    "Recency",
    "ReserveValues",
    "ResolvedBudget",
    "Sample",
    "SeerOracle",
    "SeerQuest",
    "SegmentHS",
    "Selection",
    "Slots",
    "SnapKV",
    "SnapKVPrefill",
    "State",
    "Streaming",
    "ThinKV",
    "ThinKVTertiles",
    "UnknownPolicyError",
    "ValueVariance",
    "VaseDKV",
    "get",
    "names",
    "paper_harness",
    "presets",
    "register",
    "vase_attnv",
]
