"""``steps``: programs over digits that a small model executes line by line, and has to look back to do so.

A prompt gives some digits, lists lines of arithmetic (mod 10) and asks for a sum or a difference::

    f=7 k=3 L4 f + k c R3 L5 c - 4 k L6 k + f f back L7 f - k p ask p + c

reads: f is 7 and k is 3; line 4: c = f + k; then four times (three after the first) line 5: k = c - 4 and line 6:
f = k + f; line 7: p = f - k; what is p + c? The solution executes it, one line at a time, and undoes the question::

    L4 f f7 + k k3 > 0 c c=0 . R3 L5 c c0 - 4 > 6 k k=6 . L6 … back R2 … back R1 … back R0 … back out L7 f f1 - k k6
    > 5 p p=5 . ask p p5 + c c0 > 5 . check 5 - c c0 > 5 p p5 . </think> 5

A name is followed by one token that carries name and value, so that a model finds a value by looking for the latest
``k=…``; a result's digit stands before the token that stores it. After ``k=6``, every older ``k=…`` is junk.
"""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass, replace

import numpy as np

from epiviz.tasks.problems import Problem

NAMES = tuple(string.ascii_lowercase[:16])
KINDS = ("chain", "rounds", "ledger")
SPLITS = ("train", "unseen")
MAX_LABEL, MAX_ROUNDS = 32, 16
MIN_STATEMENTS, MAX_STATEMENTS, MAX_CARRY_FREE = 3, 160, 7
UNSEEN_SHARE = 0.125  # of all programs, by their hash
RAREST = 200  # problems made for one that is wanted, at most
CARRY_FREE_TRIES = 50  # draws of the given digits of one program
CLEAR_RATIO = 1.5  # a stale value lies at least this many times as far back as the valid one


@dataclass(frozen=True)
class Line:
    """``target = left ± right``; ``right`` is a name or a digit."""

    label: int
    left: str
    sign: str
    right: str
    target: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The names whose values the line needs."""
        return (self.left,) if self.right.isdigit() else (self.left, self.right)

    def text(self) -> str:
        return f"L{self.label} {self.left} {self.sign} {self.right} {self.target}"


@dataclass(frozen=True)
class Program:
    """Given digits, lines before, inside and after a loop, and a question.

    The body runs ``rounds + 1`` times: rounds are counted down to 0. Without a body ``rounds`` is 0.
    """

    given: tuple[tuple[str, int], ...]
    head: tuple[Line, ...]
    body: tuple[Line, ...]
    tail: tuple[Line, ...]
    rounds: int
    question: tuple[str, str, str]  # name, sign, name

    @property
    def structure(self) -> str:
        """The program without the given digits: what the split into train and unseen goes by."""
        words = [line.text() for line in self.head]
        if self.body:
            words += [f"R{self.rounds}", *(line.text() for line in self.body), "back"]
        words += [*(line.text() for line in self.tail), "ask", *self.question]
        return " ".join(words)

    @property
    def carry_free(self) -> bool:
        """Whether every result, the question's included, lies in 0 to 9 before it is taken mod 10."""
        values = dict(self.given)
        first, sign, second = self.question
        body = self.body * (self.rounds + 1)
        for line in (*self.head, *body, *self.tail, Line(0, first, sign, second, "")):
            right = int(line.right) if line.right.isdigit() else values[line.right]
            result = values[line.left] + right if line.sign == "+" else values[line.left] - right
            if not 0 <= result <= 9:
                return False
            values[line.target] = result
        return True

    def prompt(self) -> str:
        return " ".join([*(f"{name}={digit}" for name, digit in self.given), self.structure])

    def solve(self) -> tuple[str, str]:
        """Return the solution trace and the answer."""
        values = dict(self.given)
        words: list[str] = []
        for line in self.head:
            words += _execute(line, values)
        if self.body:
            words.append(f"R{self.rounds}")
            for left in range(self.rounds, -1, -1):
                for line in self.body:
                    words += _execute(line, values)
                words += ["back", f"R{left - 1}" if left else "out"]
        for line in self.tail:
            words += _execute(line, values)
        first, sign, second = self.question
        answer = _combine(values[first], sign, values[second])
        asked = [first, f"{first}{values[first]}", sign, second, f"{second}{values[second]}", ">", str(answer), "."]
        # The check undoes the question: its result is the first value again.
        undo = "-" if sign == "+" else "+"
        check = ["check", str(answer), undo, second, f"{second}{values[second]}", ">", str(values[first])]
        words += ["ask", *asked, *check, first, f"{first}{values[first]}", ".", "</think>", str(answer)]
        return " ".join(words), str(answer)


