"""The one decode loop: sample, feed, and let ended rows leave; the engine evicts when due."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from epiviz import draws, policies
from epiviz.attended import Attended
from epiviz.engine import Meter, Row, Session, make_rows, uninterrupted
from epiviz.models import Model
from epiviz.policies.base import Budget, Policy, ResolvedBudget
from epiviz.retention import Retention
from epiviz.text import Spans, token_spans


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
    positions : str
    attended : Attended or None
        What a selection attended; None if the policy selects nothing.
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
    positions: str = "absolute"
    attended: Attended | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_tokens)

    @property
    def text(self) -> str:
        if self.spans is None:
            raise ValueError("the model has no tokenizer; read run.tokens instead of run.text")
        ended = self.status == "finished"
        return self.spans.slice(self.prompt_length, len(self.spans) - ended)


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn; greedy at temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        fits = self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0 and self.top_k == int(self.top_k)
        if not fits:
            raise ValueError(f"sampling needs temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0, got {self}")

    @classmethod
    def of(cls, model: Model, sampling: str | None, temperature, top_p, top_k) -> Sampler:
        """Greedy, or the model's generation config with ``sampling="model"``; explicit values override."""
        if sampling not in (None, "greedy", "model"):
            raise ValueError(f"sampling must be 'greedy' or 'model', got {sampling!r}")
        config = getattr(model.lm, "generation_config", None) if sampling == "model" else None
        chosen = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        if config is not None and config.do_sample:  # unset means greedy, as in the library
            if getattr(config, "min_p", None):
                raise ValueError(f"the model's generation config asks for min_p={config.min_p}, which is not supported")
            given = (config.temperature, config.top_p, config.top_k)
            usual = (1.0, 1.0, 50)  # what the library takes for values that are not set
            chosen = {
                name: default if value is None else value
                for name, value, default in zip(chosen, given, usual, strict=True)
            }
        explicit = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        chosen |= {name: value for name, value in explicit.items() if value is not None}
        if temperature is None and chosen["temperature"] == 0 and (top_p is not None or top_k is not None):
            chosen["temperature"] = 1.0
        return cls(**chosen)

    def draw(self, logits: torch.Tensor, seed: int, rows: Sequence[Row]) -> torch.Tensor:
        """Return one token per row, int64 ``[rows]``, from logits ``[rows, vocabulary]``."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits, order = (logits.double() / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            logits[:, int(self.top_k) :] = -torch.inf
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
    positions: str = "absolute",
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
    positions : {"absolute", "cache-relative", "rerotated"}
        What new tokens and kept keys are rotated by; see :mod:`epiviz.positions`.
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
    batch = is_batch(prompt)
    session, sampler = prepare(
        model,
        prompt if batch else [prompt],
        policy,
        budget,
        max_new_tokens,
        seed,
        positions=positions,
        sampling=sampling,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        raw=raw,
    )
    rows = session.rows
    with session, progress_bar(max_new_tokens, session.policy.label, progress) as bar:
        decode(session, sampler, stop_on_loop=stop_on_loop, stop=stop, bar=bar)
    runs = [to_run(session, row) for row in rows]
    return runs if batch else runs[0]


def prepare(
    model: Model,
    prompts: Sequence,
    policy: str | Policy,
    budget: Budget | None,
    max_new_tokens: int,
    seed: int,
    *,
    positions: str = "absolute",
    sampling: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    raw: bool = False,
) -> tuple[Session, Sampler]:
    """Return what :func:`decode` takes; everything is checked, and nothing has been computed yet."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    policy = policies.get(policy)
    sampler = Sampler.of(model, sampling, temperature, top_p, top_k)
    rows = make_rows([model.encode(prompt, raw=raw) for prompt in prompts], policy, budget, max_new_tokens)
    return Session(model, policy, rows, max_new_tokens, seed, positions), sampler


