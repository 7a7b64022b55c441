"""A policy in one file of its own is everywhere: in the names, in a grid, in the matrix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
IMPORTS = """from dataclasses import dataclass
from typing import ClassVar

import torch

from epiviz.policies import Policy, Ranking, register

"""
USE = """
import sys
sys.path[:0] = ["tests"]
from tiny import random_prompt, tiny_model
import epiviz as ev

trace = ev.record(tiny_model("qwen3"), random_prompt(20), tokens=random_prompt(60), progress=False)
budgets = [ev.Budget(30, sinks=2, recent=8, buffer=8)]
grid = ev.replay_grid(tiny_model("qwen3"), trace, [sys.argv[1], "random"], budgets, cache=sys.argv[2], progress=False)
assert "novel-values" in ev.policies.names()
print(*grid.frame["policy"])
"""


def run(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_policy_of_notebook_10_needs_no_other_file(tmp_path):
    cells = nbformat.read(ROOT / "notebooks" / "10_your_own_policy.ipynb", as_version=4).cells
    *_, source = (cell.source for cell in cells if "policy" in cell.metadata.get("tags", []))
    assert len(source.splitlines()) <= 22
    file = tmp_path / "novel.py"
    file.write_text(IMPORTS + source)
    assert run("-c", USE, str(file), str(tmp_path / "cells")).split() == ["novel-values", "random"]
    shown = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--policy={file}", "tests/test_matrix.py", "-k", "novel"
    )
    assert "1 passed" in shown
