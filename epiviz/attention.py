"""The one seam to attention backends.

During a run every attention call of the model passes through here: the backend that the model was loaded with does
the work, and the seam sees the rotated queries on their way. Fused kernels stay on; no attention matrix is asked for.
A selection (:mod:`epiviz.policies.selection`) is asked here, inside the call, what each query attends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epiviz.models import SEAM_PREFIX, Model
from epiviz.positions import Rotary
from epiviz.signals import at_least_float32, in_score_dtype

if TYPE_CHECKING:
    from epiviz.selector import Selector

_ACTIVE: ContextVar[Seam | None] = ContextVar("epiviz_seam", default=None)
_LOCK = threading.Lock()
_USERS: WeakKeyDictionary = WeakKeyDictionary()  # model -> number of runs that pass through the seam


class RecentQueries:
    """The rotated queries of the last tokens, in a ring.

    Attributes
    ----------
    queries : ``[layers, rows, heads, window, head_dim]``
        In no particular order.
    positions : int64 ``[rows, window]``
        Absolute positions; −1 marks places not yet filled.
    """

    def __init__(self, queries: torch.Tensor, positions: torch.Tensor):
        self.queries, self.positions = queries, positions
        self._next = 0

    @classmethod
    def empty(cls, shape, rows: int, window: int, dtype, device) -> RecentQueries:
        layers = len(shape.evicts)
        queries = torch.zeros(layers, rows, shape.heads, window, shape.head_dim, dtype=dtype, device=device)
        return cls(queries, torch.full((rows, window), -1, device=device))

    @property
    def window(self) -> int:
        return self.positions.shape[1]

    def _places(self, q: int) -> torch.Tensor:
        return (self._next + torch.arange(q, device=self.positions.device)) % self.window

    def write(self, layer: int, queries: torch.Tensor) -> None:
        """Store the queries ``[rows, heads, q, head_dim]`` of one layer's new tokens."""
        last = queries[:, :, -self.window :]
        if last.shape[2] == 1:
            self.queries[layer, :, :, self._next % self.window].copy_(last[:, :, 0])
        else:
            self.queries[layer].index_copy_(2, self._places(last.shape[2]), last)

    def advance(self, positions: torch.Tensor) -> None:
        """Count the tokens at ``positions`` ``[rows, q]`` as stored, once all layers have written theirs."""
        last = positions[:, -self.window :]
        self.positions.index_copy_(1, self._places(last.shape[1]), last)
        self._next += last.shape[1]

    def rotate(self, rows, by: int, rotary: Rotary) -> None:
        """Rotate the queries of some rows further by ``by`` positions."""
        by = torch.tensor(by, device=self.positions.device)
        for layer, rotates in enumerate(rotary.layers):
            if rotates:
                self.queries[layer, list(rows)] = rotary.rotate(self.queries[layer, list(rows)], by)

    def select_rows(self, rows) -> None:
        index = torch.tensor(list(rows), device=self.positions.device)
        self.queries = self.queries.index_select(1, index)
        self.positions = self.positions.index_select(0, index)

    @classmethod
    def stack(cls, rings: list[RecentQueries]) -> RecentQueries:
        """Join the rings of several rows, newest places last in each."""
        shifts = [-(ring._next % ring.window) for ring in rings]
        queries = [ring.queries.roll(shift, dims=3) for ring, shift in zip(rings, shifts, strict=True)]
        positions = [ring.positions.roll(shift, dims=1) for ring, shift in zip(rings, shifts, strict=True)]
        return cls(torch.cat(queries, dim=1), torch.cat(positions, dim=0))

    @property
    def bytes_per_row(self) -> int:
        return self.queries[:, :1].numel() * self.queries.element_size()


def attention_rows(
    queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, score_dtype: str = "float32"
) -> torch.Tensor:
    """Return softmax attention weights, recomputed from queries and keys.

    Parameters
    ----------
    queries : ``[rows, heads, q, head_dim]``
    keys : ``[rows, kv_heads, n, head_dim]``
    visible : bool, broadcasts to ``[rows, kv_heads, q, n]``
        A query that sees nothing gets zeros.
    score_dtype : {"float32", "bfloat16"}
        Precision of logits and weights; the softmax itself is never computed in less than float32.

    Returns
    -------
    ``[rows, heads, q, n]``, at least float32, or bfloat16.
    """
    size, groups = queries.shape[3], queries.shape[1] // keys.shape[1]
    queries, keys = (in_score_dtype(x, score_dtype) for x in (queries, keys))
    logits = torch.einsum("rhgqd,rhnd->rhgqn", queries.unflatten(1, (-1, groups)), keys) / size**0.5
    logits = at_least_float32(logits).masked_fill(~visible.unsqueeze(2), -torch.inf)
    return in_score_dtype(torch.softmax(logits, dim=-1).nan_to_num(0.0).flatten(1, 2), score_dtype)


