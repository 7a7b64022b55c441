"""Budgets at will: replays computed in a thread of their own, while notebook and view stay usable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epiviz.policies import Policy
    from epiviz.replays import Replay

Watch = Callable[[object], None]
Compute = Callable[[str, int, Watch], "Replay"]
TELL_SECONDS = 0.1  # between two reports of progress


class Stopped(Exception):
    """Raised inside a computation that is to end."""


def on_demand(chosen: Iterable[str | Policy] | None) -> dict[str, Policy]:
    """Return the policies that can be computed on demand by their printed names; None: all that evict."""
    from epiviz import policies  # here, because a reader without a model need not wait for torch

    found = map(policies.get, policies.names() if chosen is None else chosen)
    return {policy.label: policy for policy in found if policy.evicts}


def replayer(model, trace, known: dict[str, Policy], replays: Sequence[Replay] = ()) -> Compute:
    """Return a function that replays a policy over a trace at a budget.

    Sinks, recent tokens, buffer, seed and positions are those of the method's other replays, else of the first replay,
    else the defaults. Predictions are not compared with the full cache: views show what is kept.
    """
    from epiviz.policies import Budget
    from epiviz.replays import replay

    limited = [found for found in replays if found.budget is not None]

    def compute(method: str, budget: int, watch: Watch) -> Replay:
        like = next((found for found in limited if found.policy == method), limited[0] if limited else None)
        if like is None:
            return replay(model, trace, known[method], Budget(budget), compare=False, on_event=watch, progress=False)
        shape = {name: getattr(like.budget, name) for name in ("sinks", "recent", "buffer", "protect_prompt")}
        return replay(
            model,
            trace,
            known[method],
            Budget(budget, **shape),
            like.seed,
            positions=like.positions,
            compare=False,
            on_event=watch,
            progress=False,
        )

    return compute


@dataclass(eq=False)
class _Job:
    method: str
    budget: int
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    error: Exception | None = None


class Background:
    """One computation at a time; a new one takes the place of the one before.

    Parameters
    ----------
    compute : callable
        ``compute(method, budget, watch) -> Replay``. It calls ``watch`` with the number of tokens seen, or as the
        ``on_event`` of a replay, as often as it can be stopped.
    tell : callable
        Called with the method, the budget and the tokens seen, from another thread.
    found : callable
        Called with the method, the budget and the replay, from another thread.
    ended : callable
        Called from another thread with the method, the budget and an error, or None, when nothing is left to do.
    """

    def __init__(self, compute: Compute, tell, found, ended) -> None:
        self._compute, self._tell, self._found, self._ended = compute, tell, found, ended
        self._job: _Job | None = None

    @property
    def busy(self) -> tuple[str, int] | None:
        """What is being computed."""
        job = self._job
        return None if job is None or job.stop.is_set() or not job.thread.is_alive() else (job.method, job.budget)

    def start(self, method: str, budget: int) -> None:
        """Compute a replay; what is being computed is stopped, unless it is the same."""
        if self.busy == (method, budget):
            return
        before, self._job = self._job, _Job(method, budget)
        if before is not None:
            before.stop.set()
        job = self._job
        # A daemon: a kernel that ends does not wait for a computation nobody will look at.
        job.thread = threading.Thread(target=self._work, args=(job, before), name=f"epiviz {method}", daemon=True)
        job.thread.start()

    def stop(self) -> None:
        """Ask the computation to end; it does at its next eviction."""
        if self._job is not None:
            self._job.stop.set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when nothing is being computed any more; raise the error that ended the last computation."""
        end = None if timeout is None else time.monotonic() + timeout
        job = None
        while job is not self._job:  # one computation may be followed by another
            job = self._job
            job.thread.join(None if end is None else max(0, end - time.monotonic()))
            if job.thread.is_alive():
                raise TimeoutError(f"{job.method} at {job.budget} slots is still being computed after {timeout} s")
        if job is not None and job.error is not None:
            raise job.error

    def _work(self, job: _Job, before: _Job | None) -> None:
        if before is not None:
            before.thread.join()
        told = 0.0

        def watch(seen) -> None:
            nonlocal told
            if job.stop.is_set():
                raise Stopped
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                seen = getattr(seen, "seen", seen)
                self._tell(job.method, job.budget, int(seen.max() if hasattr(seen, "max") else seen))

        try:
            watch(0)
            self._found(job.method, job.budget, self._compute(job.method, job.budget, watch))
        except Stopped:
            pass
        except Exception as error:  # shown in the view, and raised by wait()
            job.error = error
        if self._job is job:
            self._ended(job.method, job.budget, job.error)
