"""Tasks: problems with prompts and right answers."""

from functools import partial

from epiviz.tasks.completions import export_completions
from epiviz.tasks.problems import Problem
from epiviz.tasks.protocols import Protocol, protocol
from epiviz.tasks.public import SETS, load_public
from epiviz.tasks.recall import load_recall
from epiviz.tasks.steps import load_steps

_MADE = {"recall": load_recall, "steps": load_steps}
_LOADERS = _MADE | {name: partial(load_public, name=name) for name in SETS}

__all__ = ["Problem", "Protocol", "export_completions", "load", "names", "protocol"]


def names() -> list[str]:
    """Return the name of every task."""
    return sorted(_LOADERS)


def load(name: str, n: int | None = None, seed: int = 0, **options) -> list[Problem]:
    """Return ``n`` problems of a task.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    n : int, optional
        How many problems. A public set has a last one, and without ``n`` all are taken.
    seed : int
        Which problems, where they are made; the first n of a seed do not depend on n. For a public set see
        :func:`epiviz.tasks.public.load_public`.
    **options
        The task's own: ``statements=60`` for ``steps``, ``filler=400`` for ``recall``, ``path="gsm8k.jsonl"`` or
        ``protocol="vase"`` for the public sets.

    Raises
    ------
    ValueError
        There is no such task, or ``n`` is not positive, or it is missing where problems are made.
    """
    if name not in _LOADERS:
        raise ValueError(f"there is no task {name!r}; choose one of {', '.join(names())}")
    if n is None and name in _MADE:
        raise ValueError(f"n is needed: {name} is made, so there is no last problem")
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return _LOADERS[name](n, seed, **options)
