"""The process that compares expressions: reads a pair a line, answers a line; killed from outside if it takes too long.

It is started as a script by :mod:`epiviz.tasks.mathematics` and imports nothing of epiviz.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Float, MatrixBase, Rational, Set
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction

# LaTeX goes through a grammar. The library's other extractors would hand plain text to sympy's parse_expr, an eval.
# Units are the caller's business: the library drops the letters c, d, g, h, l, m, o, s and t behind a value, so that
# 5m would be 5.
NORMALIZATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
EXTRACTION = [LatexExtractionConfig(normalization_config=NORMALIZATION)]
MEMORY = 4 << 30  # bytes of address space: a tower of powers must not take the machine along


def read(text: str) -> list:
    """Return the readings of an expression, none if it is not LaTeX mathematics."""
    # The library's own time limit rests on SIGALRM; the time limit here is the parent's.
    readings = parse(f"${text}$", extraction_config=EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    return [exact(reading) for reading in readings]


def exact(value):
    """Return an expression whose decimal numbers are fractions: as floats they would be equal once rounded."""
    if not isinstance(value, Basic | MatrixBase):
        return value
    return value.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))


def as_set(value):
    """Return the solutions of an inequality in one unknown as a set, anything else as it is."""
    inequality = isinstance(value, Relational | BooleanFunction) and len(value.free_symbols) == 1
    return value.as_set() if inequality else value


def same(reference: str, answer: str) -> bool:
    """Tell whether two expressions are the same; see :func:`epiviz.tasks.mathematics.same_mathematics`."""
    left, right = read(reference), read(answer)
    if not left or not right:
        return False
    if verify(left, right, timeout_seconds=None):
        return True
    # An interval and the inequality that describes it.
    sets = [as_set(readings[0]) for readings in (left, right)]
    continuous = [isinstance(one, Set) and not isinstance(one, FiniteSet) for one in sets]
    return all(continuous) and sets[0] == sets[1]


def main() -> None:
    logging.disable(logging.CRITICAL)  # the libraries warn at every pair that no time limit of theirs is set
    # Only answers may reach the parent, whatever a library prints.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    limit_memory()
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = same(*json.loads(line))
        except (Exception, RecursionError) as error:  # whatever a library makes of a model's text is no equality
            reply = f"{type(error).__name__}: {error}"
        print(json.dumps(reply), file=replies, flush=True)


def limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on this system; the time limit remains
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
