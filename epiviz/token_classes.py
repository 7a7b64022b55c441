"""Token classes: what a token is in a reasoning text, read from the text alone.

Words are found in the decoded text and not in the tokens: "therefore" may be two tokens and one Chinese character
three, none of which means anything by itself. Every token that holds a part of a marker is one.
"""

from __future__ import annotations

import re

import numpy as np

from epiviz.text import Spans

SINKS = 4
CLASSES = ("sink", "prompt", "newline", "number", "operator", "marker", "punctuation", "other")

# Words that steer a reasoning. The Chinese ones are the same words, longest first where one begins another.
# fmt: off
MARKERS = frozenset({
    "actually", "again", "alternatively", "because", "but", "check", "finally", "first", "hence", "hmm", "however",
    "if", "let", "maybe", "next", "now", "second", "since", "so", "step", "then", "therefore", "third", "thus",
    "verify", "wait",
})
CHINESE_MARKERS = (
    "等一下", "等等", "稍等",  # wait
    "所以", "因此", "因而", "于是", "於是",  # so, therefore
    "但是", "但", "不过", "不過", "然而", "可是", "其实", "其實",  # but, however, actually
    "或者", "另外",  # alternatively
    "因为", "因為", "由于", "由於",  # because, since
    "如果", "假设", "假設",  # if
    "首先", "其次", "第一步", "第二步", "第三步", "步骤", "步驟",  # first, second, step
    "然后", "然後", "接着", "接著", "接下来", "接下來", "那么", "那麼", "最后", "最後",  # then, next, finally
    "检查", "檢查", "验证", "驗證",  # check, verify
    "可能", "也许", "也許", "现在", "現在", "让我", "讓我", "嗯",  # maybe, now, let me, hmm
)
# fmt: on
# Latin letters end a word; \b would not between "so" and a Chinese character.
_MARKER = re.compile(
    rf"(?<![a-z])(?:{'|'.join(sorted(MARKERS))}|hmm+)(?![a-z])|(?<!不)(?:{'|'.join(CHINESE_MARKERS)})", re.IGNORECASE
)
_NUMBER = re.compile(r"\d[\d.,]*")
_OPERATOR = re.compile(r"[-+*/=<>^%×÷−±≤≥≠≈√·]+")
_PUNCTUATION = re.compile(r"[^\w\s]+")


def token_class(piece: str) -> str:
    """Tell what a token is by its text alone.

    Returns
    -------
    str
        "newline", "number", "operator" (arithmetic and comparison), "marker" (a word that steers a reasoning, such as
        wait, so, therefore, step, 所以), "punctuation" or "other".

    Examples
    --------
    >>> [token_class(piece) for piece in [".\\n", "42", " =", " So", ",", " marbles"]]
    ['newline', 'number', 'operator', 'marker', 'punctuation', 'other']
    """
    word = piece.strip()
    if "\n" in piece:
        return "newline"
    if _NUMBER.fullmatch(word):
        return "number"
    if _OPERATOR.fullmatch(word):
        return "operator"
    if _MARKER.fullmatch(word):
        return "marker"
    return "punctuation" if _PUNCTUATION.fullmatch(word) else "other"


def classify(spans: Spans, prompt_length: int = 0, sinks: int = SINKS) -> np.ndarray:
    """Return the class of every token, one of :data:`CLASSES`, str ``[tokens]``.

    The first ``sinks`` tokens are "sink" and the rest of the prompt is "prompt", whatever they say. A token that ends
    inside a character belongs to that character, and one that holds a part of a marker is a marker.

    Parameters
    ----------
    spans : Spans
    prompt_length, sinks : int

    Examples
    --------
    >>> from epiviz.text import join_bytes
    >>> spans = join_bytes([b"1", b" +", b" there", b"fore", "所".encode()[:2], "所以".encode()[2:], b" 2"])
    >>> classify(spans, sinks=1).tolist()
    ['sink', 'operator', 'marker', 'marker', 'marker', 'marker', 'number']
    """
    # A partial token holds bytes of the next character, which later tokens complete: it reaches one further.
    start, stop = spans.offsets[:-1], spans.offsets[1:] + spans.partial
    pieces = [piece or spans.text[at:to] for piece, at, to in zip(spans.pieces, start, stop, strict=True)]
    kind = {piece: token_class(piece) for piece in set(pieces)}
    classes = np.array([kind[piece] for piece in pieces], dtype=object)
    classes[classes == "marker"] = "other"  # a token "so" may be the beginning of "sofa": markers are found in the text
    for match in _MARKER.finditer(spans.text):
        first, last = np.searchsorted(stop, match.start(), side="right"), np.searchsorted(start, match.end())
        own = np.arange(first, last)
        classes[own[classes[own] != "newline"]] = "marker"
    classes[:prompt_length] = "prompt"
    classes[:sinks] = "sink"
    return classes
