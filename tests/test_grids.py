"""Grids of replays: computed once, resumed after a kill, shared by processes."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from forked import Forked
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import cells, grids, policies
from epiviz.replays import ReplayFileError

BUDGETS = [ev.Budget(total, sinks=2, recent=8, buffer=8) for total in (24, 40)]
GRID = {"policies": ["full", "random", "epikv", "snapkv"], "budgets": BUDGETS, "seeds": [0, 1]}


def recorded(seed, length=90):
    return ev.record(
        tiny_model("qwen3"), random_prompt(20), tokens=random_prompt(length, seed), name=f"t{seed}", progress=False
    )


@pytest.fixture
def computed(monkeypatch):
    """The cells that are computed, by name, in order."""
    names, finish = [], grids._finish

    def spy(model, cells):
        names.extend(cell.name for cell in cells)
        finish(model, cells)

    monkeypatch.setattr(grids, "_finish", spy)
    return names


def test_a_grid_is_what_its_replays_are(tmp_path, computed):
    model, trace = tiny_model("qwen3"), recorded(1)
    grid = ev.replay_grid(model, trace, **GRID, cache=tmp_path, progress=False)
    assert len(grid) == len(grid.frame) == 2 * (1 + 3 * 2)  # the full cache knows no budget
    assert grid.frame.groupby("policy").size().to_dict() == {"full": 2, "random": 4, "epikv": 4, "snapkv": 4}
    (mine,) = grid.select(policy="random", budget=24, seed=1)
    alone = ev.replay(model, trace, "random", BUDGETS[0], seed=1, progress=False)
    for name in ("death", "reason", "event_steps"):
        assert np.array_equal(getattr(mine.retention, name), getattr(alone.retention, name))
    for name in ("nll", "full_nll", "kl", "margin"):
        assert getattr(mine, name) == pytest.approx(getattr(alone, name), nan_ok=True, abs=1e-6)
    assert (mine.meter, mine.budget, mine.policy, mine.positions) == (
        alone.meter, alone.budget, alone.policy, alone.positions
    )  # fmt: skip
    row = grid.frame.query("policy == 'random' and budget == 24 and seed == 1").iloc[0]
    assert row["nll_increase"] == pytest.approx(alone.nll_increase) and row["n"] == 90
    assert row["low"] < row["nll_increase"] < row["high"]
    assert (grid.frame.query("policy == 'full'")["kl"] == 0).all()
    with pytest.raises(KeyError, match="no cell with {'budget': 25}; there are"):
        grid.select(budget=25)
    with pytest.raises(KeyError, match="no column 'size'"):
        grid.select(size=25)

    del computed[:]
    again = ev.replay_grid(model, trace, **GRID, cache=tmp_path, progress=False)
    assert computed == [] and again.frame.equals(grid.frame)


def test_traces_of_one_name_stay_apart(tmp_path):
    first, second = recorded(1), replace(recorded(2), name=recorded(1).name)
    grid = ev.replay_grid(
        tiny_model("qwen3"), [first, second, first], ["random"], BUDGETS[:1], cache=tmp_path, progress=False
    )
    names = [f"{first.name} · {each.fingerprint[:6]}" for each in (first, second)]
    assert grid.frame["trace"].tolist() == names
    assert ev.frames.budget_curves(grid.frame)["n"].tolist() == [2]
    (replay,) = grid.select(trace=names[1])
    assert replay.trace.fingerprint == second.fingerprint


def test_a_cell_is_known_by_its_content(tmp_path, computed):
    model, trace = tiny_model("qwen3"), recorded(1)

    def compute(model=model, trace=trace, policy="snapkv", budget=BUDGETS[0], **more):
        del computed[:]
        ev.replay_grid(model, trace, [policy], [budget], cache=tmp_path, progress=False, **more)
        return len(computed)

    assert compute() == 1 and compute() == 0
    assert compute(policy=policies.get("snapkv", pool=3)) == 1
    assert compute(budget=ev.Budget(24, sinks=2, recent=8, buffer=9)) == 1
    assert compute(seeds=[1]) == 1
    assert compute(positions="cache-relative") == 1
    assert compute(trace=recorded(2)) == 1
    assert compute(model=tiny_model("qwen3", 4, 2, layers=5)) == 1
    assert compute() == 0
    output = model.decoder_layers[1].self_attn.o_proj.weight.data
    head, other = output[:, :16].clone(), output[:, 16:32].clone()
    output[:, :16] = 0  # an ablated head
    assert compute() == 1
    output[:, :16], output[:, 16:32] = other, head
    assert compute() == 1
    output[:, :16], output[:, 16:32] = head, other
    assert compute() == 0
    for column in (0, 1):  # signs lie in the highest bits, and change in pairs
        output[:, column] *= -1
        assert compute() == 1
        output[:, column] *= -1


def test_a_policy_of_ones_own_is_known_by_its_source(tmp_path, computed):
    model, trace = tiny_model("qwen3"), recorded(1)
    body = """
from dataclasses import dataclass
from epiviz import policies

@policies.register("mine-{n}")
@dataclass(frozen=True)
class Mine(policies.Policy):
    def rank(self, slots, state, draws):
        return policies.Ranking({sign}slots.positions.double())
