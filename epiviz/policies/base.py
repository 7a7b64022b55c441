"""The contract between a policy and the engine.

A policy gives every slot a priority; the engine protects sinks, recent tokens and (if the budget says so) the
prompt, keeps the highest of the rest, breaks ties in favour of the newer token and moves the slots. A method is one
file beside this one. Methods that evict nothing but restrict what a query attends have a contract of their own, in
:mod:`epiviz.policies.selection`.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from epiviz.choices import nearest
from epiviz.retention import Reason

if TYPE_CHECKING:
    from epiviz.draws import Draws
    from epiviz.models import ModelShape

State = dict[str, torch.Tensor]  # what a policy keeps per row; every tensor has the rows on its first axis


class BudgetError(ValueError):
    """A budget that cannot hold what it has to protect."""


@dataclass(frozen=True)
class Budget:
    """How many slots each layer and KV head may hold.

    Parameters
    ----------
    total : int or float
        Slots right after an eviction; sinks, recent tokens and a protected prompt are counted in it. A float in
        (0, 1) is a share of prompt + new tokens, resolved when a run starts.
    sinks : int
        The first tokens, never evicted.
    recent : int
        The newest tokens, never evicted.
    buffer : int
        Extra slots that may pile up between two evictions: the peak is ``total + buffer``.
    protect_prompt : bool
        Never evict the prompt.

    Raises
    ------
    BudgetError
        ``total`` is NaN, not positive, or a fraction above 1; or it is smaller than what it has to protect.
    """

    total: int | float
    sinks: int = 4
    recent: int = 64
    buffer: int = 64
    protect_prompt: bool = False

    def __post_init__(self) -> None:
        total = self.total
        if isinstance(total, bool) or not isinstance(total, Real) or not math.isfinite(total) or total <= 0:
            raise BudgetError(f"total must be a positive number of slots or a share in (0, 1), got {total!r}")
        if total >= 1 and total != int(total):
            raise BudgetError(f"total={total!r} is no whole number of slots; round it, or give a share in (0, 1)")
        for name, least in (("sinks", 0), ("recent", 0), ("buffer", 1)):
            value = getattr(self, name)
            whole = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not whole or value != int(value) or value < least:
                raise BudgetError(f"{name} must be a whole number of at least {least}, got {value!r}")
            object.__setattr__(self, name, int(value))
        if total >= 1:
            object.__setattr__(self, "total", int(total))
            if total < self.sinks + self.recent:
                raise BudgetError(
                    f"a budget of {total} slots cannot hold {self.sinks} sinks + {self.recent} recent tokens; raise "
                    f"total to at least {self.sinks + self.recent} or lower sinks or recent"
                )

    def resolve(self, prompt_length: int, new_tokens: int) -> ResolvedBudget:
        """Fix the numbers for one sequence.

        Raises
        ------
        BudgetError
            The budget is smaller than sinks + recent (+ protected prompt); the message names the numbers.
        """
        length = prompt_length + new_tokens
        total = max(1, round(self.total * length)) if self.total < 1 else int(self.total)
        front = max(self.sinks, prompt_length) if self.protect_prompt else self.sinks
        if total < front + self.recent:
            what = f"a protected prompt of {prompt_length} tokens" if front > self.sinks else f"{self.sinks} sinks"
            share = f" (a share of {self.total} of {length} tokens)" if self.total < 1 else ""
            raise BudgetError(
                f"a budget of {total} slots{share} cannot hold {what} + {self.recent} recent tokens; raise total to at "
                f"least {front + self.recent}"
                + (", or set protect_prompt=False" if front > self.sinks else ", or lower sinks or recent")
            )
        return ResolvedBudget(total, self.sinks, self.recent, self.buffer, self.protect_prompt, front)


@dataclass(frozen=True)
class ResolvedBudget:
    """A :class:`Budget` in slots, for one sequence; ``front`` counts the oldest slots that are protected."""

    total: int
    sinks: int
    recent: int
    buffer: int
    protect_prompt: bool
    front: int

    @property
    def peak(self) -> int:
        """The most slots a head holds after event 0."""
        return self.total + self.buffer

    @property
    def free(self) -> int:
        """Slots that a policy may fill by its own choice."""
        return self.total - self.front - self.recent


@dataclass(frozen=True)
class Needs:
    """What a policy wants to see.

    Attributes
    ----------
    queries : int
        Rotated queries of the last so many tokens, at an eviction.
    rows : bool
        The attention rows of every new token, in :meth:`Policy.observe`.
    hidden : tuple of int
        Decoder blocks whose output :meth:`Policy.observe` gets.
    tracks : mapping of str to torch.dtype
        Values kept per slot; the engine moves them with the slots.
    summaries : mapping of str to int
        Vectors kept per complete block of a selection, by their length; the engine moves them with the rows.
    """

    queries: int = 0
    rows: bool = False
    hidden: tuple[int, ...] = ()
    tracks: Mapping[str, torch.dtype] = field(default_factory=dict)
    summaries: Mapping[str, int] = field(default_factory=dict)

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.queries, other.queries),
            self.rows or other.rows,
            tuple(sorted({*self.hidden, *other.hidden})),
            {**self.tracks, **other.tracks},
            {**self.summaries, **other.summaries},
        )


@dataclass
class New:
    """The tokens that one forward pass added, seen before any eviction.

    Attributes
    ----------
    positions : int64 ``[rows, q]``
        Absolute positions.
    hidden : dict of int to ``[rows, q, channels]``
        Output of the decoder blocks a policy asked for.
    prompt : bool
        The pass belongs to the prefill.
    first : bool
        The first pass of the prefill, or the first after it.
    depth : int
        Decoder blocks of the model.
    """

    positions: torch.Tensor
    hidden: dict[int, torch.Tensor]
    prompt: bool
    first: bool
    depth: int
    _pass: Pass

    @property
    def keys(self) -> torch.Tensor:
        """Rotated keys of the new slots, ``[layers, rows, kv_heads, q, head_dim]``."""
        return self._pass.newest("keys")

    @property
    def values(self) -> torch.Tensor:
        """Values of the new slots, ``[layers, rows, kv_heads, q, head_dim]``."""
        return self._pass.newest("values")

    @property
    def values_of_every_layer(self) -> torch.Tensor:
        """Values of the new slots in all layers, the sliding ones of hybrid models included."""
        return self._pass.newest("values", every_layer=True)

    def write(self, track: str, values: torch.Tensor) -> None:
        """Store values that broadcast to ``[layers, rows, kv_heads, q]`` with the new slots, which start at 0."""
        self._pass.write(track, values)

    def track(self, name: str) -> torch.Tensor:
        """Return a track over all slots, new ones last, ``[layers, rows, kv_heads, n]``; change it in place."""
        return self._pass.track(name)

    @property
    def visible(self) -> torch.Tensor:
        """The slots that each new token sees, bool ``[rows, 1, q, n]``."""
        return self._pass.visible()

    def rows(self, layer: int) -> torch.Tensor:
        """Return the attention rows of the new tokens in one layer, ``[rows, heads, q, n]``, at least float32.

        Recomputed from queries and keys, so that fused kernels stay on; weights of slots a query cannot see are 0.
        """
        return self._pass.rows(layer)


class Pass(Protocol):
    """What the engine lets :class:`New` reach of the cache, before the new slots are counted."""

    def newest(self, name: str, every_layer: bool = False) -> torch.Tensor: ...
    def write(self, track: str, values: torch.Tensor) -> None: ...
    def track(self, name: str) -> torch.Tensor: ...
    def visible(self) -> torch.Tensor: ...
    def rows(self, layer: int) -> torch.Tensor: ...


@dataclass
class Slots:
    """What a policy ranks: all slots of the rows that evict, sorted by position in every head.

    Attributes
    ----------
    keys, values : ``[layers, rows, kv_heads, n, head_dim]``
        Keys rotated at their recorded positions.
    positions : int64 ``[layers, rows, kv_heads, n]``
    candidates : bool ``[1, 1, 1, n]``
        Slots that may go: neither sinks nor recent nor a protected prompt.
    budget : ResolvedBudget
    tracks : dict of str to ``[layers, rows, kv_heads, n]``
        A policy may change them in place while it ranks; they move with the slots that stay.
    queries : ``[layers, rows, heads, window, head_dim]`` or None
        Rotated queries of the last tokens, in no particular order.
    query_positions : int64 ``[rows, window]`` or None
        Their absolute positions; −1 marks places not yet filled.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    candidates: torch.Tensor
    budget: ResolvedBudget
    tracks: dict[str, torch.Tensor]
    queries: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None

    @property
    def n(self) -> int:
        """Slots held per head."""
        return self.keys.shape[-2]

    @property
    def seen(self) -> torch.Tensor:
        """Tokens seen, int64 ``[1, rows, 1, 1]``: the newest slot of every head is the newest token."""
        return self.positions[:1, :, :1, -1:] + 1

    @property
    def layers(self) -> int:
        return self.keys.shape[0]


