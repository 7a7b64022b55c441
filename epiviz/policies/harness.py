"""What the papers' public code really does where it differs from the method, to show what the difference does.

``paper_harness("vase-attnv", 512)`` is a policy with the budget and the positions that belong to it:

>>> preset = paper_harness("epikv", 512)
>>> preset.policy.label, preset.positions, preset.budget.recent
('paper_harness(epikv)', 'cache-relative', 128)

``epiviz.generate(model, prompt, **preset)`` and ``epiviz.replay(model, trace, **preset)`` run it. No preset is a
registered policy, and each prints as ``paper_harness(…)``. All of them stop short of what would break the engine's
accounting: slots are distinct (a draw from too few positive weights may store a slot twice in VaSE's code), and a
prompt longer than the budget is cut right after the prefill, where both codes wait for a decode step.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from epiviz.choices import nearest
from epiviz.policies.base import Budget, BudgetError, Policy, UnknownPolicyError, label, parameter_names, reject_unknown
from epiviz.policies.channels import EpiKVLag, EpiKVLagKey, KeyVariance, ValueVariance
from epiviz.policies.compose import Wrapper
from epiviz.policies.epikv import EpiKV, EpiKVBand, EpiKVMean
from epiviz.policies.h2o import H2O
from epiviz.policies.lastrow import LongFlow
from epiviz.policies.raas import RaaS
from epiviz.policies.reserve import ReserveValues
from epiviz.policies.rkv import RKVSimple
from epiviz.policies.segments import EpiKVSeg, SegmentHS, ThinKVTertiles
from epiviz.policies.snapkv import SnapKV
from epiviz.policies.vase import CurDKV, EvictLargest, VaseDKV, vase_attnv

BFLOAT16 = {"score_dtype": "bfloat16"}
PUBLIC_SLOTS = {"pool_over": "rank", **BFLOAT16}  # VaSE's attention scores: smoothed in slot order, in bfloat16
PUBLIC_NORMS = {"average_rows": True, **BFLOAT16}  # EpiKV's displacements
VASE_BUFFER = 64  # recent tokens, eviction period and queries that vote, all one number there


@dataclass(frozen=True)
class PaperHarness(Wrapper):
    """A policy under the name of its preset; everything else is the policy's own."""

    @property
    def underfills(self) -> bool:
        return self.policy.underfills

    @property
    def weights(self) -> bool:
        return self.policy.weights

    def rank(self, slots, state, draws):
        return self.policy.rank(slots, state, draws)


