"""Runs as Slurm jobs, submitted as an array by submitit. All nodes must see the folder under the same path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import submitit
from submitit.core.utils import UncompletedJobError
from submitit.helpers import as_completed

from epiviz.jobs import Job, lost, perform
from epiviz.manifest import Manifest
from epiviz.parameters import ParameterError, at_least_one

SUBMITTED = ".slurm"


@dataclass(frozen=True)
class SlurmExecutor:
    """An array of Slurm jobs. They go on if the launcher is stopped; the same command then takes up what is missing.

    Attributes
    ----------
    workers : int, optional
        Array jobs at a time.
    cpus, gpus : int
        Per job.
    minutes : int
        Time limit of a job.
    memory : int, optional
        GB per job.
    partition, account : str, optional
    setup : str, optional
        A shell command that each job runs first, as ``module load cuda``.
    runs_per_job : int
        Short runs are worth less than a place in the queue: so many share a job, one after the other.
    cluster : {"slurm", "local"}
        "local" makes the jobs processes of this machine, to try a sweep without Slurm.
    """

    workers: int | None = None
    cpus: int = 1
    gpus: int = 0
    minutes: int = 240
    memory: int | None = None
    partition: str | None = None
    account: str | None = None
    setup: str | None = None
    runs_per_job: int = 1
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        at_least_one(self, "workers", "cpus", "minutes", "memory", "runs_per_job")

    def width(self) -> int:
        return self.workers or 1

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Manifest | None]]:
        """Submit runs, and yield them as their jobs end."""
        parts = [jobs[first : first + self.runs_per_job] for first in range(0, len(jobs), self.runs_per_job)]
        submitted = self._queue(jobs[0]).map_array(perform_all, parts)
        part_of = {job.job_id: part for job, part in zip(submitted, parts, strict=True)}
        for job in as_completed(submitted, poll_frequency=10 if self.cluster == "slurm" else 0.5):
            part = part_of[job.job_id]
            try:
                yield from zip(part, job.result(), strict=True)
            except UncompletedJobError as error:  # killed, or over its limits: what it finished before stands
                why = f"its job {job.job_id} ended: {str(error).strip().splitlines()[0]}"
                yield from ((each, lost(each, why)) for each in part)

    def _queue(self, job: Job) -> submitit.AutoExecutor:
        try:
            queue = submitit.AutoExecutor(job.run.folder.parent / SUBMITTED, cluster=self.cluster)
        except RuntimeError as error:
            raise ParameterError(
                f"there is no Slurm here ({error}); submit from a login node, or choose another executor"
            ) from error
        asked = {
            "timeout_min": self.minutes,
            "cpus_per_task": self.cpus,
            "gpus_per_node": self.gpus,
            "mem_gb": self.memory,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_array_parallelism": self.workers,
            "slurm_setup": [self.setup] if self.setup else None,
        }
        queue.update_parameters(name="epiviz", **{name: value for name, value in asked.items() if value is not None})
        return queue


def perform_all(jobs: Sequence[Job]) -> list[Manifest | None]:
    """Make several runs one after the other; what a job of the queue does."""
    return [perform(job) for job in jobs]
