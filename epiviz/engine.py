"""The engine: rows, their cache, a policy and its state; forward passes that are observed and followed by evictions."""

from __future__ import annotations

import operator
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from epiviz import draws
from epiviz.attended import Attended
from epiviz.attention import RecentQueries, Seam, attention_rows, through_seam
from epiviz.cache import SlotCache, choose, protection
from epiviz.models import Model
from epiviz.policies.base import Budget, BudgetError, Needs, New, Policy, Ranking, ResolvedBudget, Slots, State
from epiviz.positions import Rotary, check_mode
from epiviz.retention import Retention
from epiviz.selector import Selector

RESERVED_TRACKS = {"position", "reason", "rotary"}
PREFILL_BLOCK = 512  # tokens per forward pass of a prompt: bounds what a block's scores and logits take


@dataclass(frozen=True)
class Meter:
    """What a run used, in slots per layer and KV head and in bytes of one sequence.

    Attributes
    ----------
    mean_slots, peak_slots : float, int
        Slots held while decoding, new token included: mean over decode steps, and maximum.
    prefill_peak_slots : int
        Slots at the end of the prefill, before event 0.
    attended_slots : float
        Slots attended per decode step, mean over layers and heads: what is held, or what a selection takes of it.
    kv_bytes, state_bytes : int
        Keys and values; everything else kept between steps (positions, tracks, queries, key summaries, state).
    evictions : int
        Events.
    bounded : bool
        False: the policy never evicts, and memory grows with the text.
    """

    mean_slots: float
    peak_slots: int
    prefill_peak_slots: int
    attended_slots: float
    kv_bytes: int
    state_bytes: int
    evictions: int
    bounded: bool


@dataclass(eq=False)
class Row:
    """One sequence on its way through the engine."""

    prompt: list[int]
    sample: int
    budget: ResolvedBudget | None
    tokens: list[int] = field(default_factory=list)
    status: str | None = None
    # Per event: tokens seen when it fired, positions and reasons of the slots that left, [layers, kv_heads, k].
    events: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    rotary: list[int] = field(default_factory=list)  # the position each token was rotated by
    prefill_peak: int = 0
    peak: int = 0
    held_sum: int = 0
    steps: int = 0
    retention: Retention | None = None
    attended: Attended | None = None
    meter: Meter | None = None


def make_rows(prompts: list[list[int]], policy: Policy, budget: Budget | None, new_tokens: int) -> list[Row]:
    """Return one row per prompt, its budget resolved."""
    limited = policy.evicts or policy.selects
    if limited and not isinstance(budget, Budget):
        raise BudgetError(
            f"policy {policy.label!r} needs a budget, got {budget!r}; pass epiviz.Budget(total=…), or policy='full'"
        )
    keys = draws.sample_keys(prompts)
    return [
        Row(prompt, key, budget.resolve(len(prompt), new_tokens) if limited else None)
        for prompt, key in zip(prompts, keys, strict=True)
    ]


@dataclass
class PassInCache:
    """A forward pass whose slots are written but not yet counted: what :class:`New` shows of it."""

    cache: SlotCache
    q: int
    queries: dict[int, torch.Tensor]

    def newest(self, name: str, every_layer: bool = False) -> torch.Tensor:
        return self.cache.newest(name, self.q, every_layer)

    def write(self, track: str, values: torch.Tensor) -> None:
        self.cache.write_track(track, values, self.q)

    def track(self, name: str) -> torch.Tensor:
        return self.cache.tracks[name][..., : self.n]

    @property
    def n(self) -> int:
        return max(self.cache.held) + self.q

    def visible(self) -> torch.Tensor:
        return self.cache.visible(self.q)

    def rows(self, layer: int) -> torch.Tensor:
        return attention_rows(self.queries[layer], self.cache.keys[layer, :, :, : self.n], self.visible())


class PassRecorder(Protocol):
    """Collects what it needs of every forward pass of a session.

    ``observe`` gets the new slots, their logits ``[rows, q, vocabulary]`` and the tokens ``[rows, q]``.
    """

    needs: Needs

    def observe(self, new: New, logits: torch.Tensor, tokens: torch.Tensor) -> None: ...


