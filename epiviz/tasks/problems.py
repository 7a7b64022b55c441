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
    prompt : str or list of chat messages
        As :func:`epiviz.generate` takes it: one user message, or a chat with a system message.
    answer : str
        The right answer, written as the task writes answers; "" where nothing here can check one.
    solution : str
        A reference trace that ends in the answer; "" where the task has none.
    meta : dict
        What the task knows about the problem (kind, size, …): columns of a results table.
    form : {"word", "mathematics", "choice", "mention", "code"}
        How an answer is found in a text and compared; see :mod:`epiviz.tasks.answers`.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str
    solution: str = ""
    meta: dict = field(default_factory=dict)
    form: str = "word"
