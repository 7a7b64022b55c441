"""Traces, replays and runs without a model: what the reader needs to see of them, and nothing else."""

from types import SimpleNamespace

import numpy as np

from epiviz.retention import Reason, Retention
from epiviz.text import Spans, join_bytes

TALK = (
    "so the sum of both sides must be even and we can subtract one more from each term wait that is not right let me "
    "check again if x equals seven then y is twelve minus five which gives the same result as before hence"
)
WORDS = TALK.split()


def spans_of(pieces: list[str]) -> Spans:
    """Spans of given token texts, which may hold what no tokenizer would write (lone surrogates)."""
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return Spans("".join(pieces), offsets, np.zeros(len(pieces), dtype=bool))


def words(tokens: int, seed: int) -> Spans:
    rng = np.random.default_rng(seed)
    pieces = [b" " + WORDS[rng.integers(len(WORDS))].encode() for _ in range(tokens)]
    for i in range(12, tokens, 17):
        pieces[i] = rng.choice([b".", b",", b".\n\n", b"\n"])
    if tokens > 40:
        pieces[31:33] = [bytes([0xF0, 0x9F, 0x99]), bytes([0x82])]  # one emoji in two tokens
    return join_bytes(pieces)


def make_trace(tokens=500, layers=8, heads=2, prompt=20, seed=0, spans=None):
    rng = np.random.default_rng(seed)
    spans = words(tokens, seed) if spans is None else spans
    tokens = len(spans)
    surprisal, entropy = rng.exponential(1.5, (2, tokens)).astype(np.float32)
    surprisal[:1] = entropy[:1] = np.nan
    return SimpleNamespace(
        name=f"synthetic-{seed}",
        spans=spans,
        tokens=rng.integers(0, 50_000, tokens),
        prompt_length=min(prompt, tokens),
        displacement=rng.gamma(3.0, 2.0, (layers, tokens)).astype(np.float32),
        value_range=rng.gamma(5.0, 1.0, (layers, heads, tokens)).astype(np.float32),
        surprisal=surprisal,
        entropy=entropy,
    )


def make_retention(fed: int, budget: int, buffer=32, layers=4, heads=2, prompt=20, seed=0, uniform=False) -> Retention:
    """A random policy that keeps four sinks and the newest eight tokens."""
    rng = np.random.default_rng(seed)
    steps = np.arange(budget + buffer, fed + 1, buffer, dtype=np.int64)
    death = np.full((layers, heads, fed), len(steps), dtype=np.int32)
    reason = np.zeros((layers, heads, fed), dtype=np.uint8)
    for layer in range(layers):
        for head in range(heads):
            for event, step in enumerate(steps):
                held = np.flatnonzero(death[layer, head, :step] == len(steps))
                middle = held[(held >= 4) & (held < step - 8)]
                drop = rng.choice(middle, size=len(held) - budget, replace=False)
                death[layer, head, drop] = event
                kept = np.setdiff1d(held, drop)
                reason[layer, head, kept] = Reason.TOP
                reason[layer, head, kept[kept % 5 == 0]] = Reason.RESERVED
                reason[layer, head, kept[kept < 4]] = Reason.SINK
                reason[layer, head, kept[kept >= step - 8]] = Reason.RECENT
    if uniform:
        death[:], reason[:] = death[:1, :1], reason[:1, :1]
    return Retention(steps, death, reason, prompt, tuple(range(layers)))


def make_budget(total: int, buffer=32):
    return SimpleNamespace(total=total, sinks=4, recent=8, buffer=buffer)


def make_replay(trace, policy="random", budget=100, seed=0, **kwargs):
    retention = make_retention(len(trace.tokens), budget, prompt=trace.prompt_length, seed=seed, **kwargs)
    return SimpleNamespace(trace=trace, policy=policy, budget=make_budget(budget), retention=retention, attended=None)


def make_run(policy="epikv", generated=380, budget=100, prompt=20, shared=150, seed=0, **kwargs):
    """A run; all runs begin with the same ``shared`` tokens."""
    common, own = words(shared, 1), words(prompt + generated - shared, 2 + seed)
    pieces = [*common.pieces, *own.pieces]
    ids = np.concatenate([np.arange(shared), 1000 * (seed + 1) + np.arange(len(own))])
    return SimpleNamespace(
        spans=spans_of(pieces),
        prompt_tokens=ids[:prompt].tolist(),
        tokens=ids[prompt:].tolist(),
        prompt_length=prompt,
        retention=make_retention(prompt + generated - 1, budget, prompt=prompt, seed=seed, **kwargs),
        policy=policy,
        budget=make_budget(budget),
        status="length",
        meter=SimpleNamespace(mean_slots=112.4),
        attended=None,
    )


HOSTILE = [
    "<script>document.title='hacked'</script>",
    "</script><img src=x onerror=\"document.title='hacked'\">",
    "\u202eright to left override\u202c",
    "\x00",
    "a" * 10_000,
    "\ud83d",
    "\udc00 lone",
    " مرحبا بالعالم",
    " 漢字かな",
    "👩‍👩‍👧‍👦",
    "é̂",
    "&amp;<!--",
    "\r\n",
    "\t$x^2$ `code` ${1}",
    "<!--<script>",
    "\u2067isolate\u2069\u200f",
    "🏳️‍🌈👩🏽‍💻🇩🇪",
]
