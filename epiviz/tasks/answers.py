r"""Which answer a text gives, and whether it is the right one.

What a model thinks is no answer: only what stands after the first ``</think>`` counts. Where an answer stands there,
and what makes two answers the same, is a matter of the problem's form:

* ``word``: the first word (the task ``steps``);
* ``mathematics``: the last ``\boxed{…}``, equal as :func:`same_mathematics` says;
* ``choice``: the last ``\boxed{…}``, a letter;
* ``mention``: the first of the candidates in ``meta["candidates"]`` that is named (the task ``recall``);
* ``code``: the last fenced block; it is not run, so nobody here can tell whether it is right.

Nothing a model writes is ever executed or handed to ``eval``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from epiviz.tasks.mathematics import same_mathematics
from epiviz.tasks.problems import Problem

THOUGHTS_END = "</think>"


def final_part(text: str, thinks: bool = True) -> str | None:
    """Return what a text says after its thoughts, None if the thoughts do not end.

    Parameters
    ----------
    text : str
    thinks : bool
        The model thinks first, whether or not a ``<think>`` is to be seen: many chat templates write it into the
        prompt. Of a model that does not, the whole text counts (unless there is a ``</think>`` all the same).

    Examples
    --------
    >>> final_part("so it is 5, or 6 </think> It is 5. </think> 7")
    ' It is 5. </think> 7'
    >>> final_part("It is 5."), final_part("It is 5.", thinks=False)
    (None, 'It is 5.')
    """
    _, found, after = text.partition(THOUGHTS_END)
    if found:
        return after
    return None if thinks or "<think>" in text else text


def thinks_first(tokenizer) -> bool:
    """Tell whether a tokenizer's chat template knows thoughts, so that answers stand after ``</think>``."""
    return "think>" in str(getattr(tokenizer, "chat_template", None) or "")


def last_boxed(text: str) -> str:
    r"""Return the content of the last ``\boxed{…}`` that has one, "" if there is none or it does not close.

    Examples
    --------
    >>> last_boxed(r"\boxed{3}, no: \boxed{\frac{1}{\{2\}}}")
    '\\frac{1}{\\{2\\}}'
    >>> last_boxed(r"in \boxed{}: \boxed{4}, as in \boxed{}"), last_boxed(r"\boxed{4} or \boxed{5")
    ('4', '')
    """
    for found in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{}]))", text))):
        rest = text[found.end() :]
        content = _to_closing_brace(rest) if found[1] else _without_braces(rest)
        if content is None or content.strip():
            return (content or "").strip()
    return ""


def last_code(text: str) -> str:
    """Return the content of the last fenced block, "" if there is none.

    Examples
    --------
    >>> last_code("First\\n```\\na\\n```\\nbetter:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    blocks = re.findall(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", text, re.DOTALL | re.MULTILINE)
    return blocks[-1].rstrip("\n") if blocks else ""


def choice_letter(text: str) -> str:
    r"""Return the letter that a boxed choice names, "" if it names none.

    Examples
    --------
    >>> choice_letter(r"\text{(b)}"), choice_letter("C. Helium"), choice_letter("Helium")
    ('B', 'C', '')
    """
    text = re.sub(r"\\(?:text|math)[a-z]*\s*|\\\s*$|[{}$*]", "", text).strip()
    text = re.sub(r"^(?:option|choice|answer)\b[\s:]*", "", text, flags=re.IGNORECASE)
    found = re.match(r"\(?([A-Za-z])(?:\)|[.:]|\s*$)", text)
    return found[1].upper() if found else ""


def first_mention(text: str, candidates: list[str]) -> str:
    """Return the first candidate that a text names as a whole word, "" if it names none.

    Examples
    --------
    >>> first_mention("Not 12, but 4821.", ["1", "4821", "77"])
    '4821'
    """
    names = "|".join(re.escape(name) for name in sorted(candidates, key=len, reverse=True))
    found = re.search(rf"(?<!\w)(?:{names})(?!\w)", text) if candidates else None
    return found[0] if found else ""


@dataclass(frozen=True)
class Form:
    """How answers of one form are found and compared.

    Attributes
    ----------
    find : callable
        Takes the final part of a text and the problem; returns the answer, "" if there is none.
    same : callable
        Takes the right answer and the found one; None if no checker exists.
    marked : bool
        An answer is marked as such, so that one can be told from the thoughts around it.
    """

    find: Callable[[str, Problem], str]
    same: Callable[[str, str], bool] | None
    marked: bool = True


FORMS = {
    "word": Form(lambda text, _: " ".join(text.split()[:1]), str.__eq__, marked=False),
    "mathematics": Form(lambda text, _: last_boxed(text), same_mathematics),
    "choice": Form(lambda text, _: choice_letter(last_boxed(text)), str.__eq__),
    "mention": Form(lambda text, problem: first_mention(text, problem.meta["candidates"]), str.__eq__, marked=False),
    "code": Form(lambda text, _: last_code(text), None),
}


def find_answer(problem: Problem, text: str, thinks: bool = True) -> str:
    """Return the answer that a finished text gives to a problem, "" if it gives none.

    Parameters
    ----------
    problem : Problem
    text : str
        What a model wrote, thoughts included.
    thinks : bool
        See :func:`final_part`.
    """
    part = final_part(text, thinks)
    return "" if part is None else _form(problem).find(part, problem)


def find_unfinished_answer(problem: Problem, text: str, thinks: bool = True) -> str:
    """Return the answer that stands in a text cut short, thoughts included; "" if none is marked as one."""
    form = _form(problem)
    part = final_part(text, thinks)
    if part is None:
        return form.find(text, problem) if form.marked else ""
    return form.find(part, problem)


def is_right(problem: Problem, answer: str) -> bool:
    """Tell whether an answer, as found, is the right one.

    Raises
    ------
    ValueError
        Nothing here can check answers of the problem's form.
    """
    same = _form(problem).same
    if same is None:
        raise ValueError(
            f"{problem.id} asks for code, which is not run here: write the completions to a file with "
            "epiviz.tasks.export_completions and grade them in a sandbox"
        )
    return bool(answer) and bool(same(problem.answer, answer))


def checkable(problem: Problem) -> bool:
    """Tell whether :func:`is_right` can judge answers to the problem."""
    return _form(problem).same is not None


def _form(problem: Problem) -> Form:
    if problem.form not in FORMS:
        raise ValueError(f"{problem.id} has the unknown form {problem.form!r}; use one of {', '.join(FORMS)}")
    return FORMS[problem.form]


def _without_braces(text: str) -> str:
    r"""Return what a box without braces of its own holds: ``7.`` holds 7, ``\frac{1}{2}}`` a fraction."""
    content = re.match(r"\S*", text)[0].rstrip("$.,;")
    return content.rstrip("$.,;}") if content.count("}") > content.count("{") else content


def _to_closing_brace(text: str) -> str | None:
    """Return the text up to the brace that closes one opened before it, None if none does."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # a backslash takes the next character along
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()]
    return None