class Session:
    """Rows, their cache, a policy and its state; forward passes with observation and eviction.

    Rows are prefilled one by one, each in a cache as long as its prompt, cut at once if the prompt is longer than the
    budget, and joined afterwards. So no pad ever exists, and only one prompt at a time needs more than its budget.

    Parameters
    ----------
    model : Model
    policy : Policy
    rows : list of Row
    new_tokens : int
        At most so many tokens follow a prompt.
    seed : int
    positions : {"absolute", "cache-relative", "rerotated"}
    recorder : PassRecorder, optional
        Sees each pass with all its logits, before anything is evicted.
    on_event : callable, optional
        Called after each eviction with the :class:`Slots` that stay, of the rows that evicted; not to be changed.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        rows: list[Row],
        new_tokens: int,
        seed: int,
        positions: str = "absolute",
        recorder: PassRecorder | None = None,
        on_event: Callable[[Slots], None] | None = None,
    ):
        self.positions = check_mode(positions)
        self.rotary = Rotary.of(model) if positions == "rerotated" else None
        policy = policy.for_model(model.shape)
        self.model, self.policy, self.rows, self.recorder = model, policy, list(rows), recorder
        self.on_event = on_event
        self.seed, self.new_tokens = operator.index(seed), new_tokens
        needs = policy.needs(model.shape)
        self.needs: Needs = needs | recorder.needs if recorder else needs
        self.state: State = {}
        self.cache: SlotCache | None = None
        self.recent: RecentQueries | None = None
        self.selector: Selector | None = None
        self._seam: Seam | None = None
        self._fresh = True  # no pass has followed the prompts yet
        self._nan = torch.zeros((), dtype=torch.bool, device=model.device)
        for row in rows:
            if row.budget is not None:
                policy.check(row.budget, model.shape)
            if policy.evicts and self.rotary is not None and self.needs.queries > row.budget.recent:
                raise BudgetError(
                    f"policy {policy.label!r} looks at the last {self.needs.queries} queries, but only "
                    f"{row.budget.recent} recent tokens stay together when keys are rotated again; raise recent to "
                    f"{self.needs.queries}, lower the window, or use other positions"
                )
        if taken := RESERVED_TRACKS & set(self.needs.tracks):
            raise ValueError(f"policy {policy.label!r} names a track {min(taken)!r}, which the engine keeps for itself")
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        self._stack.enter_context(torch.inference_mode())
        self._seam = self._stack.enter_context(through_seam(self.model, self.needs.hidden, self.needs.rows))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    # -- forward passes ------------------------------------------------------------------------------------------------

    def prefill(self) -> torch.Tensor:
        """Feed every row's prompt; return the logits after it, ``[rows, vocabulary]``."""
        capacity = max(self._capacity(row) for row in self.rows)
        joined = self._new_cache(len(self.rows), capacity)
        logits, states, rings = [], [], []
        for index, row in enumerate(self.rows):
            cache, state = self._new_cache(1, len(row.prompt)), {}
            ring = self._new_ring()
            tokens = torch.tensor([row.prompt], device=self.model.device)
            for start in range(0, len(row.prompt), PREFILL_BLOCK):
                block = tokens[:, start : start + PREFILL_BLOCK]
                out = self._pass([row], cache, ring, state, block, prompt=True, first=start == 0)
            logits.append(out[:, -1])
            row.prefill_peak = cache.held[0]
            with uninterrupted():
                if self.policy.evicts and self.policy.due_after_prompt(cache.seen[0], cache.held[0], row.budget):
                    self._evict([row], [0], cache, ring, state)
                row.peak = cache.held[0]
                joined.copy_row(index, cache)
            states.append(state)
            rings.append(ring)
        self.cache = joined
        self.state.update({name: torch.cat([state[name] for state in states]) for name in states[0]})
        self.recent = RecentQueries.stack(rings) if self.needs.queries else None
        if self.policy.selects:  # from here on: the prompt was read densely
            totals, samples = [row.budget.total for row in self.rows], [row.sample for row in self.rows]
            self.selector = Selector(self.policy, joined, totals, self.seed, samples, self.new_tokens)
        return torch.cat(logits)

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed the next tokens ``[rows, q]`` of every row and evict where due; return all their logits.

        Between two events nothing leaves, so a chunk that does not run past the next event of any row attends exactly
        what single steps would. :meth:`room` tells how long it may be.
        """
        q = tokens.shape[1]
        if q > 1 and q > self.room():
            raise ValueError(f"a chunk of {q} tokens runs past the next event, due in {self.room()}")
        out = self._pass(self.rows, self.cache, self.recent, self.state, tokens, prompt=False, first=self._fresh)
        self._fresh = False
        with uninterrupted():
            for row, held in zip(self.rows, self.cache.held, strict=True):
                row.held_sum += q * held - q * (q - 1) // 2
                row.steps += q
                row.peak = max(row.peak, held)
            self._evict_due()
        return out

    def room(self) -> int:
        """Tokens that may be fed at once: up to the next event of any row, or the end of the cache."""
        room = self.cache.capacity - max(self.cache.held)
        if self.policy.evicts:
            for row, seen, held in zip(self.rows, self.cache.seen, self.cache.held, strict=True):
                steps = range(1, room + 1)
                room = next((q for q in steps if self.policy.due(seen + q, held + q, row.budget)), room)
        return room

    def _pass(self, rows, cache, ring, state, tokens, *, prompt: bool, first: bool) -> torch.Tensor:
        """One forward pass, observed; the slots are counted only once all of it is done."""
        q = tokens.shape[1]
        positions = cache.new_positions(q)
        with self._seam.watching(cache, ring, self.selector):
            keep = 0 if self.recorder else (1 if prompt else q)
            rotary = positions if self.positions == "absolute" else cache.next_slots(q)
            logits = self.model.forward(tokens, rotary, cache, cache.mask(q), keep)
        made = PassInCache(cache, q, self._seam.queries)
        new = New(positions, self._seam.hidden, prompt, first, self.model.shape.layers, made)
        with uninterrupted():
            for track in self.needs.tracks:
                made.write(track, torch.zeros((), device=self.model.device))  # slots are reused: forget old values
            self.policy.observe(new, state)
            if self.recorder:
                self.recorder.observe(new, logits, tokens)
            cache.advance(q)
            if ring is not None:
                ring.advance(positions)
            if self.selector is not None:
                self.selector.advance(positions)
            if self.positions != "absolute":  # there a token's position is its index, and nothing need be kept
                for row, held in zip(rows, cache.held, strict=True):
                    row.rotary.extend(range(held - q, held))
        return logits

    def _capacity(self, row: Row) -> int:
        longest = len(row.prompt) + self.new_tokens
        return min(row.budget.peak, longest) if self.policy.bounded else longest

    def _new_cache(self, rows: int, capacity: int) -> SlotCache:
        shape, dtype, device = self.model.shape, self.model.dtype, self.model.device
        return SlotCache(shape, rows, capacity, dtype, device, self.needs.tracks, self.rotary)

    def _new_ring(self) -> RecentQueries | None:
        if not self.needs.queries:
            return None
        return RecentQueries.empty(self.model.shape, 1, self.needs.queries, self.model.dtype, self.model.device)

    # -- eviction ------------------------------------------------------------------------------------------------------

    def _evict_due(self) -> None:
        if not self.policy.evicts:
            return
        alike: dict[tuple, list[int]] = defaultdict(list)  # rows that hold and keep equally many evict together
        for index, row in enumerate(self.rows):
            seen, held = self.cache.seen[index], self.cache.held[index]
            if self.policy.due(seen, held, row.budget):
                alike[held, row.budget, index if self.policy.underfills else 0].append(index)
        for indices in alike.values():
            self._evict([self.rows[i] for i in indices], indices, self.cache, self.recent, self.state)

    def _evict(self, rows: list[Row], indices: list[int], cache: SlotCache, ring, state: State) -> None:
        budget = rows[0].budget
        slots = held_slots(cache, indices, budget, ring)
        n, positions = slots.n, slots.positions
        ranking = self._rank(rows, indices, cache, slots, state)
        # float32 for float64 models too: equal tokens have equal values in layer 0, and rounding must not break ties.
        priority = ranking.priority.float().expand(positions.shape)
        self._nan |= priority.isnan().any()
        total = min(budget.total, n) if not self.policy.underfills else self._filled(priority, budget)
        if total == n:
            return  # an occasion on which nothing leaves is no event
        keep, gone = choose(priority, min(budget.front, n), budget.recent, total)
        seen = torch.tensor([cache.seen[i] for i in indices], device=self.model.device)[None, :, None, None]
        kept_reason = torch.as_tensor(ranking.reason, dtype=torch.uint8, device=self.model.device)
        kept_reason = kept_reason.expand(positions.shape).gather(3, keep)
        shield = protection(positions.gather(3, keep), seen, budget)
        left = positions.gather(3, gone), slots.tracks["reason"].gather(3, gone)
        cache.evict(indices, keep, torch.where(shield > 0, shield, kept_reason))
        if self.rotary is not None and ring is not None:
            # The newest tokens have all moved by as much, and their queries move along.
            ring.rotate(indices, keep.shape[-1] - n, self.rotary)
        for row, i in enumerate(indices):
            where, why = (x[:, row].to("cpu", non_blocking=True) for x in left)
            rows[row].events.append((cache.seen[i], where, why))
        if self.on_event is not None:
            self.on_event(held_slots(cache, indices, budget))

    def _rank(self, rows: list[Row], indices: list[int], cache: SlotCache, slots: Slots, state: State) -> Ranking:
        """Ask the policy; some rows' state and tracks are copies, which are written back."""
        samples, events = [row.sample for row in rows], [len(row.events) for row in rows]
        numbers = draws.Draws(self.seed, samples, events, self.model.device)
        if len(indices) == cache.rows:
            return self.policy.rank(slots, state, numbers)
        index = torch.tensor(indices, device=self.model.device)
        own = {name: x.index_select(0, index) for name, x in state.items()}
        ranking = self.policy.rank(slots, own, numbers)
        for name, x in own.items():
            state[name].index_copy_(0, index, x)
        for name in self.needs.tracks:
            cache.tracks[name][:, index, :, : slots.n] = slots.tracks[name]
        return ranking

    def _filled(self, priority: torch.Tensor, budget: ResolvedBudget) -> int:
        """Count the slots that an underfilling policy keeps; the host has to know, so this waits for the device."""
        n = priority.shape[-1]
        slot = torch.arange(n, device=priority.device)
        kept = (priority > -torch.inf) | (slot < budget.front) | (slot >= n - budget.recent)
        counts = kept.sum(-1)
        low, high = int(counts.min()), int(counts.max())
        if low != high:
            raise ValueError(
                f"policy {self.policy.label!r} keeps {low} slots in one head and {high} in another; all heads of a "
                "sequence must keep equally many"
            )
        return min(low, budget.total) if self.policy.bounded else low

    # -- the end of rows -------------------------------------------------------------------------------------

    def join(self, other: Session) -> None:
        """Take over the rows of another session of the same model, policy and seed, behind one's own; it is used up."""
        if not self.rows:
            self.cache, self.recent, self.state, self.rows = other.cache, other.recent, other.state, other.rows
        else:
            self.cache.join_rows(other.cache)
            self.state = {name: torch.cat([x, other.state[name]]) for name, x in self.state.items()}
            if self.recent is not None:
                self.recent = RecentQueries.stack([self.recent, other.recent])
            self.rows = [*self.rows, *other.rows]
        self._nan |= other._nan

    def finish(self, rows: Sequence[Row]) -> None:
        """Write down the history of rows and let them leave the batch."""
        for row in rows:
            self._write_down(row)
        left = {id(row) for row in rows}
        stay = [i for i, row in enumerate(self.rows) if id(row) not in left]
        if stay and rows and self.cache is not None:
            self.cache.select_rows(stay)
            index = torch.tensor(stay, device=self.model.device)
            for name in self.state:
                self.state[name] = self.state[name].index_select(0, index)
            if self.recent is not None:
                self.recent.select_rows(stay)
            if self.selector is not None:
                self.selector.select_rows(stay)
        self.rows = [self.rows[i] for i in stay]

    def _write_down(self, row: Row) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the events' copies to the host must have arrived
        if self._nan.item() or (self.selector is not None and self.selector.nan.item()):
            raise FloatingPointError(
                f"policy {self.policy.label!r} gave NaN priorities; nothing it kept can be trusted"
            )
        shape, events = self.model.shape, row.events
        prefilled = self.cache is not None
        index = self.rows.index(row)
        seen = self.cache.seen[index] if prefilled else 0
        events = events if prefilled else []
        death = np.full((len(shape.evicts), shape.kv_heads, seen), len(events), dtype=np.int32)
        reason = np.zeros(death.shape, dtype=np.uint8)
        for number, (_, positions, reasons) in enumerate(events):
            np.put_along_axis(death, positions.numpy(), number, axis=2)
            np.put_along_axis(reason, positions.numpy(), reasons.numpy(), axis=2)
        if prefilled:
            held = self.cache.held[index]
            tracks = (self.cache.tracks[name] for name in ("position", "reason"))
            positions, reasons = (track[:, index, :, :held].cpu() for track in tracks)
            np.put_along_axis(reason, positions.numpy(), reasons.numpy(), axis=2)
        steps = np.array([seen for seen, _, _ in events], dtype=np.int64)
        death, reason = shape.every_layer(death, len(events)), shape.every_layer(reason, 0)
        rotary = None if self.positions == "absolute" else np.array(row.rotary[:seen], dtype=np.int64)
        row.retention = Retention(steps, death, reason, len(row.prompt), shape.evicts, rotary)
        mean = row.held_sum / row.steps if row.steps else float(row.peak)
        attended = mean
        if self.selector is not None:
            row.attended = self.selector.history(index, len(row.prompt))
            attended = self.selector.mean_slots(index) if row.steps else mean
        row.meter = Meter(
            mean_slots=mean,
            peak_slots=row.peak,
            prefill_peak_slots=row.prefill_peak,
            attended_slots=attended,
            kv_bytes=self.cache.kv_bytes(self._capacity(row)) if prefilled else 0,
            state_bytes=self._state_bytes(row) if prefilled else 0,
            evictions=len(steps),
            bounded=self.policy.bounded,
        )

    def _state_bytes(self, row: Row) -> int:
        state = sum(x[:1].numel() * x.element_size() for x in self.state.values())
        return (
            self.cache.track_bytes(self._capacity(row))
            + (self.selector.summary_bytes(self._capacity(row)) if self.selector is not None else 0)
            + state
            + (self.recent.bytes_per_row if self.recent is not None else 0)
        )


def held_slots(cache: SlotCache, rows: list[int], budget: ResolvedBudget, ring: RecentQueries | None = None) -> Slots:
    """Return what some rows, which hold equally many slots, hold; views if these are all rows."""
    n = cache.held[rows[0]]
    named = cache.slots(rows, n)
    slot = torch.arange(n, device=cache.keys.device)
    candidates = (slot >= budget.front) & (slot < n - budget.recent)
    keys, values, positions = named.pop("keys"), named.pop("values"), named.pop("position")
    slots = Slots(keys, values, positions, candidates[None, None, None], budget, tracks=named)
    if ring is not None:
        index = torch.tensor(rows, device=slot.device)
        slots.queries = ring.queries if len(rows) == cache.rows else ring.queries.index_select(1, index)
        slots.query_positions = ring.positions[index]
    return slots


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while slots, counts and history change together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            if callable(before):
                before(*pressed[0])
            elif before is not signal.SIG_IGN:
                raise KeyboardInterrupt
