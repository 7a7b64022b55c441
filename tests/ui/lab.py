"""A JupyterLab of the tests' own, and a notebook that is open in it."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary
from playwright.sync_api import Browser, Locator, Page

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
SLOW = 300_000  # ms: the first import of torch in a kernel, or a model
SOON = 60_000


@dataclass(frozen=True)
class Lab:
    """A running server: where it answers, the folder it shows, and where it remembers which notebooks are trusted."""

    address: str
    folder: Path
    data: Path

    def write(self, name: str, notebook: nbformat.NotebookNode, trusted: bool = False) -> str:
        """Put a notebook into the folder; return its name."""
        nbformat.write(notebook, self.folder / name)
        if trusted:
            notary = NotebookNotary(data_dir=str(self.data))
            notary.sign(nbformat.read(self.folder / name, as_version=4))
            notary.store.close()
        return name


@contextmanager
def jupyterlab(root: Path):
    """Serve a JupyterLab on a free loopback port, with settings of its own."""
    folder, settings, log = root / "work", root / "settings", root / "lab.log"
    quiet = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    folder.mkdir()
    private = {f"JUPYTER_{name}_DIR": str(root / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    private |= {"JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces")}
    port = free_port()
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    command += ["--IdentityProvider.token="]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | private)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(address, server, log)
        yield Lab(address, folder, root / "data")
    finally:
        server.terminate()
        server.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(address: str, server: subprocess.Popen, log: Path, seconds: float = 180) -> None:
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


def notebook_of(*sources: str) -> nbformat.NotebookNode:
    """Return a notebook of code cells."""
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata=dict(KERNEL))


class Notebook:
    """A notebook in a tab of its own; code cells have the numbers that they have in the file."""

    def __init__(self, browser: Browser, lab: Lab, name: str) -> None:
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.goto(f"{lab.address}/lab/tree/{name}?reset", wait_until="domcontentloaded")
        self.cells = self.page.locator(".jp-Notebook .jp-CodeCell")
        self.cells.first.wait_for(timeout=SLOW)
        # the indicator above the notebook says idle before there is a kernel, and then a run asks which one to start
        self.page.locator("#jp-bottom-panel", has_text="| Idle").wait_for(timeout=SLOW)

    def run(self, index: int) -> None:
        self.cells.nth(index).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Shift+Enter")

    def run_all(self) -> None:
        self.page.locator(".lm-MenuBar-item", has_text="Run").click()
        self.page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()

    def printed(self, index: int, text: str = "") -> str:
        """Wait until a cell has printed a text; return all that it has printed."""
        output = self.cells.nth(index).locator(".jp-OutputArea-output pre", has_text=text)
        output.first.wait_for(timeout=SOON)
        return output.first.text_content()

    def settled(self) -> None:
        """Wait until the spans out of view have followed, too."""
        self.page.wait_for_selector("[data-behind]", state="detached")

    def struck(self, view: Locator) -> list[int]:
        """Return which tokens a view with one text shows as struck."""
        self.settled()
        spans = "(root) => Array.from(root.querySelectorAll('.block > span'), (span) => span.classList.contains('x'))"
        return [token for token, struck in enumerate(view.evaluate(spans)) if struck]

    @contextmanager
    def drag(self, slider: Locator, start: float, end: float):
        """Drag a slider between two shares of its length; inside the block the button is still down."""
        slider.scroll_into_view_if_needed()
        box = slider.bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + end * box["width"], y, steps=8)
        yield
        self.page.mouse.up()

    def close(self) -> None:
        self.page.close()
