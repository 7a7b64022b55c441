"""What a task is made of."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One problem of a task.

    Attributes
    ----------
    id : str
        Names the problem within its task for good: the same id is the same problem.
    prompt : str
        One user message, as :func:`epiviz.generate` takes it.
    answer : str
        The right answer, written as the task writes answers.
    solution : str
        A reference trace that ends in the answer; "" where the task has none.
    meta : dict
        What the task knows about the problem (kind, size, …): columns of a results table.
    """

    id: str
    prompt: str
    answer: str
    solution: str = ""
    meta: dict = field(default_factory=dict)
