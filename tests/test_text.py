"""Spans joined are the text, whatever the tokenizer and however characters are split."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from epiviz import text

SAMPLES = [
    "♩ 💩 汉字 é",
    "Seán O’Brien",
    "👩‍👩‍👧‍👦 family, flags 🇨🇳🇮🇪, skin 👍🏽",
    "नमस्ते עברית العربية",
    "e\u0301 combining, zero\u200bwidth, nul \x00 and tab\t",
    "a<b<c><script>alert(1)</script>",
    "  two  spaces\n\n\nand lines\r\n",
]


def sentencepiece_tokenizer():
    """A byte-fallback tokenizer in the style of Llama 2, with a vocabulary of a few words."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for word in ("▁", "▁hello", "▁world", "a", "b", "é", "汉"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def wordpiece_tokenizer():
    """A tokenizer of a kind that is read by decoding in windows."""
    words = ["[UNK]", "hello", "##ing", "world", "go", "!", "é"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("sample", SAMPLES)
def test_spans_of_a_byte_level_tokenizer(smollm2, sample):
    ids = smollm2.tokenizer(sample).input_ids
    spans = text.token_spans(smollm2.tokenizer, ids)
    assert "".join(spans.pieces) == spans.text == sample
    assert len(spans) == len(ids)
    encoded = sample.encode("utf-16-le")
    units = spans.utf16_offsets
    assert [encoded[2 * a : 2 * b].decode("utf-16-le") for a, b in pairwise(units)] == spans.pieces


def test_split_emoji_belongs_to_the_token_that_completes_it(smollm2):
    ids = smollm2.tokenizer("💩").input_ids
    assert len(ids) > 1, "the tokenizer splits this emoji"
    spans = text.token_spans(smollm2.tokenizer, ids)
    assert spans.pieces == [""] * (len(ids) - 1) + ["💩"]
    assert spans.partial.tolist() == [True] * (len(ids) - 1) + [False]
    cut = text.token_spans(smollm2.tokenizer, ids[:-1])
    assert cut.text == "\ufffd" and not cut.partial[-1]


def test_special_tokens_are_written_out(smollm2):
    spans = text.token_spans(smollm2.tokenizer, smollm2.encode("hi"))
    assert spans.text.startswith("<|im_start|>system\n") and spans.text.endswith("<|im_start|>assistant\n")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=6), max_size=30))
def test_any_bytes_join_to_their_decoding(pieces):
    spans = text.join_bytes(pieces)
    assert "".join(spans.pieces) == spans.text == b"".join(pieces).decode("utf-8", "replace")
    assert len(spans) == len(pieces) and (np.diff(spans.offsets) >= 0).all()
    assert spans.utf16_offsets[-1] == len(spans.text.encode("utf-16-le")) // 2


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_any_ids_equal_the_tokenizers_own_decoding(smollm2, ids):
    assert text.token_spans(smollm2.tokenizer, ids).text == smollm2.tokenizer.decode(ids)


@pytest.mark.parametrize("sample", ["▁ hello world", "汉é💩ab", " hello\nworld"])
def test_spans_of_a_sentencepiece_tokenizer(sample):
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer(sample, add_special_tokens=False).input_ids
    spans = text.token_spans(tokenizer, ids)
    assert spans.text == tokenizer.decode(ids) and "▁" not in spans.text
    assert "".join(spans.pieces) == spans.text


def test_spans_of_another_kind_of_tokenizer():
    tokenizer = wordpiece_tokenizer()
    ids = tokenizer("hello going world! " * 8, add_special_tokens=False).input_ids
    spans = text.token_spans(tokenizer, ids)
    assert spans.text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert spans.pieces[:4] == ["hello", " go", "ing", " world"]


def test_ids_that_only_the_model_has_are_written_out(smollm2):
    """Models pad their vocabulary; a run must not be lost over such an id."""
    assert text.token_spans(smollm2.tokenizer, [9690, 99999]).text == "system<id 99999>"


def test_fingerprints_tell_tokenizers_apart(smollm2):
    assert text.fingerprint(smollm2.tokenizer) == text.fingerprint(smollm2.tokenizer)
    assert text.fingerprint(smollm2.tokenizer) != text.fingerprint(sentencepiece_tokenizer())


def test_context_shows_one_line_and_its_borders():
    spans = text.join_bytes([b"a\n", b" b"] * 5)
    assert text.in_context(spans, 0, around=1) == "⟦a↵⟧ b…"
    assert text.in_context(spans, 3, around=1) == "…a↵⟦␣b⟧a↵…"


def test_texts_part_where_one_ends():
    assert text.first_divergence([1, 2], np.array([1, 2, 3])) == 2
    assert text.first_divergence([], []) is None and text.first_divergence([], [1]) == 0
