"""The one decode loop: prefill, then step, observe, and evict when due.

``generate`` lets the model write under eviction; ``Session.feed`` pushes given tokens through the same cache in chunks.
"""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm.auto import tqdm

from epiviz import draws, policies
from epiviz.attention import RecentQueries, through_seam
from epiviz.cache import SlotCache, choose, protection
from epiviz.models import Model
from epiviz.policies.base import Budget, BudgetError, Needs, New, Policy, ResolvedBudget, Slots, State
from epiviz.retention import Retention
from epiviz.text import Spans, token_spans

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
        Slots attended per decode step.
    kv_bytes, state_bytes : int
        Keys and values; everything else kept between steps (positions, tracks, queries, state).
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


@dataclass(frozen=True)
class Run:
    """A text that a model wrote while its cache was being evicted.

    Attributes
    ----------
    text, tokens : str, list of int
        The generated part; the text leaves out the token that ended it.
    status : {"finished", "length", "loop", "stopped"}
        Ended by itself; cut at ``max_new_tokens``; cut, and its end repeats itself; interrupted.
    retention : Retention
        Over prompt and generated tokens; the last sampled token is never fed and not in it.
    meter : Meter
    prompt_tokens : list of int
    spans : Spans
        Text and token spans of prompt + generated part; None without a tokenizer.
    policy, model : str
        Printed names.
    budget : ResolvedBudget or None
    seed : int
    """

    tokens: list[int]
    status: str
    retention: Retention
    meter: Meter
    prompt_tokens: list[int]
    spans: Spans | None
    policy: str
    model: str
    budget: ResolvedBudget | None
    seed: int

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_tokens)

    @property
    def text(self) -> str:
        if self.spans is None:
            raise ValueError("the model has no tokenizer; read run.tokens instead of run.text")
        ended = self.status == "finished"
        return self.spans.slice(self.prompt_length, len(self.spans) - ended)


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
    prefill_peak: int = 0
    peak: int = 0
    held_sum: int = 0
    steps: int = 0
    retention: Retention | None = None
    meter: Meter | None = None


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
    recorder : object, optional
        ``needs`` (a :class:`Needs`) and ``observe(new, logits, tokens)``, called after each pass with all its logits.
    """

    def __init__(self, model: Model, policy: Policy, rows: list[Row], new_tokens: int, seed: int, recorder=None):
        self.model, self.policy, self.rows, self.seed, self.recorder = model, policy, list(rows), seed, recorder
        self.new_tokens = new_tokens
        needs = policy.needs(model.shape)
        self.needs: Needs = needs | recorder.needs if recorder else needs
        self.state: State = {}
        self.cache: SlotCache | None = None
        self.recent: RecentQueries | None = None
        self._nan = torch.zeros((), dtype=torch.bool, device=model.device)
        for row in rows:
            if policy.bounded:
                policy.check(row.budget, model.shape)
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        self._stack.enter_context(torch.inference_mode())
        self._seam = self._stack.enter_context(through_seam(self.model, self.needs.hidden))
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
                if self.policy.bounded and cache.held[0] > row.budget.total:
                    self._evict([row], [0], cache, ring, state)
                row.peak = cache.held[0]
                joined.copy_row(index, cache)
            states.append(state)
            rings.append(ring)
        self.cache = joined
        self.state.update({name: torch.cat([state[name] for state in states]) for name in states[0]})
        self.recent = RecentQueries.stack(rings) if self.needs.queries else None
        self._fresh = True
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
        if self.policy.bounded:
            for row, seen, held in zip(self.rows, self.cache.seen, self.cache.held, strict=True):
                steps = range(1, room + 1)
                room = next((q for q in steps if self.policy.due(seen + q, held + q, row.budget)), room)
        return room

    def _pass(self, rows, cache, ring, state, tokens, *, prompt: bool, first: bool) -> torch.Tensor:
        """One forward pass, observed; the slots are counted only once all of it is done."""
        q = tokens.shape[1]
        positions = cache.new_positions(q)
        with self._seam.watching(cache, ring):
            keep = 0 if self.recorder else (1 if prompt else q)
            logits = self.model.forward(tokens, positions, cache, cache.mask(q), keep)
        new = New(
            positions=positions,
            hidden=self._seam.hidden,
            prompt=prompt,
            first=first,
            _slots=lambda name: cache.newest(name, q),
            write=lambda name, values: cache.write_track(name, values, q),
        )
        with uninterrupted():
            self.policy.observe(new, state)
            if self.recorder:
                self.recorder.observe(new, logits, tokens)
            cache.advance(q)
            if ring is not None:
                ring.advance(positions)
        return logits

    def _capacity(self, row: Row) -> int:
        longest = len(row.prompt) + self.new_tokens
        return min(row.budget.peak, longest) if self.policy.bounded else longest

    def _new_cache(self, rows: int, capacity: int) -> SlotCache:
        return SlotCache(self.model.shape, rows, capacity, self.model.dtype, self.model.device, self.needs.tracks)

    def _new_ring(self) -> RecentQueries | None:
        if not self.needs.queries:
            return None
        return RecentQueries.empty(self.model.shape, 1, self.needs.queries, self.model.dtype, self.model.device)

    # -- eviction ------------------------------------------------------------------------------------------------------

    def _evict_due(self) -> None:
        if not self.policy.bounded:
            return
        alike: dict[tuple, list[int]] = defaultdict(list)  # rows that hold and keep equally many evict together
        for index, row in enumerate(self.rows):
            seen, held = self.cache.seen[index], self.cache.held[index]
            if held > row.budget.total and self.policy.due(seen, held, row.budget):
                alike[held, row.budget].append(index)
        for indices in alike.values():
            self._evict([self.rows[i] for i in indices], indices, self.cache, self.recent, self.state)

    def _evict(self, rows: list[Row], indices: list[int], cache: SlotCache, ring, state: State) -> None:
        budget, n = rows[0].budget, cache.held[indices[0]]
        everyone = len(indices) == cache.rows
        index = torch.tensor(indices, device=self.model.device)
        named = cache.slots(indices, n)
        positions = named.pop("position")
        keys, values = named.pop("keys"), named.pop("values")
        slot = torch.arange(n, device=self.model.device)
        slots = Slots(
            keys=keys,
            values=values,
            positions=positions,
            candidates=((slot >= budget.front) & (slot < n - budget.recent))[None, None, None],
            budget=budget,
            tracks=named,
            queries=None if ring is None else ring.queries if everyone else ring.queries.index_select(1, index),
            query_positions=None if ring is None else ring.positions[index],
        )
        own = state if everyone else {name: x.index_select(0, index) for name, x in state.items()}
        numbers = draws.Draws(
            self.seed, [row.sample for row in rows], [len(row.events) for row in rows], self.model.device
        )
        ranking = self.policy.rank(slots, own, numbers)
        if not everyone:
            for name, x in own.items():
                state[name].index_copy_(0, index, x)
        priority = ranking.priority.expand(positions.shape)
        self._nan |= priority.isnan().any()
        keep, gone = choose(priority, budget.front, budget.recent, budget.total)
        seen = torch.tensor([cache.seen[i] for i in indices], device=self.model.device)[None, :, None, None]
        kept_reason = torch.as_tensor(ranking.reason, dtype=torch.uint8, device=self.model.device)
        kept_reason = kept_reason.expand(positions.shape).gather(3, keep)
        shield = protection(positions.gather(3, keep), seen, budget)
        left = positions.gather(3, gone), named["reason"].gather(3, gone)
        cache.evict(indices, keep, torch.where(shield > 0, shield, kept_reason))
        for row, i in enumerate(indices):
            where, why = (x[:, row].to("cpu", non_blocking=True) for x in left)
            rows[row].events.append((cache.seen[i], where, why))

    # -- the end of rows -------------------------------------------------------------------------------------------------

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
        self.rows = [self.rows[i] for i in stay]

    def _write_down(self, row: Row) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the events' copies to the host must have arrived
        if self._nan.item():
            raise FloatingPointError(f"policy {self.policy.label!r} gave NaN priorities; nothing it kept can be trusted")
        shape, events = self.model.shape, row.events
        prefilled = self.cache is not None
        index = self.rows.index(row)
        seen = self.cache.seen[index] if prefilled else 0
        death = np.full((shape.layers, shape.kv_heads, seen), len(events), dtype=np.int32)
        reason = np.zeros(death.shape, dtype=np.uint8)
        for number, (_, positions, reasons) in enumerate(events if prefilled else []):
            np.put_along_axis(death, positions.numpy(), number, axis=2)
            np.put_along_axis(reason, positions.numpy(), reasons.numpy(), axis=2)
        if prefilled:
            held = self.cache.held[index]
            positions, reasons = (self.cache.tracks[name][:, index, :, :held].cpu().numpy() for name in ("position", "reason"))
            np.put_along_axis(reason, positions, reasons, axis=2)
        steps = np.array([seen for seen, _, _ in events] if prefilled else [], dtype=np.int64)
        row.retention = Retention(steps, death, reason, len(row.prompt), tuple(range(shape.layers)))
        mean = row.held_sum / row.steps if row.steps else float(row.peak)
        row.meter = Meter(
            mean_slots=mean,
            peak_slots=row.peak,
            prefill_peak_slots=row.prefill_peak,
            attended_slots=mean,
            kv_bytes=self.cache.kv_bytes if prefilled else 0,
            state_bytes=self._state_bytes() if prefilled else 0,
            evictions=len(steps),
            bounded=self.policy.bounded,
        )

    def _state_bytes(self) -> int:
        state = sum(x[:1].numel() * x.element_size() for x in self.state.values())
        return self.cache.track_bytes + state + (self.recent.bytes_per_row if self.recent is not None else 0)


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn; greedy at temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"sampling needs temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0, got {self}")

    @classmethod
    def of(cls, model: Model, sampling: str | None, temperature, top_p, top_k) -> Sampler:
        """Greedy, or the model's generation config with ``sampling="model"``; explicit values override."""
        if sampling not in (None, "greedy", "model"):
            raise ValueError(f"sampling must be 'greedy' or 'model', got {sampling!r}")
        config = getattr(model.lm, "generation_config", None) if sampling == "model" else None
        chosen = {"temperature": 1.0 if config is not None else 0.0, "top_p": 1.0, "top_k": 0}
        if config is not None and config.do_sample is False:
            chosen["temperature"] = 0.0
        for name, explicit in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k)):
            from_config = getattr(config, name, None)
            if explicit is not None:
                chosen[name] = explicit
            elif from_config is not None:
                chosen[name] = from_config
        if temperature is None and config is None and (top_p is not None or top_k is not None):
            chosen["temperature"] = 1.0
        return cls(**chosen)

    def draw(self, logits: torch.Tensor, seed: int, rows: Sequence[Row]) -> torch.Tensor:
        """Return one token per row, int64 ``[rows]``, from logits ``[rows, vocabulary]``."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits, order = (logits.double() / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            logits[:, self.top_k :] = -torch.inf
        probability = logits.softmax(-1)
        before = probability.cumsum(-1) - probability
        probability = torch.where(before < self.top_p, probability, 0.0)  # the first token is always in
        total = probability.cumsum(-1)
        uniform = draws.token_uniform(
            seed, [row.sample for row in rows], [len(row.tokens) for row in rows], logits.device
        )
        place = torch.searchsorted(total, (uniform * total[:, -1])[:, None])
        return order.gather(1, place.clamp(max=order.shape[1] - 1))[:, 0]


def generate(
    model: Model,
    prompt,
    policy: str | Policy = "full",
    budget: Budget | None = None,
    max_new_tokens: int = 512,
    seed: int = 0,
    *,
    sampling: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    raw: bool = False,
    stop_on_loop: bool = False,
    stop: threading.Event | None = None,
    progress: bool = True,
) -> Run | list[Run]:
    """Let a model write while its cache is being evicted.

    Parameters
    ----------
    model : Model
    prompt : str, list of chat messages, list of token ids, or a list of these
        A list of prompts is a batch and returns a list in order; each row does exactly what it would do alone.
    policy : str or Policy
    budget : Budget, optional
        Needed by every policy but ``full``, which ignores it.
    max_new_tokens : int
    seed : int
        Keys every draw of the policy and of the sampling.
    sampling : {"greedy", "model"}, optional
        Greedy by default; "model" takes the model's generation config. ``temperature``, ``top_p`` and ``top_k``
        override either.
    raw : bool
        Take a string verbatim instead of as a chat message.
    stop_on_loop : bool
        End a row as soon as its end repeats itself; otherwise a loop is labelled when the length is reached.
    stop : threading.Event, optional
        Set from another thread, it ends the run like Ctrl-C does.
    progress : bool
        Show a progress bar on long runs.

    Returns
    -------
    Run or list of Run
        After Ctrl-C the partial run, with status "stopped".

    Raises
    ------
    BudgetError, UnknownPolicyError, TypeError, ValueError
        Bad input; nothing has been computed then.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    policy = policies.get(policy)
    sampler = Sampler.of(model, sampling, temperature, top_p, top_k)
    batch = is_batch(prompt)
    prompts = [model.encode(one, raw=raw) for one in (prompt if batch else [prompt])]
    rows = make_rows(prompts, policy, budget, max_new_tokens)
    session = Session(model, policy, rows, max_new_tokens, seed)
    with session, progress_bar(max_new_tokens, policy.label, progress) as bar:
        decode(session, sampler, stop_on_loop=stop_on_loop, stop=stop, bar=bar)
    runs = [_to_run(model, policy, row, seed) for row in rows]
    return runs if batch else runs[0]


