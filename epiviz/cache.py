"""SlotCache: preallocated key-value slots that are written in place and thinned out at evictions.

Two numbers are kept apart: tokens *seen* drive positions, slots *held* drive masks. Both live on the host, one per
row, so that nothing in the decode loop has to wait for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from epiviz.models import ModelShape
from epiviz.policies.order import newest_first_order
from epiviz.positions import Rotary
from epiviz.retention import Reason


class SlotLayer(CacheLayerMixin):
    """One layer's view of the slots (or of a window), in the form transformers asks for."""

    def __init__(self, cache: SlotCache, layer: int, store: SlotCache | Windows):
        super().__init__()
        # Weakly: in a circle the slots would outlive their run, until Python next looks for circles.
        self._cache, self._layer, self._store = weakref.proxy(cache), layer, weakref.proxy(store)
        self.is_sliding = isinstance(store, Windows)
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to do: the slots are allocated with the cache."""

    def update(self, key_states, value_states, *args, **kwargs):
        return self._store.write(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        return max(self._cache.seen, default=0)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return max(self._cache.held, default=0) + length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity


class Windows:
    """The last tokens of every sliding-window layer of a hybrid model, in a ring that never evicts.

    Attributes
    ----------
    keys, values : ``[layers, rows, kv_heads, window, head_dim]``
    positions : int64 ``[rows, window]``
        −1 marks places not yet filled.
    """

    def __init__(self, shape: ModelShape, rows: int, dtype: torch.dtype, device: torch.device):
        size = (len(shape.slides), rows, shape.kv_heads, shape.window, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.full((rows, shape.window), -1, device=device)
        self.new: dict[str, list] = {"keys": [None] * size[0], "values": [None] * size[0]}

    @property
    def window(self) -> int:
        return self.positions.shape[1]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's window and the new tokens behind it; :meth:`advance` moves them in."""
        self.new["keys"][layer], self.new["values"][layer] = keys, values
        return torch.cat([self.keys[layer], keys], dim=2), torch.cat([self.values[layer], values], dim=2)

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what new tokens at ``positions`` ``[rows, q]`` may attend, bool ``[rows, 1, q, window + q]``."""
        key = torch.cat([self.positions, positions], dim=1)[:, None]
        query = positions[:, :, None]
        return ((key >= 0) & (key <= query) & (key > query - self.window))[:, None]

    def advance(self, positions: torch.Tensor) -> None:
        """Move the new tokens into the ring, each over the one that has left the window."""
        last = positions[:, -self.window :]
        place = last % self.window
        self.positions.scatter_(1, place, last)
        for name, storage in (("keys", self.keys), ("values", self.values)):
            for layer, new in enumerate(self.new[name]):
                index = place[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
                storage[layer].scatter_(2, index, new[:, :, -self.window :])

    def copy_row(self, row: int, source: Windows) -> None:
        self.keys[:, row], self.values[:, row] = source.keys[:, 0], source.values[:, 0]
        self.positions[row] = source.positions[0]

    def join_rows(self, other: Windows) -> None:
        """Take over the rows of other windows, behind one's own."""
        self.keys = torch.cat([self.keys, other.keys], dim=1)
        self.values = torch.cat([self.values, other.values], dim=1)
        self.positions = torch.cat([self.positions, other.positions])

    def select_rows(self, index: torch.Tensor) -> None:
        self.keys, self.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        self.positions = self.positions.index_select(0, index)


