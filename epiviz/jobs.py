"""Jobs: single runs of a sweep, claimed by a lock so that several launchers may share one folder.

A run is being made as long as somebody holds its lock. Locks die with their process, so what a killed worker or
launcher leaves behind is told from what is still going on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from epiviz.failures import cannot_write, without_traceback
from epiviz.manifest import MANIFEST, Manifest, source_hash, versions
from epiviz.runs import now, run_planned

LOCKS = ".locks"
PATIENCE = 0.5  # seconds: a look at whether a lock is free takes it for an instant


@dataclass(frozen=True)
class Job:
    """One run of a sweep, as it is handed to an executor.

    Attributes
    ----------
    run : Manifest
        The planned run.
    retry_since : str
        Failed runs that finished later than this stand; the empty text: all failed runs do.
    keep : bool
        Runs stand that another version of the code made.
    cell_timeout : int, optional
        Seconds that one cell may take.
    wait : bool
        If another launcher is at it, wait for what becomes of it.
    """

    run: Manifest
    retry_since: str = ""
    keep: bool = False
    cell_timeout: int | None = None
    wait: bool = False

    @property
    def name(self) -> str:
        return self.run.folder.name

    @property
    def lock(self) -> Path:
        return self.run.folder.parent / LOCKS / f"{self.name}.lock"


def perform(job: Job) -> Manifest | None:
    """Make a run, unless one stands by now; return None if another launcher is at it and the job does not wait.

    What goes wrong is in the manifest that is returned, also where it cannot be written.
    """
    try:
        with claim(job) as ours:
            return (settled(job) or _make(job)) if ours else None
    except OSError as error:
        return replace(
            job.run,
            status="failed",
            finished=now(),
            error=without_traceback(type(error).__name__, cannot_write(error, job.run.folder)),
        )


@contextmanager
def claim(job: Job) -> Iterator[bool]:
    """Hold a run's lock, and tell whether it could be had."""
    job.lock.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(job.lock)
    try:
        lock.acquire(timeout=-1 if job.wait else PATIENCE)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_claimed(lock: Path) -> bool:
    """Tell whether somebody is making a run."""
    if not lock.is_file():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def settled(job: Job) -> Manifest | None:
    """Return the run that stands for a job: unchanged, and finished, or failed and not to be tried again."""
    if not (job.run.folder / MANIFEST).is_file():
        return None
    found = Manifest.load(job.run.folder)
    unchanged = found.asked == job.run.asked if job.keep else found.key == job.run.key
    done = found.status == "done" and found.whole
    failed = found.status == "failed" and found.finished > job.retry_since
    return replace(found, reused=True) if unchanged and (done or failed) else None


def lost(job: Job, why: str) -> Manifest:
    """Record that the process which made a run is gone; what it finished before stands."""
    found = Manifest.load(job.run.folder) if (job.run.folder / MANIFEST).is_file() else job.run
    if found.key == job.run.key and found.status in ("done", "failed"):
        return found
    stopped = replace(found, status="stopped", finished=now(), error=without_traceback("Stopped", why))
    if found.status == "running" and not is_claimed(job.lock):  # it may be another launcher's
        stopped.save()
    return stopped


def _make(job: Job) -> Manifest:
    """Make a run where its code is the code that was planned with."""
    here = replace(job.run, source_sha256=source_hash(), versions=versions())
    if here.key == job.run.key:
        return run_planned(job.run, job.cell_timeout, quiet=True)
    packages = [
        f"{name} {here.versions[name]} instead of {planned}"
        for name, planned in job.run.versions.items()
        if here.versions[name] != planned
    ]
    what = ", ".join(packages) or "other source files of epiviz"
    why = f"this worker has {what}: the code changed since the sweep began, or differs between machines"
    return replace(job.run, status="stopped", finished=now(), error=without_traceback("VersionError", why))
