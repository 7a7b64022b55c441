"""Executors: where the runs of a sweep are made.

An executor is a frozen dataclass of what its user may set, with one method: ``run`` takes jobs and yields each with its
manifest as it ends (None while another launcher is at it). A new one is a file here and a line in ``_HOME``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Protocol

from epiviz.choices import nearest
from epiviz.jobs import Job
from epiviz.manifest import Manifest
from epiviz.parameters import ParameterError, convert

_HOME = {
    "local": ("epiviz.executors.local", "LocalExecutor"),
    "ray": ("epiviz.executors.ray", "RayExecutor"),
    "slurm": ("epiviz.executors.slurm", "SlurmExecutor"),
}


class Executor(Protocol):
    """What a sweep asks of an executor."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Manifest | None]]:
        """Make runs, and yield each job with its manifest when it ended."""

    def width(self) -> int:
        """Return how many runs are made at a time, as far as that is known beforehand."""


def names() -> list[str]:
    """Return the name of every executor."""
    return sorted(_HOME)


def get(name: str, options: Mapping[str, str] | None = None) -> Executor:
    """Return an executor, with options as texts of a command line.

    Raises
    ------
    ParameterError
        There is no such executor or option, a value does not fit, or what it needs is not installed.
    """
    if name not in _HOME:
        raise ParameterError(f"there is no executor {name!r}; {nearest(name, _HOME)}")
    module, kind = _HOME[name]
    try:
        executor = getattr(import_module(module), kind)
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"the executor {name!r} needs the package {error.name!r}: pip install 'epiviz[{name}]'"
        ) from error
    known = {each.name: each.type for each in fields(executor)}
    for option in options or {}:
        if option not in known:
            raise ParameterError(f"the executor {name!r} has no option {option!r}; {nearest(option, known)}")
    return executor(
        **{option: convert(f"option {option!r}", known[option], value) for option, value in (options or {}).items()}
    )
