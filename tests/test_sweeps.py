"""Sweeps: what is checked before the start, what survives interruptions, what is made again."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_runs import write_notebook
from typer.testing import CliRunner

from epiviz import sweeps
from epiviz.cli import app
from epiviz.executors.local import LocalExecutor
from epiviz.jobs import Job, claim
from epiviz.manifest import Manifest
from epiviz.parameters import ParameterError, parse_grid

PARAMETERS = """\
policy: str = "full"  # what is kept
others: str = ""  # more policies, separated by commas
budget: int = 128  # slots per layer and KV head
seed: int = 0  # of the draws
out_dir: str = "nowhere"  # results go here
"""
# no imports that take seconds
NOTE = """\
import json, pathlib
with open("made.txt", "a") as made:
    print(policy, budget, seed, file=made)
finding = {"finding": f"{policy} at {budget}, seed {seed}"}
pathlib.Path(out_dir, "finding.json").write_text(json.dumps(finding))
"""
COMMAND = [sys.executable, "-c", "from epiviz.cli import app; app()", "sweep", "01_tiny", "--out", "runs/x"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with one tiny notebook, which is the working directory."""
    (tmp_path / "notebooks" / "profiles").mkdir(parents=True)
    (tmp_path / "notebooks" / "profiles" / "demo.yaml").write_text("default: {budget: 64}\n")
    monkeypatch.chdir(tmp_path)
    write_notebook(Path("notebooks/01_tiny.ipynb"), NOTE, parameters=PARAMETERS)
    return tmp_path


def start(*arguments):
    return CliRunner().invoke(app, ["sweep", "01_tiny", "--out", "runs/x", "--workers", "1", *arguments])


