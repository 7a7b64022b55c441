"""The reader in a real JupyterLab with a real kernel."""

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
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in (SHOW, READ, SET, READ)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / "reader.ipynb")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/lab/tree/reader.ipynb", wait_until="domcontentloaded")
    cell = page.locator(".jp-Notebook .jp-CodeCell")
    cell.nth(3).wait_for(timeout=60_000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=60_000)

    def run(index):
        cell.nth(index).locator(".jp-InputArea-editor").click()
        page.keyboard.press("Shift+Enter")

    run(0)
    reader = page.locator(".epi-reader")
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
    assert cell.count() == 4
    run(3)
    cell.nth(3).locator(".jp-OutputArea-output pre").wait_for(timeout=20_000)
    assert "read back 7 493" in cell.nth(3).locator(".jp-OutputArea-output pre").text_content()
    page.close()
