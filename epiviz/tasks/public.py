"""The public problem sets: where they come from, how their rows are read, and how they are asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from epiviz.tasks import protocols
from epiviz.tasks.problems import Problem
from epiviz.tasks.rows import Hub, pick, read_files, read_hub

QUESTION = ("problem", "Problem", "question", "Question", "prompt")
ANSWER = ("answer", "Answer")
IDENTITY = ("unique_id", "ID", "id", "problem_idx", "question_id", "Record ID")
INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
LETTERS = "ABCD"

# How VaSE asked for code.
CODE_TASK = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches the "
    "specification and passes all tests."
)
CODE_WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
CODE_FROM_INPUT = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT."
)
# Not the hidden tests: gigabytes of them, pickled, and no code is run here.
CODE_COLUMNS = (
    *("question_id", "question_title", "question_content", "starter_code"),
    *("difficulty", "platform", "contest_date"),
)
CODE_FILES = ("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7)))  # release 6 is all six


@dataclass(frozen=True)
class Item:
    """What a row says, before it is asked as a protocol wants it."""

    question: str
    answer: str
    meta: dict
    form: str = "mathematics"


@dataclass(frozen=True)
class PublicSet:
    """A set on the hub: where, how a row is read (row, name in errors, seed), and which columns say more about it."""

    sources: tuple[Hub, ...]
    read: Callable[[dict, str, int], Item]
    columns: tuple[str, ...] = ()  # of rows too large to be held whole; all if empty


def load_public(
    n: int | None,
    seed: int = 0,
    *,
    name: str,
    path: str | PathLike | Sequence[str | PathLike] | None = None,
    protocol: str | None = None,
    shuffled: bool = False,
    difficulty: str | None = None,
) -> list[Problem]:
    """Return problems of a public set.

    Parameters
    ----------
    n : int or None
        The first so many in the set's own order; None: as many as the protocol took, all without one.
    seed : int
        Orders the options of multiple choice, and the problems if ``shuffled``.
    name : str
        One of ``SETS``.
    path : path or sequence of paths, optional
        Local files with the set's original columns, instead of the hub.
    protocol : {"epikv", "vase"}, optional
        Ask as this paper did; :func:`epiviz.tasks.protocol` has its sampling and limits. Otherwise a problem is one
        user message with the usual instruction.
    shuffled : bool
        In an order drawn by ``seed`` rather than the set's; the first n do not depend on n.
    difficulty : str, optional
        Only problems of this difficulty (LiveCodeBench: easy, medium, hard).

    Raises
    ------
    ImportError
        No ``path``, and the library ``datasets`` is not installed.
    FileNotFoundError, ValueError
        See :func:`epiviz.tasks.rows.read_files`; or a column is missing; or there are fewer than ``n`` problems.
    """
    public = SETS[name]
    asked = protocols.plain(name) if protocol is None else protocols.protocol(protocol, name)
    rows = read_hub(name, public.sources, public.columns) if path is None else read_files(path)
    difficulty = difficulty or asked.filters.get("difficulty")
    if difficulty is not None:
        rows = _of_difficulty(rows, difficulty, name)
    if n is None:
        n = min(asked.n_problems or len(rows), len(rows))
    if n > len(rows):
        which = f" of difficulty {difficulty!r}" if difficulty else ""
        raise ValueError(f"{name} has {len(rows)} problems{which}, fewer than n={n}; n=None takes them all")
    order = np.random.default_rng(seed).permutation(len(rows)) if shuffled else np.arange(len(rows))
    identities = _identities(rows)
    problems = []
    for index in order[:n].tolist():
        item = public.read(rows[index], f"row {index} of {name}", seed)
        # Another order of the options is another problem.
        identity = f"{name}-{identities[index]}" + (f"-{seed}" if item.form == "choice" else "")
        meta = {"task": name, "protocol": asked.paper, **item.meta}
        problems.append(Problem(identity, asked.prompt(item.question), item.answer, meta=meta, form=item.form))
    return problems


def _identities(rows: list[dict]) -> list[str]:
    """Return what the rows call themselves, or their places where they have no names of their own."""
    names = [next((str(row[column]) for column in IDENTITY if row.get(column) is not None), None) for row in rows]
    unique = None not in names and len(set(names)) == len(names)
    return names if unique else [str(place) for place in range(len(rows))]


def _of_difficulty(rows: list[dict], difficulty: str, name: str) -> list[dict]:
    levels = sorted({str(row.get("difficulty")) for row in rows})
    if difficulty not in levels:
        raise ValueError(f"{name} has no problems of difficulty {difficulty!r}; it has {', '.join(levels)}")
    return [row for row in rows if row.get("difficulty") == difficulty]


def _read_mathematics(row: dict, where: str, seed: int) -> Item:
    question = pick(row, QUESTION, "question", where).removesuffix(protocols.BOXED).rstrip()  # some copies ask already
    meta = {column: row[column] for column in ("subject", "level", "problem_type", "year") if column in row}
    return Item(question, pick(row, ANSWER, "answer", where), meta)


def _read_gsm8k(row: dict, where: str, seed: int) -> Item:
    question = pick(row, ("question",), "question", where)
    solution = pick(row, ("answer",), "answer", where)
    found = re.search(r"####\s*(-?[\d,]*\.?\d+)\s*$", solution)
    if not found:
        raise ValueError(f"{where}: a GSM8K answer ends in '#### ' and a number, this one in {solution[-40:]!r}")
    return Item(question, found[1].replace(",", ""), {})


def _read_gpqa(row: dict, where: str, seed: int) -> Item:
    """Read a question whose options are columns, or stand in its text as lines A to D beside a letter as answer.

    Both are shuffled: in the file in circulation the right option is always the first.
    """
    if "Correct Answer" in row:
        question = pick(row, QUESTION, "question", where)
        right = pick(row, ("Correct Answer",), "right answer", where)
        options = [right, *(pick(row, (column,), "wrong answer", where) for column in INCORRECT)]
    else:
        question, options = _split_options(pick(row, QUESTION, "question", where), where, list(row))
        letter = pick(row, ANSWER, "answer", where).strip("() .")
        if letter not in tuple(LETTERS):
            raise ValueError(f"{where}: the answer must be one of {', '.join(LETTERS)}, it is {letter!r}")
        right = options[LETTERS.index(letter)]
    # Keyed by the question, so that a problem's order does not depend on where it stands in the set.
    order = np.random.default_rng([seed, *question.encode()]).permutation(len(options))
    options = [options[place] for place in order]
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    meta = {"subject": row["High-level domain"]} if "High-level domain" in row else {}
    return Item("\n".join([question, "", *lines]), LETTERS[options.index(right)], meta, "choice")


def _split_options(text: str, where: str, columns: list[str]) -> tuple[str, list[str]]:
    """Return the question and the four options of a text that lists them as lines A to D."""
    pieces = re.split(r"(?:^|\n)\s*\(?([A-D])[).:]\s+", text)
    question, letters, options = pieces[0], pieces[1::2], pieces[2::2]
    if letters != list(LETTERS):
        raise ValueError(
            f"{where} has neither a column 'Correct Answer' nor lines A to D with the options in its question; "
            f"found the columns {', '.join(columns)} and the lines {', '.join(letters) or 'none'}"
        )
    options[-1] = options[-1].split("\n\n")[0]  # an instruction may follow
    return question.strip(), [option.strip() for option in options]


def _read_code(row: dict, where: str, seed: int) -> Item:
    r"""Read a LiveCodeBench problem and write its question as VaSE asked it."""
    content = pick(row, ("question_content",), "question", where)
    starter = pick(row, ("starter_code",), "starter code", where)
    what = CODE_WITH_STARTER if starter else CODE_FROM_INPUT
    block = starter or "# YOUR CODE HERE"
    question = f"{CODE_TASK}\n\nQuestion: {content}\n\n{what}\n```python\n{block}\n```\n\n"
    names = ("question_id", "question_title", "difficulty", "platform", "contest_date")
    return Item(question, "", {column: str(row[column]) for column in names if column in row}, "code")


SETS = {
    "gsm8k": PublicSet((Hub("openai/gsm8k", "main", "test"),), _read_gsm8k),
    "math500": PublicSet((Hub("HuggingFaceH4/MATH-500", split="test"),), _read_mathematics),
    "aime24": PublicSet((Hub("Maxwell-Jia/AIME_2024"),), _read_mathematics),
    "aime25": PublicSet((Hub("MathArena/aime_2025"),), _read_mathematics),
    "aime26": PublicSet((Hub("MathArena/aime_2026"),), _read_mathematics),
    # February and November, as in VaSE
    "hmmt25": PublicSet((Hub("MathArena/hmmt_feb_2025"), Hub("MathArena/hmmt_nov_2025")), _read_mathematics),
    "gpqa-diamond": PublicSet((Hub("Idavidrein/gpqa", "gpqa_diamond"),), _read_gpqa),
    "livecodebench": PublicSet(
        (Hub("livecodebench/code_generation_lite", files=CODE_FILES),), _read_code, CODE_COLUMNS
    ),
}