def made():
    path = Path("notebooks/made.txt")
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(lines)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-g", "bugdet=1,2"], "no parameter 'bugdet'; did you mean 'budget'"),
        (["-g", "budget=1,many"], "'budget' (slots per layer and KV head) must be int, got 'many'"),
        (["-g", "policy=epikv,vase-atnv"], "unknown policy 'vase-atnv'; did you mean 'vase-attnv'"),
        (["-p", "others=all, random"], "unknown policy 'all'"),
        (["-p", "others=random, rndom"], "unknown policy 'rndom'; did you mean 'random'"),
        (["-p", "polici=epikv"], "did you mean 'policy'"),
        (["-p", "budget"], "write key=value"),
        (["-g", "seed=3..1"], "write 1..3"),
        (["-g", "seed=1,,2"], "one of its values is empty"),
        (["-g", "seed=1,01"], "the grid has 01_tiny seed=1 twice"),
        (["-g", "seed=1", "-g", "seed=2"], "'seed' is given twice"),
        (["-g", "seed=1", "-p", "seed=2"], "cannot be a setting of every run and vary"),
        (["--profile", "demon"], "did you mean 'demo'"),
        (["--executor", "slurmy"], "did you mean 'slurm'"),
        (["--option", "wrkers=2"], "has no option 'wrkers'; did you mean 'workers'"),
        (["--option", "workers=few"], "must be int"),
        (["--workers", "0"], "workers must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(project, arguments, message):
    workers = [] if {"--workers", "--option"} & set(arguments) else ["--workers", "1"]
    result = CliRunner().invoke(app, ["sweep", "01_tiny", *workers, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (project / "runs").exists()


def test_a_dry_run_prints_plan_and_estimate_and_starts_nothing(project):
    grid = ["-g", "policy=full,epikv", "-g", "seed=0..2", "--profile", "demo", "--dry-run"]
    told = start(*grid).stdout
    assert told.count("01_tiny policy=") == 6
    assert "6 runs in 'runs/x': 0 done, 6 to make" in told
    assert "no run of 01_tiny has finished yet with this profile" in told
    assert not (project / "runs").exists()

    (done,) = sweeps.plan_sweep(["01_tiny"], {}, out="runs/before").planned.values()
    done.folder.mkdir(parents=True)
    Manifest(**{**vars(done), "status": "done", "seconds": 90.0}).save()
    assert "about 9 min on 1 workers" in start(*grid).stdout


def test_failures_and_kills_cost_only_their_own_run(project):
    """Seed 1 raises, seed 2 kills its worker; what is made again is what has to be."""
    misbehave = """\
import os, pathlib, signal
if not pathlib.Path("mended").exists() and seed == 1:
    raise ValueError("64 slots are too few")
if not pathlib.Path("mended").exists() and seed == 2:
    os.kill(os.getppid(), signal.SIGKILL)
"""
    write_notebook(Path("notebooks/01_tiny.ipynb"), misbehave, NOTE, parameters=PARAMETERS)
    first = start("-g", "seed=0..3")
    assert first.exit_code == 1
    assert made() == ["full 128 0", "full 128 3"]
    assert "01_tiny seed=1: failed" in first.stdout and "ValueError in cell [3]: 64 slots are too few" in first.stdout
    assert "01_tiny seed=2: stopped" in first.stdout and "worker process ended with exit code -9" in first.stdout
    assert "0 reused; 2 done, 1 failed, 1 stopped" in first.stdout
    cells = sweeps.status("runs/x").set_index("seed")
    assert cells["status"].to_dict() == {0: "done", 1: "failed", 2: "stopped", 3: "done"}
    assert "64 slots" in Path("runs/x", cells.loc[1, "run"], "traceback.txt").read_text()

    Path("notebooks/mended").touch()
    again = start("-g", "seed=0..3")
    assert (again.exit_code, made()) == (1, ["full 128 2"])
    assert "2 done, 1 to make, 1 failed before (--retry-failed" in again.stdout
    retried = start("-g", "seed=0..3", "--retry-failed")
    assert (retried.exit_code, made()) == (0, ["full 128 1"])
    assert start("-g", "seed=0..3").stdout.startswith("4 runs in 'runs/x': 4 done, 0 to make\n\n4 reused; 4 done")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_killed_launcher_loses_only_what_was_running(project, how, code):
    hang = """\
import os, pathlib, time
pathlib.Path("worker").write_text(f"{os.getppid()} {os.getpid()} in {seed}")
time.sleep(0 if seed == 0 or pathlib.Path("go").exists() else 600)
"""
    write_notebook(Path("notebooks/01_tiny.ipynb"), hang, NOTE, parameters=PARAMETERS)
    launcher = subprocess.Popen([*COMMAND, "--workers", "1", "-g", "seed=0..1"], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (project / "runs" / "x" / "sweep.json").exists())
        wait_for(lambda: sweeps.status("runs/x")["status"].tolist() == ["done", "running"])
        wait_for(lambda: Path("notebooks/worker").read_text().endswith("in 1"))
        worker, kernel, *_ = Path("notebooks/worker").read_text().split()
        launcher.send_signal(how)
        assert launcher.wait(120) == code
    finally:
        launcher.kill()
        _, told = launcher.communicate()
    assert how != signal.SIGINT or "the same command goes on" in told
    wait_for(lambda: not any(map(is_alive, (worker, kernel))))
    assert sweeps.status("runs/x")["status"].tolist() == ["done", "stopped"]

    made()
    Path("notebooks/go").touch()
    assert start("-g", "seed=0..1").exit_code == 0
    assert made() == ["full 128 1"]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_launchers_share_a_sweep(project):
    """Each run is made once, and both come back with all of them."""
    sweep = sweeps.plan_sweep(["01_tiny"], parse_grid(["seed=0..3"]), out="runs/x")
    found = []

    def launch():
        found.append(sweeps.run_sweep(sweep, LocalExecutor(workers=1), say=lambda _: None))

    launchers = [threading.Thread(target=launch) for _ in range(2)]
    for each in launchers:
        each.start()
    for each in launchers:
        each.join()
    assert made() == [f"full 128 {seed}" for seed in range(4)]
    for runs in found:
        assert [(run.seed, run.status) for run in runs] == [(seed, "done") for seed in range(4)]
    assert sum(run.reused for runs in found for run in runs) == 4


def test_a_run_is_running_as_long_as_its_lock_is_held(project):
    sweep = sweeps.plan_sweep(["01_tiny"], {"seed": [0]}, out="runs/x")
    sweep.save()
    (run,) = sweep.planned.values()
    assert sweeps.status("runs/x")["status"].tolist() == ["planned"]
    with claim(Job(run)) as ours:
        assert ours
        run.folder.mkdir()
        Manifest(**{**vars(run), "status": "running"}).save()
        assert sweeps.status("runs/x")["status"].tolist() == ["running"]
        with claim(Job(run)) as twice:
            assert not twice
    assert sweeps.status("runs/x")["status"].tolist() == ["stopped"]


def test_a_sweep_may_grow_but_not_change(project):
    plan = sweeps.plan_sweep
    plan(["01_tiny"], {"seed": [0, 1]}, out="runs/x", settings={"budget": "8"}).save()
    plan(["01_tiny"], {"seed": [1, 2]}, out="runs/x", settings={"budget": "8"}).save()
    assert [cell.place["seed"] for cell in sweeps.Sweep.load("runs/x").cells.values()] == [0, 1, 2]
    for other in ({"settings": {"budget": "9"}}, {"settings": {"budget": "8"}, "profile": "demo"}):
        with pytest.raises(sweeps.SweepFolderError, match="choose another folder"):
            plan(["01_tiny"], {"seed": [0]}, out="runs/x", **other).save()
    with pytest.raises(sweeps.SweepFolderError, match="grid parameters"):
        plan(["01_tiny"], {"policy": ["full"]}, out="runs/x", settings={"budget": "8"}).save()


def test_runs_of_another_version_are_made_again_unless_kept(project):
    sweep = sweeps.plan_sweep(["01_tiny"], {"seed": [0]}, out="runs/x")
    (run,) = sweep.planned.values()
    run.folder.mkdir(parents=True)
    Manifest(**{**vars(run), "source_sha256": "older", "status": "done", "finished": "2026", "seconds": 1.0}).save()
    assert "1 finished runs are of another version of the code (--keep" in start("-g", "seed=0", "--dry-run").stdout
    assert "1 done, 0 to make" in start("-g", "seed=0", "--keep", "--dry-run").stdout


def test_a_file_that_may_not_grow_is_a_clear_error(project):
    """A real limit of the system in place of a full disk: the page of an executed notebook is larger than 100 kB."""
    done = subprocess.run(
        [*COMMAND, "--workers", "1"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 1
    assert "cannot write into" in done.stdout and "File too large" in done.stdout and "raise the limit" in done.stdout
    (run,) = Path("runs/x").glob("01_tiny-*/manifest.json")
    assert json.loads(run.read_text())["error"]["type"] == "OSError"


def test_a_folder_that_cannot_be_made_is_a_clear_error(project):
    Path("runs").write_text("a file")
    result = start("-g", "seed=0..1")
    assert result.exit_code == 2
    assert "cannot write into 'runs/x'" in result.stderr and "choose a folder that can be written to" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_a_clear_error(project):
    Path("runs").mkdir(mode=0o500)
    result = start("-g", "seed=0..1")
    assert result.exit_code == 2
    assert "cannot write into 'runs/x': Permission denied; choose a folder" in result.stderr


def test_one_run_takes_texts_and_a_profile(project):
    result = CliRunner().invoke(app, ["run", "01_tiny", "-p", "seed=3", "--profile", "demo"])
    assert result.exit_code == 0
    assert made() == ["full 64 3"]
    assert "full at 64, seed 3" in result.stdout
    assert Manifest.load("runs/01_tiny").seed == 3
    assert CliRunner().invoke(app, ["run", "01_tiny", "-p", "sed=3"]).exit_code == 2


def test_values_of_a_grid_are_checked_as_python_objects_too(project):
    with pytest.raises(ParameterError, match="must be int"):
        sweeps.plan_sweep(["01_tiny"], {"budget": [1.5]}, out="runs/x")
