"""Other processes in tests: forked, so that none spends seconds on the imports that this one has made."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

FORK = multiprocessing.get_context("fork")


class Forked:
    """A process at ``work(tell)``; what it tells is received here."""

    def __init__(self, work: Callable[[Callable], None]) -> None:
        self.told, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=work, args=(theirs.send,), daemon=True)
        self.process.start()
        theirs.close()  # so that reading ends with the process

    def next(self, seconds: float = 60):
        """Return what it tells next."""
        assert self.told.poll(seconds), f"nothing was told in {seconds} s"
        return self.told.recv()

    def rest(self) -> list:
        """Wait for its end and return all that it told."""
        told = []
        try:
            while True:
                told.append(self.told.recv())
        except EOFError:
            self.process.join()
        assert self.process.exitcode == 0
        return told

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.join()
