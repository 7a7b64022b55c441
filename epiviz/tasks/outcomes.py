"""How a text ended and whether it answers: one of eight outcomes, and nothing is counted as right by accident."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epiviz.decode import find_loop
from epiviz.tasks import answers
from epiviz.tasks.problems import Problem

OUTCOMES = ("error", "loop", "length", "empty", "garbage", "no answer", "correct", "wrong")
UNGRADED = "ungraded"  # what takes the place of the last two where answers cannot be checked here: code

GARBAGE_NON_ASCII = 30  # more than so many of the last 100 characters
GARBAGE_SHARE = 0.5  # more than this share of the last 200 characters is one of them


@dataclass(frozen=True)
class Judgement:
    """What became of one text.

    Attributes
    ----------
    outcome : str
        One of ``OUTCOMES``, or "ungraded".
    answer : str
        The answer that was judged, "" if there was none.
    unfinished_answer : str
        The answer that stands in a text that looped or was cut at its length, "" if there is none. It never counts.
    unfinished_right : bool
        That answer is the right one: what a grader that does not ask for an end would have counted.
    """

    outcome: str
    answer: str = ""
    unfinished_answer: str = ""
    unfinished_right: bool = False

    @property
    def correct(self) -> bool:
        return self.outcome == "correct"


def judge(
    problem: Problem,
    text: str,
    status: str,
    tokens: Sequence[int] = (),
    *,
    thinks: bool = True,
    error: BaseException | str | None = None,
) -> Judgement:
    """Return the outcome of one text; the first that applies, in the order of ``OUTCOMES``.

    Parameters
    ----------
    problem : Problem
    text : str
        The generated part, thoughts included; ``run.text``.
    status : {"finished", "length", "loop"}
        How it ended; ``run.status``.
    tokens : sequence of int
        The generated ids, which loops are looked for in; ``run.tokens``. Without them ``status`` alone tells.
    thinks : bool
        The model thinks before it answers; see :func:`epiviz.tasks.answers.thinks_first`.
    error : exception or str, optional
        What ended the run instead; then nothing else is looked at.

    Raises
    ------
    ValueError
        The run was interrupted: it has no outcome.
    """
    if error is not None:
        return Judgement("error")
    if status not in ("finished", "length", "loop"):
        raise ValueError(
            f"a run with the status {status!r} has no outcome; an outcome needs 'finished', 'length' or 'loop'"
        )
    outcome = "loop" if status == "loop" or ends_in_loop(tokens, status) else status
    if outcome != "finished":
        answer = answers.find_unfinished_answer(problem, text, thinks)
        right = answers.checkable(problem) and answers.is_right(problem, answer)
        return Judgement(outcome, unfinished_answer=answer, unfinished_right=right)
    if is_empty(text):
        return Judgement("empty")
    if is_garbage(text, code=problem.form == "code"):
        return Judgement("garbage")
    answer = answers.find_answer(problem, text, thinks)
    if not answer:
        return Judgement("no answer")
    if not answers.checkable(problem):
        return Judgement(UNGRADED, answer)
    return Judgement("correct" if answers.is_right(problem, answer) else "wrong", answer)


def ends_in_loop(tokens: Sequence[int], status: str = "length") -> bool:
    """Tell whether a text never left a loop, as :func:`epiviz.decode.find_loop` finds one at its end.

    A loop that the text gets out of does not count: what came after it decides. A finished text may have a stop token
    after its loop.
    """
    ends = [tokens, tokens[:-1]] if status == "finished" else [tokens]
    return any(find_loop(end) > 0 for end in ends)


def is_empty(text: str) -> bool:
    """Tell whether a text says nothing, neither in its thoughts nor after them."""
    return not text.replace("<think>", "").replace(answers.THOUGHTS_END, "").strip()


def is_garbage(text: str, code: bool = False) -> bool:
    """Tell whether the end of a text is no language: full of characters beyond ASCII, or mostly one character.

    The rule and its limits are those of VaSE's failure analysis, so a text that ends in Chinese is garbage too. One
    character is looked for in texts of at least 20: ``7`` is an answer. Space at the end says nothing; in code, which
    is indented, none does.

    Examples
    --------
    >>> is_garbage("So the answer is 7." + "!" * 200), is_garbage("7777")
    (True, False)
    """
    text = re.sub(r"\s", "", text) if code else text.rstrip()
    beyond_ascii = sum(not character.isascii() for character in text[-100:])
    if beyond_ascii > GARBAGE_NON_ASCII:
        return True
    end = text[-200:]
    return len(end) >= 20 and Counter(end).most_common(1)[0][1] > GARBAGE_SHARE * len(end)
