"""Continuous batches: rows that have ended make room, and rows that wait take their places.

A batch of texts of very different lengths would run most of its time with few rows. Here new rows are prefilled beside
the running ones, write their first token, and join them; each row still does exactly what it would do alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from epiviz.decode import Sampler, decode, step
from epiviz.engine import Row, Session, uninterrupted

JOIN_SHARE = 8  # rows join once an eighth of the places is free: joining copies the cache


class Continuous:
    """Rows on their way through sessions that are kept full.

    Parameters
    ----------
    begin : callable
        Takes rows and returns a session for them.
    rows : sequence of Row
    places : int
        At most so many rows run at a time.
    sampler : Sampler
    on_end : callable
        Gets each row that has ended and its seconds: the row's share of the time of every step it was part of, so that
        those of all rows add up.

    Attributes
    ----------
    waiting : deque of Row
        Not yet begun.
    running : list of Row
        Begun and not ended; after an exception or Ctrl-C these are the rows that it hit.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[Row]], Session],
        rows: Sequence[Row],
        places: int,
        sampler: Sampler,
        on_end: Callable[[Row, float], None],
    ):
        if places < 1:
            raise ValueError(f"a batch needs at least 1 place, got {places}")
        self.begin, self.places, self.sampler, self.on_end = begin, places, sampler, on_end
        self.waiting: deque[Row] = deque(rows)
        self.running: list[Row] = []
        self._seconds: dict[int, float] = {}
        self._at = 0.0  # when time was last shared out

    def run(self) -> None:
        """Decode until every row has ended.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C was pressed; rows that had not ended are in ``running``.
        """
        while self.waiting:
            rows = self._next()
            self._at = time.perf_counter()
            with self.begin(rows) as session:
                decode(session, self.sampler, after_step=self._after_step)
            self._report()
            if self.running:
                raise KeyboardInterrupt

    def _next(self) -> list[Row]:
        free = self.places - len(self.running)
        rows = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self.running += rows
        self._seconds |= {id(row): 0.0 for row in rows}
        return rows

    def _after_step(self, session: Session, logits: torch.Tensor) -> torch.Tensor:
        self._spend(self.running)
        self._report()
        free = self.places - len(self.running)
        joins = not session.policy.selects  # a selector counts the queries of all its rows together
        if self.waiting and joins and (free * JOIN_SHARE >= self.places):
            logits = self._fill(session, logits)
        return logits

    def _fill(self, session: Session, logits: torch.Tensor) -> torch.Tensor:
        rows = self._next()
        with self.begin(rows) as fresh:
            # One step on their own: what is special about the first pass after a prompt is over when they join.
            found = step(fresh, self.sampler, fresh.prefill())
            self._spend(rows)
            if fresh.rows:
                logits = torch.cat([logits[: len(session.rows)], found])
                with uninterrupted():
                    session.join(fresh)
        self._report()
        return logits

    def _spend(self, rows: Sequence[Row]) -> None:
        now = time.perf_counter()
        for row in rows:
            self._seconds[id(row)] += (now - self._at) / len(rows)
        self._at = now

    def _report(self) -> None:
        ended = [row for row in self.running if row.meter is not None and row.status != "stopped"]
        self.running = [row for row in self.running if row not in ended]
        for row in ended:
            self.on_end(row, self._seconds.pop(id(row)))