def make_problem(
    seed: int, index: int, *, kind: str, statements: int, split: str = "unseen", carry_free: bool = False
) -> Problem:
    """Return one problem, a pure function of its arguments.

    Parameters
    ----------
    seed, index : int
        Key the draws; problem ``index`` does not depend on how many others are made.
    kind : str
        "chain" (no loop), "rounds" (a loop that overwrites what it computed a round ago) or "ledger" (a loop over a few
        accounts, each updated in place).
    statements : int
        Lines executed, 3 to 160 (a chain: at most 32); the trace has about 11 tokens a line.
    split : str
        "train" or "unseen": no program of one, whatever its given digits, occurs in the other.
    carry_free : bool
        Draw until no result has to be taken mod 10. Only short programs have such digits often enough: up to 7 lines.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(KINDS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(SPLITS)}")
    largest = MAX_LABEL if kind == "chain" else MAX_STATEMENTS
    if not MIN_STATEMENTS <= statements <= largest:
        raise ValueError(f"a {kind} problem has {MIN_STATEMENTS} to {largest} statements, not {statements}")
    if carry_free and statements > MAX_CARRY_FREE:
        raise ValueError(f"a problem without carries has at most {MAX_CARRY_FREE} statements, not {statements}")
    rng = np.random.default_rng([seed, index, KINDS.index(kind), statements])
    while True:  # a redraw with the same generator: one in eight programs is unseen
        program = _draw_program(rng, kind, statements)
        if program is None or split_of(program.structure) != split:
            continue
        if carry_free:
            program = _without_carries(rng, program)
        if program is not None:
            break
    solution, answer = program.solve()
    prompt = program.prompt()
    meta = {
        "kind": kind,
        "statements": statements,
        "split": split,
        "prompt_words": len(prompt.split()),
        "solution_words": len(solution.split()),
        **look_backs(prompt, solution),
    }
    return Problem(f"steps-{kind}-{statements}-{split}-{seed}-{index}", prompt, answer, solution, meta)


def load_steps(
    n: int,
    seed: int = 0,
    *,
    kinds: tuple[str, ...] | str | None = None,
    statements: int | tuple[int, int] = 24,
    split: str = "unseen",
    longest_prompt: int | None = None,
) -> list[Problem]:
    """Return ``n`` problems, the kinds in turn.

    Parameters
    ----------
    kinds : str or tuple of str, optional
        Among "chain", "rounds", "ledger"; all three, or without "chain" where it has no problems so large.
    statements : int or (int, int)
        Lines executed: a number, or the smallest and largest of a range to draw from.
    split : str
        "unseen" (never trained on) or "train".
    longest_prompt : int, optional
        Problems whose prompt has more words are left out, so that a cache can protect the prompt and has room.

    Raises
    ------
    ValueError
        Prompts as short as that are too rare.
    """
    smallest, largest = (statements, statements) if isinstance(statements, int) else statements
    if kinds is None:
        kinds = KINDS if largest <= MAX_LABEL else KINDS[1:]
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    problems, lengths = [], []
    while len(problems) < n:
        index = len(lengths)
        size = int(np.random.default_rng([seed, index]).integers(smallest, largest + 1))
        problem = make_problem(seed, index, kind=kinds[index % len(kinds)], statements=size, split=split)
        lengths.append(problem.meta["prompt_words"])
        if longest_prompt is None or lengths[-1] <= longest_prompt:
            problems.append(problem)
        elif index > RAREST * (len(problems) + 1):
            raise ValueError(
                f"{len(problems)} of {len(lengths)} problems have prompts of at most {longest_prompt} words; the "
                f"shortest has {min(lengths)}, and half of them at most {int(np.median(lengths))}"
            )
    return problems


def split_of(structure: str) -> str:
    """Return the split of a program, its lines as the prompt lists them: by hash, so that none can be in both."""
    first = hashlib.sha256(structure.encode()).digest()[0]
    return "unseen" if first < 256 * UNSEEN_SHARE else "train"


def vocabulary() -> list[str]:
    """Return every word of prompts and solutions, in a fixed order."""
    digits = [str(digit) for digit in range(10)]
    return [
        *("+", "-", ">", ".", "ask", "check", "back", "out", "<think>", "</think>"),
        *digits,
        *NAMES,
        *(f"L{label}" for label in range(1, MAX_LABEL + 1)),
        *(f"R{rounds}" for rounds in range(MAX_ROUNDS + 1)),
        *(name + digit for name in NAMES for digit in digits),
        *(f"{name}={digit}" for name in NAMES for digit in digits),
    ]


def word_parts(word: str) -> tuple[str, ...]:
    """Return what a word of the vocabulary is made of: ``k=6`` of "k", "=" and "6"; ``L12`` of "L" and "12"."""
    return tuple(re.findall(r"[a-zA-Z]|=|\d+", word)) if re.fullmatch(r"[a-zA-Z]=?\d+", word) else (word,)


def look_backs(prompt: str, solution: str) -> dict[str, float]:
    """Return how far a solution looks back for its values, in tokens of prompt and solution together.

    ``look_back`` is the largest distance from a value that is read (``k6``) to the assignment it comes from (``k=6``),
    ``mean_look_back`` the mean over all reads.
    """
    written: dict[str, int] = {}
    distances = []
    for position, word in enumerate([*prompt.split(), "<think>", *solution.split()]):
        if "=" in word:
            written[word[0]] = position
        elif len(word) == 2 and word[0] in NAMES:
            distances.append(position - written[word[0]])
    return {"look_back": max(distances), "mean_look_back": float(np.mean(distances))}


def _combine(left: int, sign: str, right: int) -> int:
    return (left + right if sign == "+" else left - right) % 10


def _execute(line: Line, values: dict[str, int]) -> list[str]:
    right = int(line.right) if line.right.isdigit() else values[line.right]
    right_words = [line.right] if line.right.isdigit() else [line.right, f"{line.right}{right}"]
    left = values[line.left]
    result = values[line.target] = _combine(left, line.sign, right)
    target = line.target
    return [
        *(f"L{line.label}", line.left, f"{line.left}{left}", line.sign, *right_words),
        *(">", str(result), target, f"{target}={result}", "."),
    ]


class _Clock:
    """Which names can be read when: they have a value, and no stale value lies nearly as close.

    Time counts executed lines; the loop's lines are written down for every round at once.
    """

    def __init__(self) -> None:
        self.written: dict[str, list[int]] = {}

    def write(self, name: str, *times: int) -> None:
        self.written[name] = sorted([*self.written.get(name, []), *times])

    def readable(self, name: str, time: int) -> bool:
        before = [when for when in self.written.get(name, []) if when < time]
        if not before:
            return False
        return len(before) == 1 or time - before[-2] >= CLEAR_RATIO * (time - before[-1])


def _draw_program(rng: np.random.Generator, kind: str, statements: int) -> Program | None:
    """Draw a program that executes exactly ``statements`` lines; None where the draw led nowhere."""
    head_lines, body_lines, rounds, tail_lines = _draw_sizes(rng, kind, statements)
    lines = head_lines + body_lines + tail_lines
    label = int(rng.integers(1, MAX_LABEL - lines + 2))
    names = [str(name) for name in rng.permutation(NAMES)]
    given = names[: int(rng.integers(2, 5)) + (body_lines + 1) // 2]
    fresh = names[len(given) :]
    clock = _Clock()
    for place, name in enumerate(given):
        clock.write(name, -1 - lines // 2 - (len(given) - place) // 11)
    unread = list(given)

    def draw_line(times: list[int], target: str | None = None) -> Line | None:
        nonlocal label
        readable = [name for name in sorted(clock.written) if all(clock.readable(name, time) for time in times)]
        if kind == "ledger" and target is not None:
            left = target if target in readable else None
        else:
            left = _pick(rng, readable, unread)
        others = [name for name in readable if name != left]
        literal = rng.random() < (0.5 if kind == "ledger" else 0.15)
        right = str(rng.integers(1, 10)) if literal else _pick(rng, others, unread)
        if left is None or right is None:
            return None
        if target is None:
            target = _draw_target(rng, clock, fresh, {left, right}, unread, times[0])
            clock.write(target, *times)
        line = Line(label, left, str(rng.choice(["+", "-"])), right, target)
        label += 1
        for name in line.reads:
            if name in unread:
                unread.remove(name)
        if target not in unread:
            unread.append(target)
        return line

    head = [draw_line([time]) for time in range(head_lines)]
    turns = rounds + 1 if body_lines else 0
    # The loop's targets come first, so that a line knows what later lines overwrite before its next turn.
    if body_lines:
        overwritten = [str(name) for name in rng.permutation(sorted(clock.written))]
        if kind == "rounds" and len(fresh) > body_lines:
            new = int(rng.integers(0, body_lines // 2 + 1))
            overwritten = [str(n) for n in rng.permutation(overwritten[: body_lines - new] + fresh[:new])]
            fresh = fresh[new:]
        targets = overwritten[:body_lines]
        if len(targets) < body_lines:
            return None
        for place, target in enumerate(targets):
            clock.write(target, *(head_lines + turn * body_lines + place for turn in range(turns)))
    body = [
        draw_line([head_lines + turn * body_lines + place for turn in range(turns)], targets[place])
        for place in range(body_lines)
    ]
    start = head_lines + turns * body_lines
    tail = [draw_line([start + time]) for time in range(tail_lines)]
    if None in head + body + tail:
        return None
    asked = (statements, statements + 1)  # in the question and in the check
    readable = [name for name in sorted(clock.written) if all(clock.readable(name, time) for time in asked)]
    first = _pick(rng, readable, unread, certain=True)
    # The other name asked for is the one assigned longest ago: the farthest that a solution can look back.
    second = min((name for name in readable if name != first), key=lambda name: clock.written[name][-1], default=None)
    if first is None or second is None:
        return None
    digits = rng.integers(0, 10, len(given))
    return Program(
        tuple((name, int(digit)) for name, digit in zip(given, digits, strict=True)),
        *(tuple(head), tuple(body), tuple(tail)),
        rounds if body_lines else 0,
        (first, str(rng.choice(["+", "-"])), second),
    )


def _without_carries(rng: np.random.Generator, program: Program) -> Program | None:
    """Return the program with given digits that lead to no carry; None if so many draws find none."""
    names = [name for name, _ in program.given]
    for digits in rng.integers(0, 10, (CARRY_FREE_TRIES, len(names))).tolist():
        drawn = replace(program, given=tuple(zip(names, digits, strict=True)))
        if drawn.carry_free:
            return drawn
    return None


def _draw_sizes(rng: np.random.Generator, kind: str, statements: int) -> tuple[int, int, int, int]:
    """Return lines before, in and after the loop and the rounds to go after the first."""
    if kind == "chain" or statements < 8:
        return statements, 0, 0, 0
    while True:
        body = int(rng.integers(3, min(12, statements // 2) + 1))
        rounds = int(rng.integers(1, MAX_ROUNDS + 1))
        rest = statements - body * (rounds + 1)
        if 2 <= rest <= 16:
            tail = int(rng.integers(1, rest))
            return rest - tail, body, rounds, tail


def _pick(rng: np.random.Generator, names: list[str], wanted: list[str], certain: bool = False) -> str | None:
    """Pick a name, preferring those nobody has read yet: most lines should matter for the answer."""
    preferred = [name for name in names if name in wanted]
    if preferred and (certain or rng.random() < 0.6):
        return preferred[int(rng.integers(len(preferred)))]
    return names[int(rng.integers(len(names)))] if names else None


def _draw_target(rng, clock: _Clock, fresh: list[str], operands: set[str], unread: list[str], time: int) -> str:
    """Return the name a line outside the loop writes: a fresh one, or one whose value was read already."""
    used = [
        n for n in sorted(clock.written) if n not in operands and n not in unread and clock.written[n][-1] < time - 2
    ]
    if used and (not fresh or rng.random() < 0.5):
        return used[int(rng.integers(len(used)))]
    return fresh.pop(0) if fresh else sorted(clock.written)[int(rng.integers(len(clock.written)))]
