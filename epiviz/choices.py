"""Names to choose from: what to say to somebody who gave another one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILARITY = 0.5  # from 0 to 1: the family name alone is near to "vase-attnv"


def nearest(name: str, known: Iterable[str], title: str = "known", most: int = 1) -> str:
    """Return a phrase for an error message: up to ``most`` known names that are near, and all of them.

    Examples
    --------
    >>> nearest("bugdet", ["seed", "budget"])
    "did you mean 'budget'? known: budget, seed"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=most, cutoff=SIMILARITY)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}{title}: {', '.join(known) or 'none'}"


def check_choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Return a parameter's value; raise ValueError if it is none of its choices.

    Examples
    --------
    >>> check_choice("scope", "row", ("head", "layer"))
    Traceback (most recent call last):
    ValueError: scope must be one of head, layer, got 'row'
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value
