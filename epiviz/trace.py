"""Trace: a text with the signals recorded in one full-cache pass, in one file that needs no model to be read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from epiviz import policies, signals
from epiviz.decode import Sampler, decode, progress_bar
from epiviz.engine import Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Needs, New
from epiviz.results import write_atomically
from epiviz.text import Spans, token_spans

FORMAT = 1
CHUNK = 256  # tokens per pass when a given text is read


class TraceFileError(ValueError):
    """A file that is no readable trace."""


class ForeignTraceError(ValueError):
    """A trace or token ids of another tokenizer."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Prompt + continuation with the signals of one full-cache pass.

    Attributes
    ----------
    tokens : int64 ``[tokens]``
    prompt_length : int
    spans : Spans
        The text and the span of each token.
    displacement : float32 ``[layers, tokens]``
        ``‖h_l(t) − h_l(t−1)‖₂`` after each block; 0 at the first token.
    value_range : float32 ``[layers, kv_heads, tokens]``
        max − min over the channels of each value state.
    surprisal, entropy : float32 ``[tokens]``
        In nats: −log p of the token, and the entropy of the distribution it was drawn from. NaN at the first token.
    header : dict
        ``model``, ``tokenizer`` (fingerprint), ``source`` ("generated", "text" or "tokens"), ``status``, ``seed``.
    name : str
        For titles.
    """

    tokens: np.ndarray
    prompt_length: int
    spans: Spans
    displacement: np.ndarray
    value_range: np.ndarray
    surprisal: np.ndarray
    entropy: np.ndarray
    header: dict = field(default_factory=dict)
    name: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        layers, heads, _ = self.value_range.shape
        return (
            f"Trace({self.name!r}: {self.prompt_length} prompt + {len(self) - self.prompt_length} tokens, "
            f"{layers} layers × {heads} KV heads, {self.header.get('source', '?')} by {self.header.get('model', '?')})"
        )

    @property
    def text(self) -> str:
        """Prompt and continuation."""
        return self.spans.text

    @property
    def status(self) -> str:
        return self.header.get("status", "finished")

    @cached_property
    def continuation(self) -> str:
        """The text after the prompt."""
        return self.spans.slice(self.prompt_length)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what a replay depends on: the token ids, the prompt's length and the tokenizer."""
        said = f"{self.header.get('tokenizer')} {self.prompt_length} ".encode()
        return hashlib.sha256(said + np.asarray(self.tokens, dtype="<i8").tobytes()).hexdigest()[:16]

    def save(self, path: str | Path) -> Path:
        """Write the trace as one safetensors file: arrays, and a JSON header with the text."""
        path = Path(path)
        header = {
            "format": FORMAT,
            "prompt_length": self.prompt_length,
            "text": self.text,
            "name": self.name,
            **self.header,
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS} | {
            "offsets": self.spans.offsets,
            "partial": self.spans.partial,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        metadata = {"epiviz": json.dumps(header)}
        write_atomically(path, lambda temporary: save_file(arrays, str(temporary), metadata=metadata))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace; no model and no network are needed.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        TraceFileError
            The file is cut off, damaged, or something else; the message says which.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no trace file {path}; record one: epiviz.record(…).save({path.name!r})")
        try:
            with safe_open(str(path), framework="np") as file:
                header = json.loads((file.metadata() or {}).get("epiviz", "null"))
                names = set(file.keys())
                if header is None:
                    raise TraceFileError(f"{path} is a safetensors file, but no trace: it has no epiviz header")
                if missing := {*_ARRAYS, "offsets", "partial"} - names:
                    raise TraceFileError(f"{path} lacks {', '.join(sorted(missing))}; record the trace again")
                arrays = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, json.JSONDecodeError) as error:
            size = path.stat().st_size
            raise TraceFileError(
                f"{path} ({size} bytes) is cut off, damaged or no trace ({error}); copy or record it again"
            ) from error
        if header.pop("format", None) != FORMAT:
            raise TraceFileError(f"{path} was written in another format than {FORMAT}; record the trace again")
        spans = Spans(header.pop("text"), arrays.pop("offsets"), arrays.pop("partial"))
        prompt_length, name = header.pop("prompt_length"), header.pop("name")
        return cls(prompt_length=prompt_length, spans=spans, header=header, name=name, **arrays)

    def check_model(self, model: Model) -> None:
        """Raise :class:`ForeignTraceError` if the trace's ids mean something else to this model."""
        recorded = self.header.get("tokenizer")
        mine = model.tokenizer_fingerprint
        if recorded != mine:
            raise ForeignTraceError(
                f"this trace was recorded with {self.header.get('model')!r} (tokenizer {recorded}), the model "
                f"{model.name!r} has tokenizer {mine}: the same ids mean other text. Record the text again with "
                "epiviz.record(model, prompt=…, text=…)"
            )


_ARRAYS = ("tokens", "displacement", "value_range", "surprisal", "entropy")