@dataclass(frozen=True)
class Preset:
    """A policy, its budget and its positions; ``**preset`` hands all three to ``generate`` or ``replay``.

    Attributes
    ----------
    policy : Policy
    budget : Budget
    positions : str
    """

    policy: Policy
    budget: Budget
    positions: str = "absolute"

    def keys(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __getitem__(self, name: str):
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __repr__(self) -> str:
        return f"{self.policy.label} under {self.budget} with {self.positions} positions"


_PRESETS: dict[str, Callable[..., Preset]] = {}


def preset(name: str):
    """Make a function from a budget in slots (and parameters) to a :class:`Preset` available under ``name``."""

    def add(function):
        _PRESETS[name] = function
        return function

    return add


def presets() -> dict[str, str]:
    """Return every preset's name, and what it reproduces."""
    return {name: inspect.getdoc(function) for name, function in sorted(_PRESETS.items())}


def paper_harness(name: str, total: int, **parameters) -> Preset:
    """Return what a paper's public code runs under the name of one of its methods. Never a default.

    Parameters
    ----------
    name : str
        One of :func:`presets`, which also tells what each reproduces and where that is found.
    total : int
        The budget in slots; sinks, recent tokens, buffer and the prompt's protection are the code's.
    **parameters
        Of the preset.

    Raises
    ------
    UnknownPolicyError
        No preset has this name; the nearest are offered.
    BudgetError
        The code does not run, or not sensibly, with this total.
    TypeError
        A parameter is unknown.
    """
    if name not in _PRESETS:
        raise UnknownPolicyError(f"unknown preset {name!r}; {nearest(str(name), _PRESETS, 'known presets', 3)}")
    try:
        total = operator.index(total)
    except TypeError as error:
        raise BudgetError(
            f"total must be a whole number of slots, got {total!r}: the preset chooses sinks, recent tokens and buffer"
        ) from error
    function = _PRESETS[name]
    reject_unknown(f"paper_harness({name})", parameters, parameter_names(function)[1:])
    made = function(total, **parameters)
    defaults = inspect.signature(function).parameters
    changed = label(name, {key: (value, defaults[key].default) for key, value in parameters.items()})
    return Preset(PaperHarness(made.policy, title=f"paper_harness({changed})"), made.budget, made.positions)


# -- VaSE: terarachang/VaSE, the modes of modified/transformers/cache_utils.py ----------------------------------------


def _vase(total: int, policy: Policy, sinks: int) -> Preset:
    if total <= VASE_BUFFER or total % VASE_BUFFER:
        raise BudgetError(
            f"VaSE's code takes a budget above {VASE_BUFFER} that is a multiple of {VASE_BUFFER} slots, got {total}; "
            f"the next is {max(2, -(-total // VASE_BUFFER)) * VASE_BUFFER}"
        )
    return Preset(policy, Budget(total, sinks, recent=VASE_BUFFER, buffer=VASE_BUFFER))


@preset("snapkv")
def _snapkv(total: int) -> Preset:
    """Mode ``attn``. Smooths over the order of the previous ranking; logits and scores in bfloat16; no sinks."""
    return _vase(total, SnapKV(**PUBLIC_SLOTS), sinks=0)


@preset("rkv-simple")
def _rkv_simple(total: int) -> Preset:
    """Mode ``attn_rkv``. Attention as in ``snapkv``; cosines and their softmax rounded to bfloat16; no sinks."""
    return _vase(total, RKVSimple(**PUBLIC_SLOTS), sinks=0)


@preset("vase-attnv")
def _vase_attnv(total: int, value_share: float = 0.25) -> Preset:
    """Mode ``range_sink_sample_attn``. Attention as in ``snapkv``; value ranges and the race in bfloat16.

    Slots lie by descending range, then by descending draw, and the next smoothing runs over that order. ``value_share``
    is 0.5 in the paper's GSM8K runs.
    """
    return _vase(total, vase_attnv(value_share, **PUBLIC_SLOTS), sinks=4)


@preset("vase-dkv")
def _vase_dkv(total: int) -> Preset:
    """Mode ``cur_resample_gauss``. Projection, norms and product in bfloat16; one projection per sample."""
    return _vase(total, VaseDKV(**BFLOAT16), sinks=4)


@preset("vase-dkv-shared")
def _vase_dkv_shared(total: int) -> Preset:
    """As ``vase-dkv``, but one projection for all rows of a batch, as before the change that its code comments on.

    It is keyed by seed and event alone, so a row still does what it would do alone; but the copies of one prompt, over
    which results are averaged, all meet the same luck.
    """
    return _vase(total, VaseDKV(shared_projection=True, **BFLOAT16), sinks=4)


@preset("curdkv")
def _curdkv(total: int) -> Preset:
    """Mode ``cur_fixed_gauss``. As ``vase-dkv``, with one projection for the whole generation."""
    return _vase(total, CurDKV(**BFLOAT16), sinks=4)


@preset("evict-largest")
def _evict_largest(total: int) -> Preset:
    """Mode ``evict_large_range``. Ranges in bfloat16; no sinks, which survive because their ranges are small."""
    return _vase(total, EvictLargest(**BFLOAT16), sinks=0)


# -- EpiKV: stevenkolawole/epiphany-kv-cache, the classes of src/eviction.py -------------------------------------------


def _epikv(total: int, policy: Policy, sinks: int = 0, recent: int | None = None, protect_prompt=True) -> Preset:
    """The harness around every EpiKV class: one slot more than the budget is evicted at once, with positions reset.

    The model is called without positions, so the next one is the number of slots left: once the budget is full every
    new token gets the same. Score ties, which its top-k leaves open, go to the newer token here.
    """
    recent = min(128, total // 4) if recent is None else recent
    return Preset(policy, Budget(total, sinks, recent, buffer=1, protect_prompt=protect_prompt), "cache-relative")


@preset("epikv")
def _epikv_flat(total: int, layers: tuple | None = None) -> Preset:
    """Class ``hs_variance_detrend``. Displacements in bfloat16, averaged over the rows of a batch.

    That average breaks the independence of rows: what a row keeps depends on its batch.
    """
    return _epikv(total, EpiKV(layers, **PUBLIC_NORMS))


@preset("epikv-mean")
def _epikv_mean(total: int, layers: tuple | None = None) -> Preset:
    """Class ``hs_variance``. As ``epikv``, rows of a batch included."""
    return _epikv(total, EpiKVMean(layers, **PUBLIC_NORMS))


@preset("epikv-band")
def _epikv_band(total: int, layers: tuple | None = None) -> Preset:
    """Class ``band_adaptive_hs``. As ``epikv``, rows of a batch included."""
    return _epikv(total, EpiKVBand(layers, **PUBLIC_NORMS))


@preset("epikv-reserve")
def _epikv_reserve(total: int, slots: int = 16, statistic: str = "range", layers: tuple | None = None) -> Preset:
    """Class ``hs_variance_detrend_vrange16`` and its kin. As ``epikv``, rows of a batch included.

    ``slots`` are reserved for the largest value states, by the statistic averaged over all heads and layers.
    """
    policy = ReserveValues(EpiKV(layers, **PUBLIC_NORMS), slots / total, statistic, scope="global")
    return _epikv(total, policy)


@preset("epikv-seg")
def _epikv_seg(total: int) -> Preset:
    """Class ``kv_seg_hs``. Scores as in ``epikv``, rows of a batch included; the last segment is a single slot."""
    return _epikv(total, EpiKVSeg(merge_tail=False, epiphany=EpiKV(**PUBLIC_NORMS)))


@preset("segment-hs")
def _segment_hs(total: int) -> Preset:
    """Class ``hybrid_seg_hs``. Scores as in ``epikv``, rows of a batch included; the last segment is a single slot."""
    return _epikv(total, SegmentHS(merge_tail=False, epiphany=EpiKV(**PUBLIC_NORMS)))


@preset("key-variance")
def _key_variance(total: int) -> Preset:
    """Class ``kv_key``. Variances and their mean over a layer's heads in bfloat16."""
    return _epikv(total, KeyVariance(**BFLOAT16))


@preset("value-variance")
def _value_variance(total: int) -> Preset:
    """Class ``kv_val``. Variances and their mean over a layer's heads in bfloat16."""
    return _epikv(total, ValueVariance(**BFLOAT16))


@preset("epikv-lag")
def _epikv_lag(total: int) -> Preset:
    """Class ``lag_kv``. Scored anew at each step on the cache as it is left, whose chunk borders drift.

    Layers are averaged before any statistic, and the first chunk is on another scale than all later ones.
    """
    return _epikv(total, EpiKVLag(frozen=False, layers_first=True, first_chunk="raw"))


@preset("epikv-lag-key")
def _epikv_lag_key(total: int) -> Preset:
    """Class ``lag_kv_key``. As ``epikv-lag``, keys alone."""
    return _epikv(total, EpiKVLagKey(frozen=False, layers_first=True, first_chunk="raw"))


@preset("h2o")
def _h2o(total: int) -> Preset:
    """Class ``h2o``. The prompt's queries do not count; one sum for all heads, in bfloat16, which stalls.

    Four sinks, min(128, budget − 4) recent tokens, and no protected prompt.
    """
    sinks = min(4, total // 4)
    policy = H2O(scope="global", prompt_rows=False, **BFLOAT16)
    return _epikv(total, policy, sinks, recent=min(128, total - sinks), protect_prompt=False)


@preset("raas")
def _raas(total: int) -> Preset:
    """Class ``raas``. One stamp for all heads, from attention in bfloat16; no recent window."""
    return _epikv(total, RaaS(scope="global", **BFLOAT16), recent=0)


@preset("longflow")
def _longflow(total: int) -> Preset:
    """Class ``longflow``. Attention and value norms averaged over all heads before the product; nothing protected."""
    return _epikv(total, LongFlow(scope="global"), recent=0, protect_prompt=False)


@preset("thinkv-tertiles")
def _thinkv_tertiles(total: int) -> Preset:
    """Class ``thinKV``. The last segment is a single slot; the prompt is not protected."""
    return _epikv(total, ThinKVTertiles(merge_tail=False), protect_prompt=False)
