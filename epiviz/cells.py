"""Cells: results that are computed once, kept on disk under a hash of what they depend on, and shared by processes.

A grid's cell is one replay, an evaluation's a policy under a budget. Both are stored under a hash of everything that
decides what they say, this package's own code included, so that a changed policy is computed anew. A lock per cell lets
several processes share a folder: each takes the cells that no other has.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import operator
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from types import CodeType

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout

from epiviz.policies.base import Budget, Policy, get

_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]


def combinations(
    names: Iterable[str | Policy], budgets: Iterable[int | Budget], seeds: Iterable[int]
) -> list[tuple[Policy, Budget | None, int]]:
    """Combine policies, budgets and seeds, each combination once; what neither evicts nor selects knows no budget."""
    limits = [budget if isinstance(budget, Budget) else Budget(budget) for budget in budgets]
    seeds = list(map(operator.index, seeds))
    found: dict[tuple, tuple[Policy, Budget | None, int]] = {}
    for policy in map(get, names):
        for budget, seed in product(limits if policy.evicts or policy.selects else [None], seeds):
            found.setdefault((repr(policy), budget, seed), (policy, budget, seed))
    return list(found.values())


def key(*parts) -> str:
    """Return the hash of what a cell depends on, numbers and texts, and of the libraries that compute it."""
    libraries = torch.__version__, transformers.__version__
    return hashlib.sha256(json.dumps([*libraries, *parts]).encode()).hexdigest()[:32]


@cache
def code_hash(modules: Sequence[str]) -> str:
    """Hash the source of modules of this package, a folder with all in it."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for name in modules:
        path = package / name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            digest.update(f"{source.relative_to(package).as_posix()}\n".encode() + source.read_bytes())
    return digest.hexdigest()


def foreign_source(policy: Policy) -> str:
    """What a policy defined elsewhere, in a notebook or a file, is made of: it changes without this package's code.

    Its members, and whatever these use of what is defined outside of installed packages: functions, classes, constants.
    """
    parts, seen = [], set()
    for kind in type(policy).__mro__:
        if _is_foreign(kind):
            parts += _of_class(policy, kind, seen)
    inner = [getattr(policy, field.name) for field in fields(policy) if is_dataclass(getattr(policy, field.name))]
    return "\n".join([*parts, *(foreign_source(each) for each in inner if isinstance(each, Policy))])


def _of_class(policy: Policy, kind: type, seen: set[int]) -> list[str]:
    parts = []
    for name, member in sorted(vars(kind).items()):
        if name == "__post_init__" or not name.startswith("__"):  # of a class in a notebook only functions can be read
            parts += _of_value(policy, name, member, seen)
    return parts


def _of_value(policy: Policy, name: str, value, seen: set[int]) -> list[str]:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, bool | int | float | str):
        return [f"{name}={value!r}"]
    if isinstance(value, torch.Tensor | np.ndarray):
        return [f"{name}={value.tolist()!r}"]
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [part for key, item in items for part in _of_value(policy, f"{name}[{key!r}]", item, seen)]
    if not (inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value)) or id(value) in seen:
        return []
    seen.add(id(value))
    if not _is_foreign(value):
        return []
    if inspect.isclass(value):
        return _of_class(policy, value, seen)
    parts = [_source(policy, value)]
    if inspect.isfunction(value):
        used, closure = _names(value.__code__), inspect.getclosurevars(value).nonlocals
        for name, other in sorted((closure | {name: value.__globals__.get(name) for name in used}).items()):
            parts += _of_value(policy, name, other, seen)
    return parts


def _names(code: CodeType) -> set[str]:
    """Return the names that a function looks up outside of itself, comprehensions and inner functions included."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _is_foreign(value) -> bool:
    """Tell whether something was defined neither here nor in an installed package."""
    name = (value.__name__ if inspect.ismodule(value) else value.__module__) or ""
    if name.partition(".")[0] == "epiviz" or value is object:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # a notebook, a file that was only run, or a module without source
        return not inspect.ismodule(value)
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _source(policy: Policy, value) -> str:
    try:
        return inspect.getsource(value)
    except OSError as error:
        raise ValueError(
            f"the source of policy {policy.label!r} cannot be read, so its results cannot be told from those of an "
            "earlier version; define it in a notebook cell or a file"
        ) from error


def take(path: Path, locks: ExitStack, wait: bool) -> bool:
    """Lock a cell until ``locks`` closes; False if another process has it and we do not wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        return False
    locks.callback(lock.release)
    return True
