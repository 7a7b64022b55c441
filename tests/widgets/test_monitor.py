"""The monitor of a sweep shows what lies in its folder, and follows it."""

import time

import pytest

import epiviz as ev
from epiviz.failures import without_traceback
from epiviz.jobs import Job, claim
from epiviz.manifest import Manifest
from epiviz.sweeps import Cell, Sweep


@pytest.fixture
def sweep(tmp_path):
    cells = {f"01_tiny-{seed}": Cell("01_tiny.ipynb", {"seed": seed}) for seed in range(4)}
    sweep = Sweep(tmp_path / "mine", None, {}, cells)
    sweep.save()
    return sweep


def record(sweep, seed, status, **more):
    folder = sweep.folder / f"01_tiny-{seed}"
    folder.mkdir(exist_ok=True)
    hashes = {"notebook_sha256": "n", "parameters_sha256": "p", "source_sha256": "s"}
    run = Manifest("01_tiny.ipynb", folder, {}, versions={}, status=status, seconds=3.0, **hashes, **more)
    run.save()
    return run


def test_the_monitor_counts_and_names_what_failed(sweep):
    record(sweep, 0, "done")
    record(sweep, 1, "failed", error=without_traceback("ValueError", "<b>64 slots</b>\u202e"))
    running = record(sweep, 2, "running")
    with claim(Job(running)):
        monitor = ev.sweep_monitor(sweep.folder, every=60)
        monitor.stop()
    assert monitor.summary() == "mine: 4 runs, 1 done, 1 failed, 1 running, 1 planned, about 3 s for those that wait"
    bar, text = monitor.children
    assert (bar.value, bar.max, bar.bar_style) == (2, 4, "danger")
    assert "ValueError: &lt;b&gt;64 slots&lt;/b&gt;⟨U+202E⟩" in text.value
    data, _ = monitor._repr_mimebundle_()
    assert "4 runs" in data["text/html"] and data["text/plain"].startswith("SweepMonitor(mine: 4 runs")
    assert "application/vnd.jupyter.widget-view+json" in data


def test_the_monitor_follows_until_all_have_ended(sweep):
    monitor = ev.sweep_monitor(sweep.folder, every=0.02)
    assert monitor.children[0].value == 0
    for seed in range(4):
        record(sweep, seed, "done")
    end = time.monotonic() + 30
    bar, text = monitor.children
    while (bar.value, bar.bar_style) != (4, "success") or "4 done" not in text.value:  # a thread sets one by one
        assert time.monotonic() < end
        time.sleep(0.02)
    assert monitor.summary() == "mine: 4 runs, 4 done"


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no sweep"):
        ev.sweep_monitor(tmp_path)
