"""Local runs: one worker process per core or per GPU, each with a share of the cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from epiviz import devices
from epiviz.jobs import Job, lost, perform
from epiviz.manifest import Manifest
from epiviz.parameters import at_least_one

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class LocalExecutor:
    """Worker processes on this machine.

    Attributes
    ----------
    workers : int, optional
        Runs at a time. Default: one per visible GPU, or one per core.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "workers")

    def width(self) -> int:
        return self.workers or len(devices.visible_gpus()) or devices.cores()

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Manifest | None]]:
        """Make runs; a worker that is killed loses its run and is replaced."""
        waiting = deque(jobs)
        idle = [_Worker(environment) for environment in self.environments(min(self.width(), len(jobs)))]
        busy: dict[Connection, _Worker] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    worker = idle.pop()
                    worker.start(waiting.popleft())
                    busy[worker.pipe] = worker
                for pipe in wait(list(busy)):
                    worker = busy.pop(pipe)
                    job, run = worker.finish()
                    idle.append(worker if worker.process.is_alive() else _Worker(worker.environment))
                    yield job, run
        finally:
            for worker in [*idle, *busy.values()]:
                worker.kill()
            for worker in busy.values():
                lost(worker.job, "the sweep was interrupted")

    def environments(self, workers: int) -> list[dict[str, str]]:
        """Return what each worker sets: its GPU, and as many threads as keep workers from waiting for each other."""
        share = str(max(1, devices.cores() // max(1, workers)))
        gpus = devices.visible_gpus()
        threads = {} if THREADS in os.environ else {THREADS: share}
        return [threads | ({devices.VISIBLE: gpus[i % len(gpus)]} if gpus else {}) for i in range(workers)]


class _Worker:
    """A process that makes one run after another, each in a kernel of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.job: Job | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
        self.process.start()
        theirs.close()  # so that reading fails once the process is gone

    def start(self, job: Job) -> None:
        self.job = job
        self.pipe.send(job)

    def finish(self) -> tuple[Job, Manifest | None]:
        try:
            return self.job, self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return self.job, lost(self.job, f"its worker process ended with exit code {self.process.exitcode}")

    def kill(self) -> None:
        self.process.kill()  # its kernel ends with it
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
    threading.Thread(target=_die_with_the_launcher, daemon=True).start()
    os.environ.update(environment)
    while True:
        pipe.send(perform(pipe.recv()))


def _die_with_the_launcher() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
