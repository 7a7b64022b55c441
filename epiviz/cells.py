"""Cells: results that are computed once, kept on disk under a hash of what they depend on, and shared by processes.

A grid's cell is one replay, an evaluation's a policy under a budget. Both are stored under a hash of everything that
decides what they say, this package's own code included, so that a changed policy is computed anew. A lock per cell lets
several processes share a folder: each takes the cells that no other has.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from epiviz.policies.base import Budget, Policy, get


def pairs(names: Iterable[str | Policy], budgets: Iterable[int | Budget]) -> list[tuple[Policy, Budget | None]]:
    """Pair policies and budgets, each pair once; what neither evicts nor selects knows no budget."""
    limits = [budget if isinstance(budget, Budget) else Budget(budget) for budget in budgets]
    found: dict[tuple[str, Budget | None], tuple[Policy, Budget | None]] = {}
    for policy in map(get, names):
        for budget in limits if policy.evicts or policy.selects else [None]:
            found.setdefault((repr(policy), budget), (policy, budget))
    return list(found.values())


def key(*parts) -> str:
    """Return the hash of what a cell depends on: numbers and texts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


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
    """What a policy defined elsewhere, in a notebook or a file, is made of: it changes without this package's code."""
    parts = []
    for kind in type(policy).__mro__:
        if kind is object or kind.__module__.startswith("epiviz."):
            continue
        for name, member in sorted(vars(kind).items()):
            function = member.fget if isinstance(member, property) else member
            if isinstance(member, bool | int | float | str | tuple):
                parts.append(f"{name}={member!r}")
            elif inspect.isfunction(function) and (name == "__post_init__" or not name.startswith("__")):
                parts.append(_source(policy, function))  # of a class in a notebook only its functions can be read
    inner = [getattr(policy, field.name) for field in fields(policy) if is_dataclass(getattr(policy, field.name))]
    return "\n".join([*parts, *(foreign_source(each) for each in inner if isinstance(each, Policy))])


def _source(policy: Policy, function) -> str:
    try:
        return inspect.getsource(function)
    except OSError as error:
        raise ValueError(
            f"the source of policy {policy.label!r} cannot be read, so its results cannot be told from those of an "
            "earlier version; define it in a notebook cell or a file"
        ) from error


def take(path: Path, locks: ExitStack, wait: bool) -> bool:
    """Lock a cell until ``locks`` closes; False if another process has it and we do not wait."""
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        return False
    locks.callback(lock.release)
    return True
