"""Runs: notebooks executed by papermill, each in a folder whose manifest says what made it.

A run's folder holds ``executed.ipynb``, ``executed.html`` (readable without a network), ``manifest.json``, whatever the
notebook recorded with :func:`epiviz.save_results`, and ``traceback.txt`` if it failed. A finished run whose notebook,
parameters, package source and versions are unchanged is reused.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import papermill
import zmq
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm
from traitlets.config import Config

from epiviz import devices
from epiviz.choices import nearest
from epiviz.export import write_page
from epiviz.failures import cell_error, other_error
from epiviz.manifest import MANIFEST, Manifest, commit, file_hash, notebook_hash, parameters_hash, source_hash, versions
from epiviz.parameters import ParameterError, check_parameters, defaults, profile_parameters
from epiviz.results import read_finding

EXECUTED = "executed.ipynb"
PAGE = "executed.html"
BUNDLED_MODEL = "smollm2-135m"

# where zmq can, kernels encrypt what they send; otherwise each of them logs a warning
_KERNELS = Config({"KernelManager": {"transport_encryption": "auto" if zmq.has("curve") else "disabled"}})

Say = Callable[[str], None]
say_aloud: Say = partial(print, flush=True)


def find_notebooks(names: Iterable[str | os.PathLike] = (), folder: str | os.PathLike = "notebooks") -> list[Path]:
    """Return the notebooks to run, in order: those named (by path or by stem), or all of ``folder``."""
    folder = Path(folder)
    here = sorted(folder.glob("[0-9a]*.ipynb"))
    if not names:
        if not here:
            raise FileNotFoundError(
                f"no notebooks in {str(folder)!r}; run this in the project's root, or name the notebooks"
            )
        return here
    by_stem = {path.stem: path for path in here}
    found = []
    for name in names:
        path = Path(name)
        if path.suffix != ".ipynb" or not path.is_file():
            if str(name) not in by_stem:
                raise FileNotFoundError(f"there is no notebook {str(name)!r}; {nearest(path.stem, by_stem)}")
            path = by_stem[str(name)]
        found.append(path)
    return found


def plan(notebook: str | os.PathLike, parameters: Mapping[str, Any], out_dir: str | os.PathLike) -> Manifest:
    """Check the parameters and describe the run that they would make, without starting it."""
    if "out_dir" in parameters:
        raise ParameterError("out_dir is where the run lies, not one of its parameters; pass it as out_dir=")
    folder = Path(out_dir).resolve()
    complete = defaults(notebook) | check_parameters(notebook, parameters)
    if "out_dir" in complete:
        # relative to the notebook, its working directory, so that the executed copy shows no path of this machine
        complete["out_dir"] = os.path.relpath(folder, Path(notebook).resolve().parent)
    return Manifest(
        notebook=str(notebook),
        folder=folder,
        parameters=complete,
        notebook_sha256=notebook_hash(notebook),
        parameters_sha256=parameters_hash(complete),
        source_sha256=source_hash(),
        versions=versions(),
        commit=commit(),
        seed=complete.get("seed"),
    )


def previous_run(planned: Manifest) -> Manifest | None:
    """Return the finished run in the planned folder if it was made from exactly the same things, else None."""
    if not (planned.folder / MANIFEST).is_file():
        return None
    found = Manifest.load(planned.folder)
    unchanged = found.status == "done" and found.key == planned.key
    return replace(found, reused=True) if unchanged and found.whole else None


def execute(
    notebook: str | os.PathLike,
    parameters: Mapping[str, Any],
    out_dir: str | os.PathLike,
    *,
    force: bool = False,
    cell_timeout: int | None = None,
) -> Manifest:
    """Run one notebook with papermill, or return its finished run if nothing changed.

    Parameters
    ----------
    notebook : str or path
        Its working directory is its own folder, as in JupyterLab.
    parameters : mapping
        Values for names of the notebook's parameters cell; see :func:`check_parameters`.
    out_dir : str or path
        The run's folder, also given to the notebook as ``out_dir`` if it has such a parameter. Files of an earlier run
        in it are removed first.
    force : bool
        Run even if a finished run could be reused.
    cell_timeout : int, optional
        Seconds that one cell may take.

    Returns
    -------
    Manifest
        With status "failed" if a cell raised, timed out or lost its kernel twice: the manifest and ``traceback.txt``
        say where. Wrong parameters raise before anything starts.
    """
    planned = plan(notebook, parameters, out_dir)
    return (None if force else previous_run(planned)) or run_planned(planned, cell_timeout)


def study(
    notebooks: Iterable[str | os.PathLike] = (),
    *,
    profile: str = "demo",
    out: str | os.PathLike = "runs/study",
    force: bool = False,
    say: Say = say_aloud,
) -> list[Manifest]:
    """Run notebooks one after the other with the parameters of a profile.

    Everything is checked before anything starts; a notebook that fails does not stop the others.

    Parameters
    ----------
    notebooks : paths or stems
        Default: all of ``notebooks/``, in order.
    profile : str
        Name of a file in ``profiles/`` beside the notebooks.
    out : str or path
        Each run goes to ``<out>/<notebook stem>``.
    force : bool
        Run again what is finished.
    say : callable
        Receives each line of progress.
    """
    planned = [
        plan(notebook, profile_parameters(notebook, profile), Path(out) / notebook.stem)
        for notebook in find_notebooks(notebooks)
    ]
    stems = [run.stem for run in planned]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise ParameterError(f"notebooks share a name and would share a folder: {', '.join(twice)}")
    for run in planned:
        check_folder(run.folder)
    finished = {} if force else {run.stem: run for run in map(previous_run, planned) if run}
    if any(run.parameters.get("model") == BUNDLED_MODEL for run in planned if run.stem not in finished):
        fetch_bundled_model(say)

    runs = []
    for number, run in enumerate(planned, start=1):
        label = f"[{number}/{len(planned)}] {run.stem}"
        if run.stem in finished:
            run = finished[run.stem]
            say(f"{label}: reused, {run.seconds:.1f} s at {run.finished}")
        else:
            say(f"{label}: started")
            run = run_planned(run)
            say(f"{label}: {run.status} in {run.seconds:.1f} s")
        runs.append(run)
    return runs


def summary(runs: Iterable[Manifest]) -> str:
    """Return a table for a terminal: notebook, status, seconds, finding, and where to look."""
    runs = list(runs)
    name_width = max(len(name) for name in ["notebook", *(run.stem for run in runs)])
    head = f"{'notebook':<{name_width}}  {'status':<7} {'seconds':>8}  finding"
    indent = " " * head.index("finding")
    width = max(shutil.get_terminal_size((120, 24)).columns, len(indent) + 40)
    # a path stays in one piece, so that it can be copied
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    lines = [head]
    for run in runs:
        status = "reused" if run.reused else run.status
        row = f"{run.stem:<{name_width}}  {status:<7} {run.seconds:>8.1f}  "
        lines += wrap(outcome(run), initial_indent=row, subsequent_indent=indent) or [row.rstrip()]
    lines += ["", "executed notebooks and pages:"]
    lines += [f"  {_short(run.folder / name)}" for run in runs for name in (EXECUTED, PAGE) if name in run.outputs]
    return "\n".join(lines)


def run_planned(planned: Manifest, cell_timeout: int | None = None, quiet: bool = False) -> Manifest:
    """Run what :func:`plan` describes, whatever is there; ``quiet`` leaves it to the caller to show progress."""
    clear(planned.folder)
    planned.folder.mkdir(parents=True, exist_ok=True)
    running = replace(planned, status="running", started=now(), host=socket.gethostname(), device=devices.describe())
    running.save()
    start = time.monotonic()
    status, error = "stopped", None
    try:
        try:
            _papermill(running, cell_timeout, quiet)
        finally:
            if (planned.folder / EXECUTED).is_file():
                write_page(planned.folder / EXECUTED, planned.folder / PAGE, title=planned.stem)
        status = "done"
    except PapermillExecutionError as failure:
        status, error = "failed", cell_error(failure, planned.folder)
    except Exception as failure:  # a dead kernel, a cell timeout: the study goes on and its table tells
        status, error = "failed", other_error(failure, planned.folder)
    finally:  # Ctrl-C passes here as well, with "stopped"
        done = replace(
            running,
            status=status,
            error=error,
            finished=now(),
            seconds=round(time.monotonic() - start, 3),
            finding=read_finding(planned.folder),
            outputs={
                path.relative_to(planned.folder).as_posix(): file_hash(path)
                for path in sorted(planned.folder.rglob("*"))
                if path.is_file() and path.name != MANIFEST
            },
        )
        done.save()
    return done


def _papermill(run: Manifest, cell_timeout: int | None, quiet: bool) -> None:
    notebook = Path(run.notebook).resolve()
    for last_try in (False, True):
        try:
            with _kernel_environment(), nullcontext() if quiet else _signs_of_life(run.stem):
                papermill.execute_notebook(
                    notebook,
                    run.folder / EXECUTED,
                    parameters=run.parameters,
                    kernel_name="python3",
                    language="python",
                    cwd=notebook.parent,
                    progress_bar=False if quiet else _progress_bar(run.stem),
                    execution_timeout=cell_timeout,
                    config=_KERNELS,
                )
            return
        except RuntimeError as error:
            # starting kernels can lose a race for a port, which shows as a kernel that died
            if last_try or "died" not in str(error):
                raise


@contextmanager
def _kernel_environment() -> Iterator[None]:
    """Set what a kernel must inherit; papermill offers no way to pass it."""
    wanted = {
        "JUPYTER_PREFER_ENV_PATH": "1",  # this interpreter's kernel, not one that the user installed elsewhere
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures are shown, whatever the caller draws with
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "EPIVIZ_PROGRESS": "off",  # bars freeze in an executed notebook; the run itself says that it is alive
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Lines:
    """A file for tqdm that writes whole lines, for logs: no carriage returns."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip("\r\n").rstrip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def _signs_of_life(stem: str, every: float = 20.0) -> Iterator[None]:
    """Say now and then that a notebook still runs: papermill's bar moves with cells, and one cell may take minutes."""
    over = threading.Event()
    start = time.monotonic()

    def say() -> None:
        while not over.wait(every):
            tqdm.write(f"  {stem}: still running after {time.monotonic() - start:.0f} s", file=sys.stderr)

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def _progress_bar(stem: str) -> dict[str, Any]:
    if sys.stderr.isatty():
        return {"desc": stem, "leave": False}
    bar = "  {desc}: cell {n_fmt} of {total_fmt}, {elapsed}"
    return {"desc": stem, "file": _Lines(), "bar_format": bar, "mininterval": 5, "miniters": 1}


