"""Stream: a text and its evictions while they come, cut into messages that tell a page only what is new.

A page that has seen some tokens and events gets what follows them. Whoever has seen nothing, because the view was
opened late, is told everything in one message of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from epiviz.text import join_bytes
from epiviz.widgets.data import THRESHOLDS

CONTEXT = 8  # tokens read again before new ones: what some tokenizers write depends on what stands before


@dataclass(frozen=True)
class Event:
    """One eviction.

    Attributes
    ----------
    step : int
        Tokens seen when it fired.
    dropped : int
        Slots that each head lost.
    lost : list of int64 arrays
        For each of ``THRESHOLDS``: the tokens that so large a share of the heads has lost from now on.
    """

    step: int
    dropped: int
    lost: list[np.ndarray]


class Stream:
    """What a row of the engine has written and lost so far.

    Parameters
    ----------
    row : Row
        Read when :meth:`read` is called; the engine appends to it.
    read_bytes : callable
        From :func:`epiviz.text.byte_reader`.
    new_tokens : int
        At most so many tokens follow the prompt.
    heads : int
        KV heads of all layers that evict.
    """

    def __init__(self, row, read_bytes: Callable[[list[int]], Iterable[bytes]], new_tokens: int, heads: int) -> None:
        self.row, self.prompt = row, len(row.prompt)
        self.pieces: list[str] = []  # of the generated tokens whose characters are complete
        self.events: list[Event] = []
        self._read_bytes = read_bytes
        self._lost_by = np.zeros(self.prompt + new_tokens, dtype=np.int32)  # heads that lost each token
        self._needed = [int(np.ceil(threshold / 100 * heads)) for threshold in THRESHOLDS]

    @property
    def seen(self) -> int:
        """Tokens whose text is complete, prompt included."""
        return self.prompt + len(self.pieces)

    def read(self) -> None:
        """Take in what the row has got since the last call, at a cost that does not grow with the text."""
        self._read_tokens()
        for step, positions, _ in self.row.events[len(self.events) :]:
            self.events.append(self._event(step, positions.numpy()))

    def _read_tokens(self) -> None:
        done = len(self.pieces)
        new = self.row.tokens[done:]
        if not new:
            return
        before = self.row.tokens[max(0, done - CONTEXT) : done]
        spans = join_bytes(self._read_bytes([*before, *new]))
        end = len(spans)
        if spans.piece(end - 1).endswith("\ufffd"):  # perhaps the first bytes of a character that is still coming
            end -= 1
            while end > len(before) and spans.partial[end - 1]:
                end -= 1
        self.pieces += spans.pieces[len(before) : end]

    def _event(self, step: int, positions: np.ndarray) -> Event:
        tokens, heads = np.unique(positions, return_counts=True)
        before = self._lost_by[tokens]
        after = self._lost_by[tokens] = before + heads
        lost = [tokens[(before < needed) & (needed <= after)] for needed in self._needed]
        return Event(step, positions.shape[-1], lost)

    def message(self, token: int, event: int) -> tuple[dict, list[bytes]]:
        """Return what follows the first ``token`` tokens (prompt included) and the first ``event`` events.

        The buffers hold ids (uint32), lengths in UTF-16 units (uint32), the text (UTF-16), and the tokens that the
        thresholds of all events lost one after the other (uint32), whose numbers are in the message.
        """
        first = max(0, token - self.prompt)
        pieces, events = self.pieces[first:], self.events[event:]
        texts = [piece.encode("utf-16-le", "surrogatepass") for piece in pieces]
        lost = [part for each in events for part in each.lost]
        content = {
            "tell": "live",
            "token": self.prompt + first,
            "event": event,
            "steps": [each.step for each in events],
            "dropped": [each.dropped for each in events],
            "lost": [len(part) for part in lost],
        }
        arrays = [
            self.row.tokens[first : first + len(pieces)],
            [len(text) // 2 for text in texts],
            np.concatenate(lost) if lost else [],
        ]
        ids, lengths, gone = (np.asarray(array, dtype="<u4").tobytes() for array in arrays)
        return content, [ids, lengths, b"".join(texts), gone]
