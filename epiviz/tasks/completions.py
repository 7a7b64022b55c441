"""Completions of programming problems, written out for a sandbox: what a model wrote is not run here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from epiviz.results import write_text_atomically
from epiviz.tasks.answers import find_answer
from epiviz.tasks.problems import Problem


def export_completions(
    problems: Sequence[Problem],
    completions: Sequence[Sequence[str]],
    path: str | PathLike,
    thinks: bool = True,
) -> Path:
    """Write the code of each completion, as LiveCodeBench's custom evaluator reads it.

    The file is a list of ``{"question_id", "code_list"}``; a completion without a fenced block after its thoughts
    contributes an empty program, which fails.

    Parameters
    ----------
    problems : sequence of Problem
        Of the form "code".
    completions : sequence of sequences of str
        Per problem, the whole texts, thoughts included; the same number for each.
    path : path
        A ``.json`` file.
    thinks : bool
        See :func:`epiviz.tasks.answers.final_part`.

    Raises
    ------
    ValueError
        The numbers do not fit, or a problem does not ask for code.
    """
    if len(problems) != len(completions):
        raise ValueError(f"there are {len(problems)} problems and completions for {len(completions)}")
    counts = sorted({len(texts) for texts in completions})
    if len(counts) != 1 or isinstance(completions[0], str):
        raise ValueError(f"every problem needs a list of equally many completions, got lists of {counts}")
    other = next((problem for problem in problems if problem.form != "code"), None)
    if other is not None:
        raise ValueError(f"{other.id} does not ask for code; only livecodebench is exported")
    entries = [
        {
            "question_id": problem.meta["question_id"],
            "code_list": [find_answer(problem, text, thinks) for text in texts],
        }
        for problem, texts in zip(problems, completions, strict=True)
    ]
    path = Path(path)
    write_text_atomically(path, json.dumps(entries, ensure_ascii=False, indent=1) + "\n")
    return path