def decode(session: Session, sampler: Sampler, *, stop_on_loop=False, stop=None, bar=None, feed_last=False) -> None:
    """Run the loop until every row has ended; rows that Ctrl-C or ``stop`` cuts short get the status "stopped".

    With ``feed_last`` the last sampled token is fed too, so that a recording has its signals.
    """
    try:
        logits = session.prefill()
        while session.rows:
            if stop is not None and stop.is_set():
                break
            logits = _step(session, sampler, logits, stop_on_loop, feed_last)
            if bar is not None:
                bar.update()
    except KeyboardInterrupt:
        pass  # the rows below say so
    with uninterrupted():
        for row in session.rows:
            row.status = "stopped"
        session.finish(session.rows)


def _step(session: Session, sampler: Sampler, logits: torch.Tensor, stop_on_loop: bool, feed_last: bool) -> torch.Tensor:
    """Sample one token per row, let ended rows leave, and feed the others' tokens; return the next logits."""
    rows = session.rows
    tokens = sampler.draw(logits, session.seed, rows)
    for row, token in zip(rows, tokens.tolist(), strict=True):
        row.tokens.append(token)
        row.status = _status(row.tokens, session, stop_on_loop)
    if feed_last:
        logits = session.feed(tokens[:, None])[:, -1]
    stay = [index for index, row in enumerate(rows) if row.status is None]
    if len(stay) < len(rows):
        with uninterrupted():
            session.finish([row for row in rows if row.status is not None])
        tokens, logits = tokens[stay], logits[stay]
    if session.rows and not feed_last:
        logits = session.feed(tokens[:, None])[:, -1]
    return logits