@dataclass
class Ranking:
    """Priorities of the slots and why the chosen ones stay.

    Attributes
    ----------
    priority : ``[layers or 1, rows, kv_heads or 1, n]``
        Higher stays. −∞ means drop even if there is room; only a policy that sets ``underfills`` may use it so.
    reason : Reason or uint8 tensor shaped like ``priority``
    """

    priority: torch.Tensor
    reason: Reason | torch.Tensor = Reason.TOP


@dataclass(frozen=True)
class Policy:
    """Base of all policies: frozen dataclasses whose fields are the method's parameters."""

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True  # False: keeps everything
    selects: ClassVar[bool] = False  # True: restricts what each query attends (a Selection)
    bounded: ClassVar[bool] = True  # False: memory grows with the text, and the meter says so
    underfills: ClassVar[bool] = False  # True: a priority of −∞ drops a slot even if there is room
    weights: ClassVar[bool] = False  # True: priorities are non-negative weights that can be sampled from

    @property
    def label(self) -> str:
        """The printed name: the registered one, and the parameters that differ from their defaults."""
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        return label(self.name, {name: (getattr(self, name), default) for name, default in defaults.items()})

    def for_model(self, shape: ModelShape) -> Policy:
        """Return the policy as it runs on a model: where parameters hang on the model, they are settled here."""
        return self

    def needs(self, shape: ModelShape) -> Needs:
        """Return what the policy wants to see on a model of this shape."""
        return Needs()

    def check(self, budget: ResolvedBudget, shape: ModelShape) -> None:
        """Raise if the policy cannot work with this budget or model."""

    def observe(self, new: New, state: State) -> None:
        """Take in the tokens of one forward pass. Seeing a + b at once must equal seeing a, then b."""

    def rank(self, slots: Slots, state: State, draws: Draws) -> Ranking:
        """Give every slot a priority at an eviction."""
        raise NotImplementedError(f"{type(self).__name__} must implement rank()")

    def due(self, seen: int, held: int, budget: ResolvedBudget) -> bool:
        """Tell whether a row evicts now, from the tokens it has seen and the slots it holds."""
        return held >= budget.peak

    def due_after_prompt(self, seen: int, held: int, budget: ResolvedBudget) -> bool:
        """Tell whether the prompt is cut right after the prefill (event 0)."""
        return held > budget.total

    def with_parameters(self, **parameters) -> Policy:
        """Return a copy with other parameters; unknown ones raise TypeError with the nearest name."""
        known = [f.name for f in fields(self)]
        reject_unknown(self.label, parameters, known)
        return replace(self, **parameters)


