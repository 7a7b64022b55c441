"""What an evaluation is made of: attempts at problems, cells, and the settings that all cells share."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path

from epiviz import cells as kept
from epiviz.decode import Sampler
from epiviz.draws import sample_keys
from epiviz.engine import Row, Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Budget, BudgetError, Policy
from epiviz.tasks.outcomes import judge
from epiviz.tasks.problems import Problem

WRITING = (
    *("attempts", "attention", "cache", "continuous", "decode", "draws", "engine", "models", "policies", "positions"),
    *("selector", "signals"),
)  # the modules that decide what is written
GRADING = ("decode", *(f"tasks/{name}" for name in ("answers", "mathematics", "mathematics_worker", "outcomes")))


@dataclass(frozen=True)
class Attempt:
    """One sample of one problem: what does not depend on the policy.

    Attributes
    ----------
    problem : Problem
    sample : int
        Its number among the samples of the problem.
    prompt : list of int
    key : int
        Of its draws; see :func:`epiviz.draws.sample_key`.
    """

    problem: Problem
    sample: int
    prompt: list[int]
    key: int

    @cached_property
    def id(self) -> str:
        """Names the attempt in the files of a cell."""
        problem = self.problem
        parts = [problem.id, problem.answer, problem.form, problem.meta.get("candidates"), self.prompt, self.key]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """A policy under a budget with a seed, and the folder of its texts."""

    policy: Policy
    budget: Budget | None
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget.total:g}"
        return f"{self.policy.label}{budget}, seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Settings:
    """What all cells of an evaluation share."""

    model: Model
    sampler: Sampler
    max_new_tokens: int
    positions: str
    thinks: bool

    @cached_property
    def grader(self) -> str:
        """Tells what judged a text: this code, that of the library behind it, and what it takes for an answer."""
        return kept.key(kept.code_hash(GRADING), version("math-verify"), self.thinks)

    @cached_property
    def weights(self) -> str:
        return self.model.fingerprint()

    def key(self, policy: Policy, budget: Budget | None, seed: int) -> str:
        """Return the hash under which a cell is stored."""
        return kept.key(
            kept.code_hash(WRITING),
            self.weights,
            self.model.tokenizer_fingerprint,
            sorted(self.model.stop_tokens),
            repr(policy.for_model(self.model.shape)),
            kept.foreign_source(policy),
            repr(budget),
            seed,
            self.positions,
            repr(self.sampler),
            self.max_new_tokens,
        )

    def check(self, cell: Cell, attempts: Sequence[Attempt]) -> None:
        """Raise what a run would raise before its first token, about a budget with how many problems it concerns."""
        first, failed = None, []
        problems = [attempt for attempt in attempts if attempt.sample == 0]
        for attempt in problems:
            try:
                rows = self.rows(cell, [attempt])
                Session(self.model, cell.policy, rows, self.max_new_tokens, cell.seed, self.positions)
            except BudgetError as error:
                first = first or (attempt.problem.id, error)
                failed.append(attempt)
        if first is not None:
            raise BudgetError(
                f"{cell.name} does not fit {len(failed)} of {len(problems)} problems; {first[0]}: {first[1]}"
            ) from first[1]

    def rows(self, cell: Cell, attempts: Sequence[Attempt]) -> list[Row]:
        rows = make_rows([attempt.prompt for attempt in attempts], cell.policy, cell.budget, self.max_new_tokens)
        for row, attempt in zip(rows, attempts, strict=True):
            row.sample = attempt.key  # its number among the problem's samples, whatever batch it is in
        return rows

    def text(self, status: str, tokens: Sequence[int]) -> str:
        """Return what was written, without the token that ended it."""
        ended = len(tokens) - 1 if status == "finished" else len(tokens)
        return self.model.tokenizer.decode(
            tokens[:ended], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def judge(self, attempt: Attempt, record: dict) -> dict:
        """Return the outcome of a record as columns, with the grader that told it."""
        tokens, error = record["tokens"], record["error"] or None
        found = judge(
            attempt.problem,
            "" if error else self.text(record["status"], tokens),
            record["status"],
            tokens,
            thinks=self.thinks,
            error=error,
        )
        return {**asdict(found), "grader": self.grader}


def make_attempts(model: Model, problems: Sequence[Problem], samples: int, raw: bool) -> list[Attempt]:
    """Return every sample of every problem: the first of all of them, then the second."""
    if isinstance(problems, Problem) or not all(isinstance(each, Problem) for each in problems):
        raise TypeError("problems must be a list of Problem, as epiviz.tasks.load returns it")
    if not len(problems):
        raise ValueError("there are no problems; load some with epiviz.tasks.load(…)")
    ids = Counter(problem.id for problem in problems)
    if twice := [name for name, count in ids.items() if count > 1]:
        raise ValueError(f"the problem {twice[0]!r} stands {ids[twice[0]]} times; ask for more samples instead")
    prompts = [model.encode(problem.prompt, raw=raw) for problem in problems]
    keys = sample_keys(prompts * samples)
    each = zip(product(range(samples), zip(problems, prompts, strict=True)), keys, strict=True)
    return [Attempt(problem, sample, prompt, key) for (sample, (problem, prompt)), key in each]
