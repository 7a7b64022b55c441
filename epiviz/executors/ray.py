"""Runs on a Ray cluster: an existing one, or one that Ray starts on this machine.

Nodes need not see the launcher's disk: the project folder goes to them with the job (Ray keeps one copy per node), and
each run's folder comes back. ``shared=true`` spares both where every node has the folder under the same path.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from epiviz import devices
from epiviz.jobs import Job, claim, lost, perform, settled
from epiviz.manifest import MANIFEST, Manifest
from epiviz.parameters import ParameterError, at_least_one
from epiviz.runs import clear, now

NODE_FOLDER = Path("runs") / ".away"


@dataclass(frozen=True)
class RayExecutor:
    """Ray tasks, one for each run.

    Attributes
    ----------
    workers : int, optional
        Runs at a time. Default: as many as the cluster has room for.
    cpus, gpus : float
        What each run asks for.
    address : str, optional
        Of the cluster. Default: what Ray finds (``RAY_ADDRESS``, a cluster on this machine), or a new local one.
    shared : bool
        All nodes see this folder under the same path.
    """

    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, "workers")

    def width(self) -> int:
        if self.workers:
            return self.workers
        if not ray.is_initialized():
            return devices.cores()
        has, asked = ray.cluster_resources(), {"CPU": self.cpus, "GPU": self.gpus}
        room = min((int(has.get(kind, 0) / each) for kind, each in asked.items() if each), default=devices.cores())
        if room == 0:
            raise ParameterError(
                f"a run asks for {self.cpus:g} CPUs and {self.gpus:g} GPUs, and the whole cluster has "
                f"{has.get('CPU', 0):g} and {has.get('GPU', 0):g}; ask for less, or set workers if it grows by itself"
            )
        return room

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Manifest | None]]:
        """Make runs; one whose node is lost is left to the next call."""
        waiting = deque(jobs)
        flying: dict[Any, _Flight] = {}
        with self._connected(jobs):
            send = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)(perform if self.shared else _away)
            try:
                while waiting or flying:
                    while waiting and len(flying) < self.width():
                        flight = _Flight(waiting.popleft(), self.shared)
                        if flight.clear_for_start():
                            flying[send.remote(flight.outbound)] = flight
                        else:
                            yield flight.job, settled(flight.job)
                    for ref in ray.wait(list(flying))[0] if flying else ():
                        flight = flying.pop(ref)
                        try:
                            made = flight.land(ray.get(ref))
                        except RayError as error:
                            made = flight.give_up(f"Ray lost it: {str(error).strip().splitlines()[0]}")
                        yield flight.job, made
            finally:
                for ref, flight in flying.items():
                    ray.cancel(ref, force=True)
                    flight.give_up("the sweep was interrupted")

    @contextmanager
    def _connected(self, jobs: Sequence[Job]) -> Iterator[None]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ours = Path(os.path.relpath(jobs[0].run.folder.parent)).as_posix()
        project = {"working_dir": str(Path.cwd()), "excludes": [".git", ".venv", f"/{ours}"]}
        environment = {} if self.shared else {"runtime_env": project}
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **environment)
        try:
            yield
        finally:
            ray.shutdown()


class _Flight:
    """A job on its way: claimed here while a node makes it, unless the node can claim it itself."""

    def __init__(self, job: Job, shared: bool) -> None:
        self.job = job
        self.shared = shared
        self.lock = ExitStack()

    @property
    def outbound(self) -> Job:
        """The job with paths that hold in a node's copy of the project."""
        if self.shared:
            return self.job
        notebook = Path(self.job.run.notebook).resolve()
        if not notebook.is_relative_to(Path.cwd()):
            raise ParameterError(
                f"{notebook} lies outside {Path.cwd()}, which is what nodes get: start in a folder above it, or give "
                "the executor shared=true where all nodes see the same files"
            )
        return replace(self.job, run=replace(self.job.run, notebook=str(notebook.relative_to(Path.cwd()))))

    def clear_for_start(self) -> bool:
        """Claim the run; False if somebody is at it, or it is done by now."""
        if self.shared:
            return True
        ours = self.lock.enter_context(claim(self.job)) and settled(self.job) is None
        if ours:
            clear(self.job.run.folder)
            self.job.run.folder.mkdir(parents=True, exist_ok=True)
            replace(self.job.run, status="running", started=now()).save()
        else:
            self.lock.close()
        return ours

    def land(self, result: Any) -> Manifest | None:
        """Put what came back in place."""
        if self.shared:
            return result
        made, archive = result
        with self.lock, tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(self.job.run.folder, filter="data")
            run = self.job.run
            made = replace(made, folder=run.folder, notebook=run.notebook, parameters=run.parameters)
            made.save()
        return made

    def give_up(self, why: str) -> Manifest:
        self.lock.close()
        return lost(self.job, why)


def _away(job: Job) -> tuple[Manifest, bytes]:
    """Make a run on a node, in its copy of the project; return the manifest, and the folder's other files packed."""
    folder = (NODE_FOLDER / job.name).resolve()
    parameters = dict(job.run.parameters)
    if "out_dir" in parameters:
        parameters["out_dir"] = os.path.relpath(folder, Path(job.run.notebook).resolve().parent)
    made = perform(replace(job, run=replace(job.run, folder=folder, parameters=parameters)))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        for path in sorted(folder.rglob("*")):
            if path.name != MANIFEST and path.is_file():
                files.add(path, path.relative_to(folder).as_posix())
    shutil.rmtree(folder, ignore_errors=True)
    return made, packed.getvalue()