class Recorder:
    """Collects the signals of each pass on the host, so that a long text needs no more than its trace."""

    def __init__(self, layers: int):
        self.needs = Needs(hidden=tuple(range(layers)))
        self.passes: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
        self._previous: torch.Tensor | None = None
        self._next: torch.Tensor | None = None  # log-probabilities of the token that comes next

    def observe(self, new: New, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        hidden = torch.stack([new.hidden[layer][0] for layer in self.needs.hidden])
        self._add("displacement", signals.displacement(hidden, self._previous))
        self._previous = hidden[:, -1].clone()  # a view would keep all of the pass
        self._add("value_range", signals.value_range(new.values_of_every_layer[:, 0]))
        log_p = torch.log_softmax(signals.at_least_float32(logits[0]), dim=-1)
        unknown = torch.full_like(log_p[:1], torch.nan) if self._next is None else self._next
        before = torch.cat([unknown, log_p[:-1]])
        self._add("surprisal", -before.gather(1, tokens[0, :, None])[:, 0])
        self._add("entropy", -(before.exp() * before).sum(-1))
        self._add("tokens", tokens[0])
        self._next = log_p[-1:].clone()

    def _add(self, name: str, x: torch.Tensor) -> None:
        x = x if name == "tokens" else x.float()
        self.passes[name].append(x.cpu().numpy())

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts, axis=-1) for name, parts in self.passes.items()}


def record(
    model: Model,
    prompt=None,
    *,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    max_new_tokens: int = 512,
    seed: int = 0,
    raw: bool = False,
    name: str = "",
    sampling: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    progress: bool = True,
) -> Trace:
    """Record a trace with the full cache: the model writes, or it reads a given continuation.

    Parameters
    ----------
    model : Model
    prompt : str, list of chat messages or list of token ids
        May be left out when ``tokens`` are given: then they are all prompt-free continuation of their first token.
    text : str, optional
        Read this continuation instead of writing one; tokenised by the model's own tokenizer.
    tokens : sequence of int, optional
        Read exactly these ids as the continuation.
    max_new_tokens, seed, sampling, temperature, top_p, top_k, raw, progress
        As in :func:`epiviz.generate`.
    name : str
        For titles; the beginning of the prompt if not given.

    Returns
    -------
    Trace
        After Ctrl-C the part recorded so far, with status "stopped".

    Raises
    ------
    ValueError
        An empty prompt, text or token list, or both of the latter.
    """
    if text is not None and tokens is not None:
        raise ValueError("give either a text or token ids to read, not both")
    reads = text is not None or tokens is not None
    if reads:
        if text is not None and model.tokenizer is None:
            raise ValueError(f"{model.name!r} has no tokenizer to read a text with; pass tokens=[…]")
        given = tokens if tokens is not None else model.tokenizer(text, add_special_tokens=False).input_ids
        given = model.check_ids(given)
        if not given:
            raise ValueError("there is nothing to read: the text or token list is empty")
        if prompt is None:
            prompt, given = [int(given[0])], given[1:]
    prompt_ids = model.encode(prompt if prompt is not None else "", raw=raw)
    policy = policies.get("full")
    new_tokens = len(given) if reads else max_new_tokens
    if new_tokens < 0 or (not reads and new_tokens < 1):
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    rows = make_rows([prompt_ids], policy, None, new_tokens)
    recorder = Recorder(model.shape.layers)
    session = Session(model, policy, rows, new_tokens, seed, recorder=recorder)
    with session, progress_bar(new_tokens, "recording", progress) as bar:
        if reads:
            status = _read(session, given, bar)
        else:
            decode(session, Sampler.of(model, sampling, temperature, top_p, top_k), bar=bar, feed_last=True)
            status = rows[0].status
    if not recorder.passes["tokens"]:
        raise KeyboardInterrupt  # before the first pass was done: there is nothing to return
    arrays = recorder.arrays()
    header = {
        "model": model.name,
        "tokenizer": model.tokenizer_fingerprint,
        "source": "generated" if not reads else "text" if text is not None else "tokens",
        "status": status,
        "seed": session.seed,
    }
    ids = arrays["tokens"]
    spans = token_spans(model.tokenizer, ids) if model.tokenizer is not None else _id_spans(ids)
    title = name or (prompt if isinstance(prompt, str) else spans.slice(0, min(len(prompt_ids), len(ids))))[:60]
    return Trace(prompt_length=min(len(prompt_ids), len(ids)), spans=spans, header=header, name=title, **arrays)


def _read(session: Session, given: Sequence[int], bar) -> str:
    """Feed the given continuation in chunks; return the status."""
    tokens = torch.tensor([list(given)], dtype=torch.int64, device=session.model.device)
    try:
        session.prefill()
        for start in range(0, tokens.shape[1], CHUNK):
            chunk = tokens[:, start : start + CHUNK]
            session.feed(chunk)
            bar.update(chunk.shape[1])
    except KeyboardInterrupt:
        return "stopped"
    return "finished"


def _id_spans(ids: np.ndarray) -> Spans:
    """Spans that show bare ids, for models without a tokenizer."""
    from epiviz.text import join_bytes

    return join_bytes(f"{token} ".encode() for token in ids)