"""
    for n, sign in enumerate(["", "-", ""]):
        file = tmp_path / f"mine{n}.py"
        file.write_text(body.format(n=n, sign=sign))
        ev.replay_grid(model, trace, [str(file)], BUDGETS[:1], cache=tmp_path / "cells", progress=False)
    assert len(computed) == 3

    @dataclass(frozen=True)
    class Typed(policies.Policy):
        def rank(self, slots, state, draws):
            return policies.Ranking(slots.positions.double())

    exec_only = {}
    exec(
        "from epiviz import policies\nclass Bare(policies.Policy):\n    def rank(self, slots, state, draws): ...",
        exec_only,
    )
    with pytest.raises(ValueError, match="source of policy .* cannot be read"):
        ev.replay_grid(model, trace, [exec_only["Bare"]()], BUDGETS[:1], cache=tmp_path / "cells", progress=False)
    assert ev.replay_grid(model, trace, [Typed()], BUDGETS[:1], cache=tmp_path / "cells", progress=False).frame.shape[0]


OWN = """
from dataclasses import dataclass
import torch
from epiviz import policies

SCALE = 1

def helper(positions):
    return [SCALE * x for x in positions][0]

@dataclass(frozen=True)
class Mine(policies.Policy):
    name = "mine"
    table = [1]
    weights = torch.ones(2)

    @staticmethod
    def score(positions):
        return helper(positions)

    def rank(self, slots, state, draws):
        return policies.Ranking(self.score(slots.positions.double()))
"""


@pytest.mark.parametrize(
    "before, after",
    [
        ("SCALE = 1", "SCALE = -1"),
        ("x for x in", "-x for x in"),
        ("return helper(positions)", "return -helper(positions)"),
        ("table = [1]", "table = [2]"),
        ("ones(2)", "zeros(2)"),
    ],
)
def test_what_a_policy_uses_is_part_of_its_source(before, after, tmp_path):
    """Helpers, constants and static methods decide what a policy of one's own does as much as its methods do."""
    found = []
    for number, text in enumerate(
        [OWN, OWN.replace("import torch", "import torch  # again"), OWN.replace(before, after)]
    ):
        file = tmp_path / f"own_{number}.py"
        file.write_text(text)
        module = importlib.util.spec_from_file_location(file.stem, file)
        own = importlib.util.module_from_spec(module)
        module.loader.exec_module(own)
        found.append(cells.foreign_source(own.Mine()))
    assert found[0] == found[1] != found[2]
    assert cells.foreign_source(ev.policies.get("random")) == ""


def test_seeds_of_numpy_are_seeds_and_count_once(tmp_path, computed):
    ask = {"policies": ["random"], "budgets": BUDGETS[:1], "cache": tmp_path, "progress": False}
    grid = ev.replay_grid(tiny_model("qwen3"), recorded(1), seeds=np.array([0, 0, 1]), **ask)
    assert grid.frame["seed"].tolist() == [0, 1]


def test_a_damaged_cell_is_computed_again(tmp_path, computed, capsys):
    model, trace = tiny_model("qwen3"), recorded(1)
    ask = {"policies": ["random"], "budgets": BUDGETS, "cache": tmp_path, "progress": False}
    grid = ev.replay_grid(model, trace, **ask)
    path = grid.cells[0].path
    path.write_bytes(path.read_bytes()[:1000])
    del computed[:]
    assert ev.replay_grid(model, trace, **ask).frame.equals(grid.frame)
    assert len(computed) == 1 and "computing random on 't1', budget 24, seed 0 again" in capsys.readouterr().err
    with pytest.raises(ReplayFileError, match="another trace"):
        ev.Replay.load(path, recorded(2))


def test_bad_grids_fail_before_anything_runs(tmp_path, computed):
    model, trace = tiny_model("qwen3"), recorded(1)
    ask = {"cache": tmp_path, "progress": False}
    budgets = [BUDGETS[1], ev.Budget(24, sinks=2, recent=8, buffer=8, protect_prompt=True)]
    with pytest.raises(
        ev.BudgetError, match="random on 't1': a budget of 24 slots cannot hold a protected prompt of 20"
    ):
        ev.replay_grid(model, trace, ["random"], budgets, **ask)
    with pytest.raises(ev.BudgetError, match="snapkv on 't1': .* looks at the last 64 queries, but only"):
        ev.replay_grid(model, trace, ["random", "snapkv"], BUDGETS, positions="rerotated", **ask)
    with pytest.raises(ev.UnknownPolicyError, match="did you mean"):
        ev.replay_grid(model, trace, ["snapkw"], BUDGETS, **ask)
    with pytest.raises(ValueError, match="an empty grid"):
        ev.replay_grid(model, trace, [], BUDGETS, **ask)
    assert computed == [] and list(tmp_path.iterdir()) == []


def start(folder):
    """Let another process compute the grid two cells at a time, and tell of each two."""

    def work(tell):
        grids.TOGETHER, finish = 2, grids._finish

        def told(model, cells):
            finish(model, cells)
            tell(len(cells))

        grids._finish = told
        ev.replay_grid(tiny_model("qwen3"), [recorded(1), recorded(2)], **GRID, cache=folder, progress=False)

    return Forked(work)


def test_a_killed_grid_resumes_and_two_share_the_work(tmp_path, computed):
    killed = start(tmp_path)
    assert killed.next() == 2
    time.sleep(0.1)
    killed.kill()
    finished = {path.stem: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert 2 <= len(finished) < 28, "killed in the middle"

    both = [start(tmp_path), start(tmp_path)]
    counts = [sum(process.rest()) for process in both]
    assert sum(counts) == 28 - len(finished), "no cell twice, none left out"
    assert all((tmp_path / f"{stem}.safetensors").stat().st_mtime_ns == at for stem, at in finished.items())
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".safetensors", ".lock")]

    grid = ev.replay_grid(tiny_model("qwen3"), [recorded(1), recorded(2)], **GRID, cache=tmp_path, progress=False)
    assert computed == [] and len(grid.frame) == 28 and set(grid.frame["trace"]) == {"t1", "t2"}
