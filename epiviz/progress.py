"""Progress of a sweep in a terminal: a line for each run that ended, and a bar where there is a screen."""

from __future__ import annotations

import sys

from tqdm import tqdm

from epiviz.manifest import Manifest
from epiviz.runs import Say, outcome


class Progress:
    """A context that tells of runs as they end."""

    def __init__(self, total: int, say: Say) -> None:
        self.say = say
        self.total = total
        self.ended = self.failed = 0
        self.bar = tqdm(total=total, desc="runs", unit="run", leave=False, disable=not sys.stderr.isatty() or not total)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exception) -> None:
        self.bar.close()

    def tell(self, label: str, run: Manifest) -> None:
        """Say that a run ended."""
        self.ended += 1
        self.failed += run.status != "done"
        took = f" in {run.seconds:.1f} s" if run.seconds is not None else ""
        status = "done by another launcher" if run.reused and run.status == "done" else run.status
        why = f": {outcome(run)}" if run.status != "done" else ""
        with tqdm.external_write_mode():
            self.say(f"[{self.ended}/{self.total}] {label}: {status}{took}{why}")
        self.bar.set_postfix({"not done": self.failed} if self.failed else {}, refresh=False)
        self.bar.update()
