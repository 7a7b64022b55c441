"""Tasks: problems with prompts and right answers."""

from epiviz.tasks.problems import Problem
from epiviz.tasks.steps import load_steps

_LOADERS = {"steps": load_steps}

__all__ = ["Problem", "load", "names"]


def names() -> list[str]:
    """Return the name of every task."""
    return sorted(_LOADERS)


def load(name: str, n: int, seed: int = 0, **options) -> list[Problem]:
    """Return ``n`` problems of a task.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    n : int
        How many problems.
    seed : int
        Which problems; the first n of a seed do not depend on n.
    **options
        The task's own, e.g. ``statements=60`` for ``steps``.

    Raises
    ------
    ValueError
        There is no such task, or ``n`` is not positive.
    """
    if name not in _LOADERS:
        raise ValueError(f"there is no task {name!r}; choose one of {', '.join(names())}")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return _LOADERS[name](n, seed, **options)