def label(name: str, parameters: Mapping[str, tuple]) -> str:
    """Return ``name(parameter=value, …)`` with the parameters whose value is not their default.

    Examples
    --------
    >>> label("snapkv", {"window": (32, 64), "pool": (5, 5)})
    'snapkv(window=32)'
    """
    changed = [f"{key}={value}" for key, (value, default) in parameters.items() if value != default]
    return f"{name}({', '.join(changed)})" if changed else name


_REGISTRY: dict[str, Callable[..., Policy]] = {}
_FILES: dict[Path, list[str]] = {}  # policy files that were run, and what they registered


def register(name: str):
    """Make a policy class, or a function that builds a policy, available under ``name``."""

    def add(factory):
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != factory.__qualname__:
            raise ValueError(f"a policy named {name!r} exists already ({_REGISTRY[name].__qualname__})")
        _REGISTRY[name] = factory
        if isinstance(factory, type):
            factory.name = name
        return factory

    return add


def names() -> list[str]:
    """Return the names of all registered policies."""
    return sorted(_REGISTRY)


def get(policy: str | Policy, /, **parameters) -> Policy:
    """Return a policy by name, with parameters.

    ``"path/to/file.py"`` runs a file that registers a policy and returns it; of several, ``"file.py:name"`` picks one.

    Raises
    ------
    KeyError
        The name is unknown; the nearest names are offered.
    TypeError
        A parameter is unknown; the known ones are listed.
    """
    if isinstance(policy, Policy):
        return policy.with_parameters(**parameters) if parameters else policy
    if isinstance(policy, str) and policy.partition(":")[0].endswith(".py"):
        policy = _load_file(*policy.partition(":")[::2])
    if policy not in _REGISTRY:
        raise UnknownPolicyError(f"unknown policy {policy!r}; {nearest(str(policy), _REGISTRY, 'known policies', 3)}")
    factory = _REGISTRY[policy]
    reject_unknown(policy, parameters, parameter_names(factory))
    return factory(**parameters)


def _load_file(path: str, name: str) -> str:
    """Run a file that registers policies; return the name of the one that is meant."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UnknownPolicyError(f"there is no policy file {path!r}")
    if file not in _FILES:
        before = set(_REGISTRY)
        spec = importlib.util.spec_from_file_location(f"epiviz_policy_{len(_FILES)}_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # so that the source of its classes can be found
        spec.loader.exec_module(module)
        _FILES[file] = sorted(set(_REGISTRY) - before)
    found = _FILES[file]
    if name:
        return name
    if len(found) != 1:
        raise UnknownPolicyError(
            f"{path!r} registers {len(found)} policies ({', '.join(found)}); name one: {path}:NAME"
        )
    return found[0]


class UnknownPolicyError(KeyError):
    """No policy of that name is registered."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


def parameter_names(factory: Callable) -> list[str]:
    """Return the parameters of a policy class or of a function that builds a policy."""
    return list(inspect.signature(factory).parameters)


def reject_unknown(policy: str, parameters: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a policy, here by its printed name, has not all of these parameters."""
    for name in parameters:
        if name not in known:
            raise TypeError(f"policy {policy!r} has no parameter {name!r}; {nearest(name, known, 'its parameters')}")
