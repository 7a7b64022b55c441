"""Reproduction: a published protocol followed under eviction, whole or a small part of it.

A protocol (:mod:`epiviz.tasks.protocols`) says which problems were asked how, how texts were sampled and where they
were cut. Sinks, recent tokens, buffer and the prompt's protection are those of the paper's code, for every policy
alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from epiviz import tasks
from epiviz.evaluation import Evaluation, evaluate
from epiviz.models import Model
from epiviz.policies import Budget
from epiviz.tasks.protocols import PROTOCOLS, Protocol


def find(name: str) -> Protocol:
    """Return a protocol by the name that notebooks use, ``"paper/task"``.

    Raises
    ------
    ValueError
        There is none of that name.

    Examples
    --------
    >>> find("vase/gsm8k").budgets
    (512,)
    """
    paper, slash, task = name.partition("/")
    if not slash:
        known = ", ".join("/".join(key) for key in PROTOCOLS)
        raise ValueError(f"a protocol is named paper/task, not {name!r}; there is {known}")
    return tasks.protocol(paper, task)


def limit(asked: Protocol, total: int) -> Budget:
    """Return so many slots as the paper's code divides them: what is recent, when it evicts, whether the prompt stays.

    Examples
    --------
    >>> limit(find("epikv/math500"), 512).recent, limit(find("vase/gsm8k"), 512).recent
    (128, 64)
    """
    if asked.paper == "epikv":
        return Budget(total, sinks=0, recent=min(128, total // 4), buffer=1, protect_prompt=True)
    return Budget(total, sinks=4, recent=64, buffer=64)


def reproduce(
    model: Model,
    asked: Protocol,
    policy: str | Sequence[str],
    total: int | None = None,
    *,
    n_problems: int | None = None,
    max_new_tokens: int | None = None,
    samples: int | None = None,
    path: str | os.PathLike | None = None,
    seed: int = 0,
    **options,
) -> Evaluation:
    """Let a model solve problems as a paper had them solved.

    Parameters
    ----------
    model : Model
    asked : Protocol
        From :func:`find`.
    policy : str, or several
    total : int, optional
        Slots; ``full`` needs none.
    n_problems, max_new_tokens, samples : int, optional
        Less than what the paper did: fewer problems, shorter texts, fewer texts per problem.
    path : path, optional
        A local copy of the problem set; by default it is fetched from the hub.
    seed : int
        Keys every draw. The problems, options in their order included, are the same under every seed: texts of several
        seeds are texts of one problem.
    **options
        Passed on to :func:`epiviz.evaluate`.

    Returns
    -------
    Evaluation
        Where a protocol limits prompt and text together, all texts are cut where the longest prompt has to be.
    """
    problems = tasks.load(asked.task, n_problems, protocol=asked.paper, path=path)
    room = asked.new_tokens(max(len(model.encode(problem.prompt)) for problem in problems))
    return evaluate(
        model,
        problems,
        policy,
        None if total is None else limit(asked, total),
        samples=samples or asked.samples,
        seed=seed,
        max_new_tokens=min(room, max_new_tokens or room),
        **asked.sampling,
        **options,
    )
