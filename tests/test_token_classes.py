"""Token classes are read from the text: markers over several tokens, characters over several bytes."""

from __future__ import annotations

import pytest

from epiviz.text import join_bytes, token_spans
from epiviz.token_classes import CHINESE_MARKERS, CLASSES, MARKERS, classify, token_class


def classes(*pieces, **settings):
    spans = join_bytes([piece if isinstance(piece, bytes) else piece.encode() for piece in pieces])
    return classify(spans, **{"sinks": 0} | settings).tolist()


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        ("7", "number"),
        (" 1,000.5", "number"),
        (" +", "operator"),
        ("==", "operator"),
        ("\n\n", "newline"),
        (".\n", "newline"),
        (" Wait", "marker"),
        ("Therefore", "marker"),
        ("!", "punctuation"),
        (" sofa", "other"),
        (" ", "other"),
        ("", "other"),
        ("步", "other"),
        ("hmmm", "marker"),
        (" 所以", "marker"),
        ("不但", "other"),
        ("但", "marker"),
        ("３", "number"),
        ("，", "punctuation"),
    ],
)
def test_a_piece_by_itself(piece, kind):
    assert token_class(piece) == kind in CLASSES


def test_every_marker_is_one_also_in_the_middle_of_a_text():
    for word in (*MARKERS, *CHINESE_MARKERS):
        assert token_class(word) == "marker"
        assert classes("算 ", word, " x")[1] == "marker"


def test_a_marker_over_several_tokens_marks_all_of_them():
    assert classes(" There", "fore", ",", " h", "mm") == ["marker", "marker", "punctuation", "marker", "marker"]
    assert classes("所", "以", "我们") == ["marker", "marker", "other"]
    assert classes("所以我们") == ["marker"]


def test_a_part_of_a_word_is_no_marker():
    assert classes(" so", "fa", " butter", " shelf", " steps") == ["other"] * 5
    assert classes("so", "所以", "2") == ["marker", "marker", "number"]  # no blank between scripts
    assert classes("不", "但") == ["other", "other"]


def test_bytes_belong_to_the_character_that_they_begin():
    wait, at_most = "等等".encode(), "≤".encode()
    assert classes("x", wait[:1], wait[1:4], wait[4:], at_most[:2], at_most[2:]) == [
        "other", "marker", "marker", "marker", "operator", "operator"
    ]  # fmt: skip
    assert classes("，".encode()[:1], "，".encode()[1:]) == ["punctuation"] * 2


def test_a_line_end_stays_one_behind_a_marker():
    assert classes("Wait", ".\n", "so\n") == ["marker", "newline", "newline"]


def test_the_prompt_and_its_sinks_come_first():
    assert classes("7", " so", "1", "\n", prompt_length=3, sinks=1) == ["sink", "prompt", "prompt", "newline"]
    assert classes("7", prompt_length=0, sinks=4) == ["sink"]
    assert classes() == []


def test_a_byte_level_tokenizer(smollm2):
    text = "Wait, 3 ≤ 5. 所以因此 x = 12\nTherefore 验证"
    spans = token_spans(smollm2.tokenizer, smollm2.tokenizer(text).input_ids)
    assert spans.partial.sum() >= 3
    found = classify(spans, sinks=0)
    expected = {"所以因此": "marker", "Therefore": "marker", "验证": "marker", "≤": "operator", "3": "number"}
    for word, kind in expected.items():
        start = spans.text.index(word)
        for index in range(len(spans)):
            at, to = spans.offsets[index], spans.offsets[index + 1] + spans.partial[index]
            if at < start + len(word) and to > start:
                assert found[index] == kind, (word, index)
