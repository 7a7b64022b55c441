"""The views in a real JupyterLab with a real kernel."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

SYNTHETIC = Path(__file__).parents[1] / "widgets"
REPOSITORY = Path(__file__).parents[2]
SHOW = f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(SYNTHETIC)!r}]
from synthetic import make_replay, make_trace
from epiviz.widgets import TraceReader

trace = make_trace()
seen = []
reader = TraceReader(trace, budget=250)
reader.observe(lambda change: seen.append(change.new), "budget")
reader
"""
READ = "print('read back', reader.budget, reader.counts()['struck'], len(seen))"
SET = "reader.budget = 7"
BENCH = """
import time
from epiviz.widgets import Workbench

def compute(method, budget, watch):
    for seen in range(0, 500, 5):
        watch(seen)
        time.sleep(0.2 if budget == 90 else 0)
    return make_replay(trace, method, budget)

bench = Workbench(trace, [make_replay(trace, "a", 60), make_replay(trace, "b", 60)], compute=compute)
bench
"""
BUSY = "print('while computing', bench.budget)"
TOLD = "print('told', bench.budget, bench.step, bench.selected, bench.counts()['struck'], bench.data.budgets('a'))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(address: str, server: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"jupyter lab ended at once:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{address}/api", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    raise TimeoutError(f"jupyter lab did not answer within {seconds} s:\n{log.read_text()}")


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab on a free loopback port, with settings of its own; yields (address, folder)."""
    folder, settings, log = tmp_path / "work", tmp_path / "settings", tmp_path / "lab.log"
    quiet = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    folder.mkdir()
    private = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    private |= {"JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    port = free_port()
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    command += ["--IdentityProvider.token="]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | private)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(address, server, log)
        yield address, folder
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_dragging_in_jupyterlab_reaches_python(lab, browser):
    address, folder = lab
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in (SHOW, READ, SET, READ, BENCH, BUSY, TOLD)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / "reader.ipynb")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/lab/tree/reader.ipynb", wait_until="domcontentloaded")
    cell = page.locator(".jp-Notebook .jp-CodeCell")
    cell.nth(6).wait_for(timeout=60_000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=60_000)

    def run(index):
        cell.nth(index).locator(".jp-InputArea-editor").click()
        page.keyboard.press("Shift+Enter")

    run(0)
    reader = page.locator(".epi-reader:not(.epi-workbench)")
    reader.wait_for(timeout=180_000)  # the first import of torch may take its time
    struck = reader.locator(".text .x")

    def settled():  # blocks out of view are brought up to date when there is time
        page.wait_for_selector("[data-behind]", state="detached")

    reader.locator(".counts", has_text="250 struck").wait_for(timeout=20_000)
    settled()
    assert struck.count() == 250

    reader.scroll_into_view_if_needed()
    box = reader.get_by_label("budget", exact=True).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.88 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], y, steps=8)
    reader.locator(".counts", has_not_text="250 struck").wait_for(timeout=20_000)
    settled()
    during = struck.count()
    assert during != 250
    page.mouse.up()

    run(1)
    output = cell.nth(1).locator(".jp-OutputArea-output pre")
    output.wait_for(timeout=20_000)
    budget, counted, changes = map(int, output.text_content().split()[2:])
    assert counted == during == 500 - budget
    assert changes == 1  # one message per release, none while dragging

    run(2)
    reader.locator(".counts", has_text="7 kept, 493 struck").wait_for(timeout=20_000)

    # letters typed into the text are the reader's, not JupyterLab's command mode
    reader.locator(".block > span").nth(20).click()
    for key in ("Escape", "e", "d", "d", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
        page.wait_for_timeout(50)
    assert cell.count() == 7
    run(3)
    cell.nth(3).locator(".jp-OutputArea-output pre").wait_for(timeout=20_000)
    assert "read back 7 493" in cell.nth(3).locator(".jp-OutputArea-output pre").text_content()

    # a budget that was not computed: the kernel works in the background, and Stop goes back
    run(4)
    bench = page.locator(".epi-workbench")
    bench.wait_for(timeout=20_000)
    bench.scroll_into_view_if_needed()
    box = bench.get_by_label("budget in slots")
    box.fill("90")
    box.press("Enter")
    bench.locator(".counts", has_text="computing a at 90 slots").wait_for(timeout=20_000)
    page.wait_for_function("document.querySelector('.epi-workbench progress').value > 0.02", timeout=20_000)
    run(5)  # the kernel is free for other cells meanwhile
    cell.nth(5).locator(".jp-OutputArea-output pre", has_text="while computing 90").wait_for(timeout=20_000)
    bench.get_by_role("button", name="Stop").click()
    bench.locator(".counts", has_text="budget 60").wait_for(timeout=20_000)
    box.fill("75")
    box.press("Enter")
    bench.locator(".counts", has_text="budget 75, step 500").wait_for(timeout=20_000)

    plot = bench.locator(".timeline .plot")
    plot.scroll_into_view_if_needed()
    plot.click(position={"x": plot.bounding_box()["width"] * 0.3, "y": plot.bounding_box()["height"] * 0.6})
    settled()
    run(6)
    told = cell.nth(6).locator(".jp-OutputArea-output pre")
    told.wait_for(timeout=20_000)
    budget, step, selected, counted, *budgets = told.text_content().replace("[", "").replace("]", "").split()[1:]
    assert (budget, budgets) == ("75", ["60,", "75"])
    assert 250 < int(step) < 350 and 140 < int(selected) < 160
    assert int(counted) == bench.locator(".text .x").count()
    page.close()
