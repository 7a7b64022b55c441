"""Looks that need no browser: the colours of scores, and a text with everything invisible written out."""

from __future__ import annotations

import unicodedata

from epiviz.widgets.data import encodable

# The same colours as in theme.css; here for pictures, and for readers that run no script.
PALETTES = {
    "signed": ["e68d23", "fab35b", "fed095", "fce7ca", "ffffff", "e2e3ef", "c9c8e1", "ada6ce", "8a7eb3"],
    "magnitude": ["ffffff", "e1edf8", "ccdff1", "add0e6", "84bcdb", "5ba3d0"],
}


def visible(text: str, keep: str = "") -> str:
    """Return ``text`` with control characters, bidi marks and lone surrogates written out, except those in ``keep``.

    Examples
    --------
    >>> visible("a\\u202eb\\x00\\n", keep="\\n")
    'a⟨U+202E⟩b⟨U+0000⟩\\n'
    """
    return encodable("".join(c if c in keep or not _is_invisible(c) else f"⟨U+{ord(c):04X}⟩" for c in text))


def _is_invisible(character: str) -> bool:
    kind = unicodedata.category(character)
    # A zero-width joiner or variation tag holds an emoji sequence together; writing it out would tear it apart.
    return kind in ("Cc", "Cs") or (kind == "Cf" and character not in "\u200c\u200d" and ord(character) < 0xE0000)
