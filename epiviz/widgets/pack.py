"""Packing: what a view shows as one block of bytes and a JSON-ready index, which a browser reads without parsing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epiviz.widgets.data import BADGES, CLIP, THRESHOLDS, Column, ReaderData, Story, encodable, event_indices


def pack(data: ReaderData, computes: Sequence[str] = ()) -> tuple[dict, bytes]:
    """Return an index and one block of bytes that hold everything; ``computes`` names what a kernel can compute."""
    packer = _Packer()
    heads = data.ships_heads()
    meta = {
        "kind": data.kind,
        "title": encodable(data.title),
        "badges": BADGES,
        "methods": [encodable(name) for name in data.methods],
        "computes": [encodable(name) for name in computes],
        "thresholds": list(THRESHOLDS),
        "clip": list(CLIP),
        "layers": data.layers,
        "bands": [list(band) for band in data.bands],
        "reference": list(data.reference),
        "columns": [_pack_column(packer, f"c{i}", column) for i, column in enumerate(data.columns)],
        "stories": [_pack_story(packer, f"s{i}", story, heads) for i, story in enumerate(data.stories)],
        "layer_scores": [_pack_score(score) for score in data.layer_scores],
    }
    for i, score in enumerate(data.layer_scores):
        packer.add(f"l{i}.values", score.levels)
    return meta | {"arrays": packer.index}, packer.bytes()


def _pack_score(score) -> dict:
    return {"name": encodable(score.name), "kind": score.kind, "unit": encodable(score.unit), "clip": score.clip}


class _Packer:
    """Collects arrays into one aligned block of bytes and an index of (dtype, shape, offset)."""

    def __init__(self) -> None:
        self.index: dict[str, tuple[str, list[int], int]] = {}
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, name: str, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        chunk = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        chunk += bytes(-len(chunk) % 8)  # typed arrays in the browser must start at multiples of their item size
        self.index[name] = (array.dtype.name, list(array.shape), self._size)
        self._chunks.append(chunk)
        self._size += len(chunk)

    def bytes(self) -> bytes:
        return b"".join(self._chunks)


def _pack_column(packer: _Packer, key: str, column: Column) -> dict:
    spans = column.spans
    # UTF-16 units instead of a JSON string: lone surrogates survive, and the offsets index it directly.
    packer.add(f"{key}.text", np.frombuffer(spans.text.encode("utf-16-le", "surrogatepass"), dtype="<u2"))
    packer.add(f"{key}.offsets", spans.utf16_offsets.astype(np.uint32))
    packer.add(f"{key}.ids", column.ids.astype(np.uint32))
    for i, score in enumerate(column.scores):
        packer.add(f"{key}.values{i}", score.values)
        packer.add(f"{key}.buckets{i}", score.buckets)
    return {
        "label": encodable(column.label),
        "note": encodable(column.note),
        "tokens": len(column),
        "prompt": column.prompt_length,
        "divergence": list(column.divergence),
        "scores": [_pack_score(score) for score in column.scores],
    }


def _pack_story(packer: _Packer, key: str, story: Story, heads: bool) -> dict:
    retention = story.retention
    events = retention.events
    majority = story.majority[:1] if story.uniform else story.majority
    packer.add(f"{key}.events", retention.event_steps.astype(np.uint32))
    packer.add(f"{key}.majority", event_indices(majority, events))
    packer.add(f"{key}.reason", story.main_reason)
    if heads:
        packer.add(f"{key}.deaths", event_indices(retention.death, events))
        packer.add(f"{key}.reasons", retention.reason)
    return {
        "method": encodable(story.method),
        "budget": story.budget,
        "column": story.column,
        "layers": retention.death.shape[0],
        "heads": retention.death.shape[1],
        "evicts": list(story.layers),
        "uniform": story.uniform,
        "selects": story.selects,
        "fed": retention.tokens,
    }
