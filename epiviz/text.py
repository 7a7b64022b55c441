"""Byte-exact token spans of a decoded text.

A token of a byte-level tokenizer is a piece of a UTF-8 string, not of a text: one emoji may take three tokens, none
of which decodes alone. Here the bytes of all tokens are decoded together and every character belongs to the token
that completes it; earlier pieces of the character get an empty span and are flagged ``partial``.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

import numpy as np

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spans:
    """The text of a token sequence and where each token lies in it.

    Attributes
    ----------
    text : str
        The decoded text, special tokens written out. Bytes that are not UTF-8 appear as U+FFFD.
    offsets : int64 ``[tokens + 1]``
        Token ``i`` is ``text[offsets[i]:offsets[i + 1]]`` (code points).
    partial : bool ``[tokens]``
        The token ends inside a character that a later token completes.
    """

    text: str
    offsets: np.ndarray
    partial: np.ndarray

    def __len__(self) -> int:
        return len(self.partial)

    def piece(self, index: int) -> str:
        """Return the text of one token ("" inside a split character)."""
        return self.text[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def pieces(self) -> list[str]:
        """The text of every token; joined they are ``text``."""
        return [self.piece(index) for index in range(len(self))]

    @cached_property
    def utf16_offsets(self) -> np.ndarray:
        """The offsets in UTF-16 units (int64 ``[tokens + 1]``), the unit of a string index in a browser."""
        units = [len(piece.encode("utf-16-le", "surrogatepass")) // 2 for piece in self.pieces]
        return np.concatenate([[0], np.cumsum(units, dtype=np.int64)]).astype(np.int64)

    def slice(self, start: int, stop: int | None = None) -> str:
        """Return the text of the tokens ``start`` to ``stop``."""
        stop = len(self) if stop is None else stop
        return self.text[self.offsets[start] : self.offsets[stop]]


def join_bytes(pieces: Iterable[bytes]) -> Spans:
    """Decode token bytes together and give each character to the token that completes it.

    Parameters
    ----------
    pieces : iterable of bytes
        The bytes of each token, in order.

    Examples
    --------
    >>> join_bytes([b"a", bytes([0xF0, 0x9F]), bytes([0x99, 0x82]), b"!"]).pieces
    ['a', '', '🙂', '!']
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[str] = []
    partial: list[bool] = []
    for piece in pieces:
        parts.append(decoder.decode(piece))
        partial.append(bool(decoder.getstate()[0]))
    if parts:
        parts[-1] += decoder.decode(b"", final=True)  # a cut-off character at the very end shows as U+FFFD
        partial[-1] = False
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]).astype(np.int64)
    return Spans("".join(parts), offsets, np.array(partial, dtype=bool))


def first_divergence(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two sequences of token ids differ; None if they are equal.

    Examples
    --------
    >>> first_divergence([5, 6, 7], [5, 6, 8]), first_divergence([5, 6], [5, 6]), first_divergence([5], [5, 6])
    (2, None, 1)
    """
    shared = min(len(tokens), len(other))
    differ = np.flatnonzero(np.asarray(tokens[:shared]) != np.asarray(other[:shared]))
    if len(differ):
        return int(differ[0])
    return None if len(tokens) == len(other) else shared


def printable(piece: str) -> str:
    """Return a token's text with line ends and outer blanks made visible.

    Examples
    --------
    >>> printable(" so\\n")
    '␣so↵'
    """
    text = piece.replace("\n", "↵").replace("\t", "⇥")
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    return "␣" * left + inner + "␣" * (len(text) - len(inner) - left)


def in_context(spans: Spans, index: int, around: int = 8) -> str:
    """Return a token between ⟦ and ⟧ with ``around`` tokens on both sides, on one line."""
    start, stop = max(0, index - around), min(len(spans), index + 1 + around)
    before, after = spans.slice(start, index), spans.slice(index + 1, stop)
    text = f"{'…' if start else ''}{before}⟦{printable(spans.piece(index))}⟧{after}{'…' if stop < len(spans) else ''}"
    return text.replace("\n", "↵")


def token_spans(tokenizer, tokens: Sequence[int]) -> Spans:
    """Return the text of ``tokens`` and the span of each.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece ones (Llama 2, Gemma, Mistral) are read
    through their byte alphabets. Any other kind is decoded in growing windows, which is exact for the characters and
    slower.

    Ids that the tokenizer does not have (models pad their vocabulary) are written as ``<id 151700>``.
    """
    return join_bytes(byte_reader(tokenizer)([int(token) for token in tokens]))


def byte_reader(tokenizer) -> Callable[[list[int]], Iterable[bytes]]:
    """Return a function from token ids to the bytes of each, as :func:`token_spans` reads them.

    Looking a tokenizer over takes up to a second, reading a few more tokens then next to nothing.
    """
    scheme = _byte_scheme(tokenizer)
    if scheme is None:
        return lambda tokens: _window_decode(tokenizer, tokens)
    special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    decode = _byte_level_bytes if scheme == "byte-level" else _sentencepiece_bytes
    unknown = tokenizer.unk_token_id

    def read(token: int, piece: str | None) -> bytes:
        if token in special:
            return special[token].encode()
        missing = piece is None or (piece == tokenizer.unk_token and token != unknown)
        return f"<id {token}>".encode() if missing else decode(piece)

    return lambda tokens: map(read, tokens, tokenizer.convert_ids_to_tokens(tokens))


def fingerprint(tokenizer) -> str:
    """Return a short hash of the tokenizer's vocabulary: two tokenizers that agree on it read the same ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


def _byte_level_bytes(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)


def _sentencepiece_bytes(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


def _byte_scheme(tokenizer) -> str | None:
    """Tell how the tokenizer writes bytes: "byte-level", "sentencepiece" or None (unknown)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    kinds = json.dumps(decoder) if decoder else ""
    if '"ByteLevel"' in kinds:
        return "byte-level"
    if "▁" in kinds or "\\u2581" in kinds:
        return "sentencepiece"
    return None


def _window_decode(tokenizer, tokens: list[int]) -> Iterable[bytes]:
    """Yield the bytes each token adds to the decoded text, holding back characters that are not complete."""
    start, emitted = 0, ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and end < len(tokens):
            yield b""
            continue
        yield text[len(emitted) :].encode()
        # Restarting the window a few tokens back keeps the cost linear and the decoder's context intact.
        start = max(start, end - 8)
        emitted = tokenizer.decode(tokens[start:end], clean_up_tokenization_spaces=False)