def _status(tokens: list[int], session: Session, stop_on_loop: bool) -> str | None:
    """Tell how a row has ended, None if it goes on."""
    if tokens[-1] in session.model.stop_tokens:
        return "finished"
    if len(tokens) >= session.new_tokens:
        return "loop" if find_loop(tokens) else "length"
    return "loop" if stop_on_loop and len(tokens) % 16 == 0 and find_loop(tokens) else None


def find_loop(tokens: Sequence[int], longest: int = 128, repeats: int = 4, least: int = 32) -> int:
    """Return the period of a loop at the end of ``tokens``, 0 if there is none.

    A loop is a stretch of at most ``longest`` tokens that stands at the end at least ``repeats`` times in a row, and
    over at least ``least`` tokens.

    Examples
    --------
    >>> find_loop([9, 8] + [1, 2, 3] * 20), find_loop(list(range(100)))
    (3, 0)
    """
    tail = np.asarray(tokens[-longest * repeats :])
    for period in range(1, longest + 1):
        span = max(period * repeats, least)
        if len(tail) >= span and (tail[-span + period :] == tail[-span:-period]).all():
            return period
    return 0


def is_batch(prompt) -> bool:
    """Tell whether a prompt is a list of prompts: of strings, of chats or of lists of ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and not isinstance(prompt[0], (dict, int, np.integer))


def make_rows(prompts: list[list[int]], policy: Policy, budget: Budget | None, new_tokens: int) -> list[Row]:
    """Return one row per prompt, its budget resolved."""
    if policy.bounded and not isinstance(budget, Budget):
        raise BudgetError(
            f"policy {policy.label!r} needs a budget, got {budget!r}; pass epiviz.Budget(total=…), or policy='full'"
        )
    keys = draws.sample_keys(prompts)
    return [
        Row(prompt, key, budget.resolve(len(prompt), new_tokens) if policy.bounded else None)
        for prompt, key in zip(prompts, keys, strict=True)
    ]


def _to_run(model: Model, policy: Policy, row: Row, seed: int) -> Run:
    spans = None if model.tokenizer is None else token_spans(model.tokenizer, row.prompt + row.tokens)
    return Run(
        row.tokens, row.status, row.retention, row.meter, row.prompt, spans, policy.label, model.name, row.budget, seed
    )


def progress_bar(total: int, label: str, show: bool) -> tqdm:
    """A bar that appears only if the work takes more than three seconds."""
    return tqdm(total=total, desc=label, unit="token", disable=not show, delay=3, mininterval=0.5, leave=False)


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
            else:
                raise KeyboardInterrupt