def decode(
    session: Session,
    sampler: Sampler,
    *,
    stop_on_loop: bool = False,
    stop: threading.Event | None = None,
    bar: tqdm | None = None,
    on_token: Callable[[list[Row]], None] | None = None,
    after_step: Callable[[Session, torch.Tensor], torch.Tensor] | None = None,
    feed_last: bool = False,
) -> None:
    """Run the loop until every row has ended; rows that Ctrl-C or ``stop`` cuts short get the status "stopped".

    Parameters
    ----------
    session : Session
        Entered, its prompts not yet fed.
    sampler : Sampler
    stop_on_loop, stop
        As in :func:`generate`.
    bar : tqdm, optional
        Moves by one with each step.
    on_token : callable, optional
        Called with the rows once each has a new token: the device has been waited for, so all that their tokens and
        events tell lies on the host.
    after_step : callable, optional
        Gets the session, whose ended rows have left, and the next logits ``[rows, vocabulary]``; it may let other rows
        join and returns the logits of all.
    feed_last : bool
        Feed the last sampled token too, so that a recording has its signals.
    """
    try:
        logits = session.prefill()
        while session.rows:
            if stop is not None and stop.is_set():
                break
            logits = step(session, sampler, logits, stop_on_loop, on_token, feed_last)
            if after_step is not None:
                logits = after_step(session, logits)
            if bar is not None:
                bar.update()
    except KeyboardInterrupt:
        pass  # the rows below say so
    with uninterrupted():
        for row in session.rows:
            row.status = "stopped"
        session.finish(session.rows)


def step(
    session: Session,
    sampler: Sampler,
    logits: torch.Tensor,
    stop_on_loop: bool = False,
    on_token: Callable[[list[Row]], None] | None = None,
    feed_last: bool = False,
) -> torch.Tensor:
    """Sample one token per row, let ended rows leave, and feed the others' tokens.

    Parameters
    ----------
    session, sampler, stop_on_loop, on_token, feed_last
        As in :func:`decode`.
    logits : ``[rows, vocabulary]``
        They predict the tokens to be sampled.

    Returns
    -------
    ``[rows that stay, vocabulary]``
        The next logits.
    """
    rows = session.rows
    tokens = sampler.draw(logits, session.seed, rows)
    for row, token in zip(rows, tokens.tolist(), strict=True):
        row.tokens.append(token)
        row.status = _status(row.tokens, session, stop_on_loop)
    if on_token is not None:
        on_token(rows)
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


def find_loop(tokens: Sequence[int], longest: int = 1024, repeats: int = 5, least: int = 50) -> int:
    """Return the period of a loop at the end of ``tokens``, 0 if there is none.

    A loop is a stretch of at most ``longest`` tokens that stands at the end at least ``repeats`` times in a row, and
    over at least ``least`` tokens: at least ten tokens, five times.

    Examples
    --------
    >>> find_loop([9, 8] + [1, 2, 3] * 20), find_loop(list(range(100)))
    (3, 0)
    """
    tail = np.asarray(tokens[-longest * repeats :])
    for period in np.flatnonzero(tail[-2 : -longest - 2 : -1] == tail[-1]) + 1 if len(tail) else ():
        span = max(period * repeats, least)
        if len(tail) >= span and (tail[-span + period :] == tail[-span:-period]).all():
            return int(period)
    return 0


def is_batch(prompt) -> bool:
    """Tell whether a prompt is a list of prompts: of strings, of chats or of lists of ids."""
    if not isinstance(prompt, (list, tuple, np.ndarray, torch.Tensor)) or not len(prompt):
        return False
    return not isinstance(prompt[0], dict) and (isinstance(prompt[0], str) or np.ndim(prompt[0]) > 0)


def to_run(session: Session, row: Row) -> Run:
    """Return a row that has ended as a run."""
    tokenizer = session.model.tokenizer
    return Run(
        tokens=row.tokens,
        status=row.status,
        retention=row.retention,
        meter=row.meter,
        prompt_tokens=row.prompt,
        spans=None if tokenizer is None else token_spans(tokenizer, row.prompt + row.tokens),
        policy=session.policy.label,
        model=session.model.name,
        budget=row.budget,
        seed=session.seed,
        positions=session.positions,
        attended=row.attended,
    )


def progress_bar(total: int, label: str, show: bool, unit: str = "token", kind: type = tqdm, initial: int = 0) -> tqdm:
    """A bar that appears only if the work takes more than three seconds; ``EPIVIZ_PROGRESS=off`` hides all."""
    hidden = not show or os.environ.get("EPIVIZ_PROGRESS") == "off"
    look = {"desc": label, "unit": unit, "disable": hidden, "delay": 3, "mininterval": 0.5, "leave": False}
    return kind(total=total, initial=initial, **look)