class SlotCache(Cache):
    """Key-value slots of all layers for a batch of rows.

    Rows are left-aligned: row ``r`` uses slots ``0 … held[r] − 1``, sorted by position in every head.

    Parameters
    ----------
    shape : ModelShape
    rows, capacity : int
        Sequences, and slots per layer and KV head.
    dtype, device
        Of keys and values.
    tracks : mapping of str to torch.dtype
        Values kept per slot for the policy; they move with the slots.
    rotary : Rotary, optional
        Rotate kept keys to their slot at every eviction. Each time this starts from the key as it was written: rotating
        a rounded key again and again would leave its slow channels behind (in bfloat16 they do not move at all).

    Attributes
    ----------
    keys, values : ``[layers, rows, kv_heads, capacity, head_dim]``
        Of the layers that evict, in order.
    windows : Windows or None
        The sliding layers of a hybrid model.
    tracks : dict of str to ``[layers, rows, kv_heads, capacity]``
        ``position`` (int64) and ``reason`` (uint8) are always among them.
    seen, held : list of int
    """

    def __init__(
        self,
        shape: ModelShape,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        tracks: Mapping[str, torch.dtype] | None = None,
        rotary: Rotary | None = None,
    ):
        self.shape = shape
        self.windows = Windows(shape, rows, dtype, device) if shape.slides else None
        stores = {layer: (self, index) for index, layer in enumerate(shape.evicts)}
        stores |= {layer: (self.windows, index) for index, layer in enumerate(shape.slides)}
        places = [stores[layer] for layer in range(shape.layers)]
        super().__init__(layers=[SlotLayer(self, index, store) for store, index in places])
        size = (len(shape.evicts), rows, shape.kv_heads, capacity)
        # Zeros, not empty memory: masked slots still enter the matrix product, and 0 · NaN would be NaN.
        self.keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.rotary = rotary
        self.written_keys = torch.zeros_like(self.keys) if rotary else None
        kinds = {"position": torch.int64, "reason": torch.uint8, **(tracks or {})}
        if rotary:
            kinds["rotary"] = torch.int64
        self.tracks = {name: torch.zeros(size, dtype=kind, device=device) for name, kind in kinds.items()}
        self._reset_counts([0] * rows, [0] * rows)

    def __deepcopy__(self, memo):
        raise TypeError("a SlotCache belongs to its run and has no copies; start a run of its own")

    # -- counts ------------------------------------------------------------------------------------------------------

    def _reset_counts(self, seen: Sequence[int], held: Sequence[int]) -> None:
        self.seen, self.held = list(seen), list(held)
        # Device copies for index arithmetic; they change with the host's numbers and are never read back.
        self.held_on_device = torch.tensor(self.held, device=self.keys.device)
        self.seen_on_device = torch.tensor(self.seen, device=self.keys.device)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def even(self) -> bool:
        """All rows hold equally many slots, so that plain slices replace indices and masks."""
        return len(set(self.held)) <= 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slots before the new ones: transformers builds its causal masks from here."""
        return max(self.held, default=0)

    def new_positions(self, q: int) -> torch.Tensor:
        """Return the absolute positions of the next ``q`` tokens, int64 ``[rows, q]``."""
        return self.seen_on_device[:, None] + torch.arange(q, device=self.keys.device)

    def next_slots(self, q: int) -> torch.Tensor:
        """Return the slots that the next ``q`` tokens will take, int64 ``[rows, q]``."""
        return self.held_on_device[:, None] + torch.arange(q, device=self.keys.device)

    def mask(self, q: int) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """Return what ``q`` new tokens may attend, bool ``[rows, 1, q, slots]``; for hybrid models, per layer type.

        None where all rows are alike and the backend's causal rule says the same: one new token, or an empty cache.
        """
        if self.windows is not None:
            sliding = self.windows.mask(self.new_positions(q))
            return {"full_attention": self.visible(q), "sliding_attention": sliding}
        return None if self.even and (q == 1 or self.held[0] == 0) else self.visible(q)

    def visible(self, q: int) -> torch.Tensor:
        """Return which slots ``q`` new tokens may attend, bool ``[rows, 1, q, slots]``: all up to themselves."""
        slot = torch.arange(max(self.held) + q, device=self.keys.device)
        return (slot <= self.next_slots(q)[:, :, None])[:, None]

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' keys and values in one layer; return all slots that are in use, new ones included."""
        q = keys.shape[2]
        end = max(self.held) + q
        if end > self.capacity:
            raise RuntimeError(f"the cache holds {max(self.held)} of {self.capacity} slots and cannot take {q} more")
        self._put(self.keys[layer], keys, q)
        self._put(self.values[layer], values, q)
        if self.written_keys is not None:
            self._put(self.written_keys[layer], keys, q)
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def _put(self, slots: torch.Tensor, new: torch.Tensor, q: int) -> None:
        """Copy one layer's ``new`` ``[rows, kv_heads, q, head_dim]`` behind each row's held slots."""
        if self.even:
            slots.narrow(2, self.held[0], q).copy_(new)
        else:
            slots.scatter_(2, self.next_slots(q)[:, None, :, None].expand(new.shape), new)

    def write_track(self, name: str, values: torch.Tensor, q: int) -> None:
        """Store values that broadcast to ``[layers, rows, kv_heads, q]`` with the ``q`` newest tokens."""
        track = self.tracks[name]
        shape = (*track.shape[:3], q)
        values = values.to(track.dtype).expand(shape)
        if self.even:
            track.narrow(3, self.held[0], q).copy_(values)
        else:
            track.scatter_(3, self.next_slots(q)[:, None, :].expand(shape), values)

    def newest(self, name: str, q: int, every_layer: bool = False) -> torch.Tensor:
        """Return keys or values of the ``q`` tokens just written, ``[layers, rows, kv_heads, q, head_dim]``.

        Of the layers that evict, or of every layer of a hybrid model.
        """
        if every_layer and self.windows is not None:
            evicting = dict(zip(self.shape.evicts, self.newest(name, q), strict=True))
            sliding = dict(zip(self.shape.slides, self.windows.new[name], strict=True))
            return torch.stack([(evicting | sliding)[layer] for layer in range(self.shape.layers)])
        storage = getattr(self, name)
        if self.even:
            return storage.narrow(3, self.held[0], q)
        index = self.next_slots(q)[:, None, :, None]
        return storage.gather(3, index.expand(*storage.shape[:3], q, storage.shape[4]))

    def advance(self, q: int) -> None:
        """Count ``q`` tokens per row as seen and held, once a forward pass has written all layers."""
        if self.windows is not None:
            self.windows.advance(self.new_positions(q))
        self.write_track("position", self.new_positions(q)[:, None, :], q)
        if self.rotary is not None:
            self.write_track("rotary", self.next_slots(q)[:, None, :], q)
        self.write_track("reason", torch.zeros((), device=self.keys.device), q)  # slots are reused: forget old reasons
        self.seen = [seen + q for seen in self.seen]
        self.held = [held + q for held in self.held]
        self.seen_on_device += q
        self.held_on_device += q

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, rows: Sequence[int], keep: torch.Tensor, reason: torch.Tensor) -> None:
        """Keep some slots of some rows and forget the others.

        Parameters
        ----------
        rows : sequence of int
        keep : int64 ``[layers, len(rows), kv_heads, kept]``
            Slots to keep, ascending in every head.
        reason : uint8, same shape
            Why each stays.
        """
        kept = keep.shape[-1]
        source = self._flat(rows, keep)
        target = self._flat(rows, torch.arange(kept, device=keep.device).expand_as(keep))
        for layer in range(self.keys.shape[0]):  # one layer at a time: the copy in between stays small
            for slots in (*(x[layer] for x in self._stores()), *(track[layer] for track in self.tracks.values())):
                flat = slots.flatten(0, 2)
                flat.index_copy_(0, target[layer], flat.index_select(0, source[layer]))
            self.tracks["reason"][layer].flatten().index_copy_(0, target[layer], reason[layer].flatten())
        if self.rotary is not None:
            self._rotate_to_slots(list(rows), kept)
        held = [kept if row in set(rows) else held for row, held in enumerate(self.held)]
        self._reset_counts(self.seen, held)

    def _stores(self) -> list[torch.Tensor]:
        """The tensors ``[layers, rows, kv_heads, capacity, head_dim]`` that move with the slots."""
        return [self.keys, self.values, *([self.written_keys] if self.written_keys is not None else [])]

    def _rotate_to_slots(self, rows: list[int], kept: int) -> None:
        slot = torch.arange(kept, device=self.keys.device)
        for layer, rotates in enumerate(self.rotary.layers):
            if rotates:
                by = slot - self.tracks["rotary"][layer, rows, :, :kept]
                written = self.written_keys[layer, rows, :, :kept]
                self.keys[layer, rows, :, :kept] = self.rotary.rotate(written, by)

    def _flat(self, rows: Sequence[int], slots: torch.Tensor) -> torch.Tensor:
        """Turn slot numbers ``[layers, rows, kv_heads, k]`` into indices of each layer's flattened storage."""
        heads = slots.shape[2]
        row = torch.tensor(list(rows), device=slots.device)[:, None, None]
        head = torch.arange(heads, device=slots.device)[:, None]
        return ((row * heads + head) * self.capacity + slots).flatten(1)

    # -- rows --------------------------------------------------------------------------------------------------------

    def copy_row(self, row: int, source: SlotCache) -> None:
        """Take over the only row of another cache as row ``row``."""
        held = source.held[0]
        for mine, other in zip(self._stores(), source._stores(), strict=True):
            mine[:, row, :, :held] = other[:, 0, :, :held]
        for name, track in self.tracks.items():
            track[:, row, :, :held] = source.tracks[name][:, 0, :, :held]
        if self.windows is not None:
            self.windows.copy_row(row, source.windows)
        seen, helds = self.seen, self.held
        seen[row], helds[row] = source.seen[0], held
        self._reset_counts(seen, helds)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, freeing their slots."""
        index = torch.tensor(list(rows), device=self.keys.device)
        self.keys = self.keys.index_select(1, index)
        self.values = self.values.index_select(1, index)
        if self.written_keys is not None:
            self.written_keys = self.written_keys.index_select(1, index)
        self.tracks = {name: track.index_select(1, index) for name, track in self.tracks.items()}
        if self.windows is not None:
            self.windows.select_rows(index)
        self._reset_counts([self.seen[row] for row in rows], [self.held[row] for row in rows])

    def join_rows(self, other: SlotCache) -> None:
        """Take over the rows of another cache of the same model, behind one's own."""
        capacity = max(self.capacity, other.capacity)

        def both(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            channels = (0, 0) * (mine.dim() - 4)  # keys and values have them behind their slots
            return torch.cat([pad(x, (*channels, 0, capacity - x.shape[3])) for x in (mine, theirs)], dim=1)

        self.keys, self.values = both(self.keys, other.keys), both(self.values, other.values)
        if self.written_keys is not None:
            self.written_keys = both(self.written_keys, other.written_keys)
        self.tracks = {name: both(track, other.tracks[name]) for name, track in self.tracks.items()}
        if self.windows is not None:
            self.windows.join_rows(other.windows)
        self._reset_counts([*self.seen, *other.seen], [*self.held, *other.held])

    def slots(self, rows: Sequence[int], n: int) -> dict[str, torch.Tensor]:
        """Return keys, values and tracks of some rows' first ``n`` slots; views if these are all rows."""
        named = {"keys": self.keys, "values": self.values, **self.tracks}
        if list(rows) == list(range(self.rows)):
            return {name: x[:, :, :, :n] for name, x in named.items()}
        index = torch.tensor(list(rows), device=self.keys.device)
        return {name: x[:, :, :, :n].index_select(1, index) for name, x in named.items()}

    def kv_bytes(self, capacity: int | None = None) -> int:
        """Bytes of keys and values of one row that needs ``capacity`` slots, windows of hybrid models included."""
        capacity = self.capacity if capacity is None else capacity
        window = 2 * self.windows.keys[:, :1].numel() if self.windows is not None else 0
        return (2 * self.keys[:, :1, :, :1].numel() * capacity + window) * self.keys.element_size()

    def track_bytes(self, capacity: int | None = None) -> int:
        """Bytes of everything kept per slot beside keys and values, of one row."""
        capacity = self.capacity if capacity is None else capacity
        extra = [*self.tracks.values(), *self._stores()[2:]]
        return sum(x[:, :1, :, :1].numel() * x.element_size() for x in extra) * capacity


def choose(priority: torch.Tensor, front: int, recent: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose which slots of each head stay: the protected ones, then the highest priorities, the newer among equals.

    Parameters
    ----------
    priority : ``[layers, rows, kv_heads, n]``
    front, recent : int
        Protected slots at both ends.
    total : int
        Slots to keep, ``front + recent ≤ total ≤ n``.

    Returns
    -------
    keep, evicted : int64 ``[layers, rows, kv_heads, total]`` and ``[…, n − total]``, both ascending.
    """
    n = priority.shape[-1]
    order = newest_first_order(priority[..., front : n - recent]) + front
    chosen, evicted = order.split([total - front - recent, n - total], dim=-1)
    ends = [torch.arange(front), torch.arange(n - recent, n)]
    head, tail = (end.to(priority.device).expand(*priority.shape[:-1], -1) for end in ends)
    return torch.cat([head, chosen.sort(-1).values, tail], dim=-1), evicted.sort(-1).values


def protection(positions: torch.Tensor, seen: int, budget) -> torch.Tensor:
    """Return why each slot is protected, uint8 like ``positions``: sink, recent, prompt, or 0 (it is not)."""
    reason = torch.zeros_like(positions, dtype=torch.uint8)
    reason[positions < budget.front] = int(Reason.PROMPT)
    reason[positions >= seen - budget.recent] = int(Reason.RECENT)
    reason[positions < budget.sinks] = int(Reason.SINK)
    return reason