def outcome(run: Manifest) -> str:
    """Return what a run found, or why it did not: one line."""
    if run.error is None:
        return run.finding or ""
    where = f" in cell [{run.error['cell']}]" if run.error["cell"] is not None else ""
    message = (run.error["message"].splitlines() or [""])[0]
    see = f" (see {_short(run.folder / run.error['traceback'])})" if run.error["traceback"] else ""
    return f"{run.error['type']}{where}: {message}{see}"


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def clear(folder: Path) -> None:
    """Remove the files of an earlier run, so that a failing one does not stand beside its results."""
    check_folder(folder)
    if (folder / MANIFEST).is_file():
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds files and is no run's: the next run in it would remove them.

    Raises
    ------
    FileExistsError
        There are such files; the message names one.
    """
    if (folder / MANIFEST).is_file():
        Manifest.load(folder)  # refuses a manifest that is not a run's
    elif folder.is_dir() and (there := [path.name for path in folder.iterdir() if path.name[0] != "."]):
        raise FileExistsError(
            f"{str(folder)!r} holds {min(there)!r} and is no run's folder; choose another folder, or empty it"
        )


def fetch_bundled_model(say: Say) -> None:
    """Fetch and convert the bundled model before many kernels do so at once."""
    # torch and transformers take seconds to import, which a study that only reuses runs need not pay
    from epiviz.models import load

    say(f"{BUNDLED_MODEL}: loading; the first time it is fetched and converted")
    start = time.monotonic()
    load(BUNDLED_MODEL)
    say(f"{BUNDLED_MODEL}: ready after {time.monotonic() - start:.1f} s")


def now() -> str:
    """Return the time as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