class Seam:
    """What a run sees of a forward pass: the cache it writes, the queries, the outputs of some decoder blocks."""

    def __init__(self, keep_queries: bool = False) -> None:
        self.cache = None
        self.keep_queries = keep_queries
        self.queries: dict[int, torch.Tensor] = {}
        self.recent: RecentQueries | None = None
        self.selector: Selector | None = None
        self.hidden: dict[int, torch.Tensor] = {}

    def watch(self, module, query: torch.Tensor, scaling: float | None) -> torch.Tensor | None:
        """Take a look at the rotated queries ``[rows, heads, q, head_dim]`` on their way to the backend.

        They are kept on the scale at which logits are ``q · k / √head_dim``; few models use another one.

        Returns
        -------
        bool ``[rows, heads, q, slots]`` or None
            The slots that a selection lets each query attend; None if it may attend all it sees.
        """
        evicts = self.cache.shape.evicts
        wanted = self.keep_queries or self.recent is not None or self.selector is not None
        if module.layer_idx not in evicts or not wanted:
            return None
        layer, usual = evicts.index(module.layer_idx), query.shape[-1] ** -0.5
        query = query if scaling in (None, usual) else query * (scaling / usual)
        if self.recent is not None:
            self.recent.write(layer, query)
        if self.keep_queries:
            self.queries[layer] = query
        return None if self.selector is None else self.selector.visible(layer, query)

    @contextmanager
    def watching(self, cache, recent: RecentQueries | None, selector: Selector | None = None) -> Iterator[None]:
        """Let this seam see the forward passes of this thread, which fill ``cache`` and ``recent``.

        With a ``selector`` each query attends only what that selects.
        """
        self.cache, self.recent, self.selector = cache, recent, selector
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


@contextmanager
def through_seam(model: Model, hidden: tuple[int, ...] = (), keep_queries: bool = False) -> Iterator[Seam]:
    """Route a model's attention through a seam and watch the outputs of the decoder blocks ``hidden``.

    With ``keep_queries`` the queries of the last pass stay readable, per layer.

    On leaving, hooks are gone, and the last run that leaves puts the backend back. Runs in other threads may use the
    same model: each sees its own passes only.
    """
    seam = Seam(keep_queries)
    config = model.lm.config

    def watch(layer: int):
        def hook(module, inputs, output):
            if _ACTIVE.get() is seam:
                seam.hidden[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [model.decoder_layers[layer].register_forward_hook(watch(layer)) for layer in hidden]
    with _LOCK:
        _USERS[model.lm] = _USERS.get(model.lm, 0) + 1
        if not config._attn_implementation.startswith(SEAM_PREFIX):
            config._attn_implementation = _seam_name(config._attn_implementation)
    try:
        yield seam
    finally:
        for handle in handles:
            handle.remove()
        with _LOCK:
            _USERS[model.lm] -= 1
            if not _USERS[model.lm]:
                config._attn_implementation = config._attn_implementation.removeprefix(SEAM_PREFIX)


def _seam_name(backend: str) -> str:
    """Register (once) and name the seam in front of a backend."""
    name = SEAM_PREFIX + backend
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, _make_seam(backend))
        if backend in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[backend])
    return name


def _make_seam(backend: str):
    def attend(module, query, key, value, attention_mask, **kwargs):
        seam = _ACTIVE.get()
        selected = None if seam is None else seam.watch(module, query, kwargs.get("scaling"))
        attention_mask = attention_mask if selected is None else selected
        if backend == "eager":
            return _eager(module, query, key, value, attention_mask, **kwargs)
        if seam is not None and backend.startswith("flash_attention"):
            if selected is None:
                return flash_with_counts(query, seam.cache, module.layer_idx, kwargs.get("scaling")), None
            # The kernel takes one count per row and no mask per head: layers that select go through PyTorch's own.
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, selected, **kwargs)
        if backend == "sdpa" and attention_mask is not None and _copies_heads(query, **kwargs):
            return _grouped(query, key, value, attention_mask, kwargs.get("scaling")), None
        return ALL_ATTENTION_FUNCTIONS[backend](module, query, key, value, attention_mask, **kwargs)

    return attend


def _copies_heads(query, softcap=None, position_bias=None, **kwargs) -> bool:
    """Tell whether transformers would copy keys and values for nothing; a softcap or a bias is its own business."""
    return query.device.type == "cpu" and query.shape[2] > 1 and softcap is None and position_bias is None


def _grouped(query, key, value, attention_mask, scaling: float | None) -> torch.Tensor:
    """PyTorch's own attention, which reads each KV head for its group of query heads in place.

    With a mask, transformers copies keys and values for every query head, at each layer and chunk: the results are the
    same bit for bit, two to ten times slower in short chunks, and the growing copies of a 16k-token text leave
    gigabytes of holes in the heap (torch 2.13).
    """
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended.transpose(1, 2).contiguous()


def _eager(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Plain softmax attention: what a model's own eager function computes, which no registry lists."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    weights = torch.softmax(logits, dim=-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def flash_with_counts(query: torch.Tensor, cache, layer: int, scaling: float | None) -> torch.Tensor:
    """Attend with the flash kernel that takes a count per row instead of a mask.

    The new tokens are the last of each row's slots, and the kernel aligns its causal rule with the end of each row:
    that is the slot mask, without a mask.

    Parameters
    ----------
    query : ``[rows, heads, q, head_dim]``
    cache : SlotCache
        Already holds the new tokens' keys and values.

    Returns
    -------
    ``[rows, q, heads, head_dim]``
    """
    from flash_attn import flash_attn_with_kvcache

    counts = (cache.held_on_device + query.shape[2]).int()
    return flash_attn_with_kvcache(
        query.transpose(1, 2),
        cache.keys[layer].transpose(1, 2),
        cache.values[layer].transpose(1, 2),
        cache_seqlens=counts,
        softmax_scale=scaling,
        causal=True,
    )
