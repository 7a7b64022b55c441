"""The algebra of births and deaths, against a cache simulated by hand."""

from __future__ import annotations

import numpy as np
import pytest

from epiviz.retention import Reason, Retention


@pytest.fixture
def history():
    """One layer, two heads, ten tokens; events after 6 and 9 tokens."""
    never = 2
    death = np.full((1, 2, 10), never, dtype=np.int32)
    death[0, 0, [1, 2]] = 0
    death[0, 0, 3] = 1
    death[0, 1, [2, 3]] = 0
    death[0, 1, 7] = 1
    return Retention(np.array([6, 9]), death, np.zeros_like(death, dtype=np.uint8), prompt_length=4, evicts=(0,))


def test_alive_follows_births_and_events(history):
    assert history.alive(5)[0, 0].tolist() == [True] * 5 + [False] * 5
    assert history.alive(6)[0, 0].tolist() == [True, False, False, True, True, True] + [False] * 4
    assert np.flatnonzero(history.alive(9)[0, 1]).tolist() == [0, 1, 4, 5, 6, 8]
    assert history.held(6).tolist() == [1, 0.5, 0, 0.5, 1, 1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="step 11 is outside 0 … 10"):
        history.alive(11)


def test_a_query_sees_what_had_not_left_before_it(history):
    visible = history.visible()
    for query in range(10):
        # the query at p is fed when p tokens were seen; an event that fires at p + 1 comes after it
        before = history.alive(query) if query else np.zeros((1, 2, 10), bool)
        expected = before.copy()
        expected[..., query] = True
        assert np.array_equal(visible[:, :, query], expected)


def test_shapes_are_checked(history):
    with pytest.raises(ValueError, match="must both be"):
        Retention(history.event_steps, history.death, history.reason[:, :1], 4)


def test_save_keeps_the_order_of_a_transposed_array(tmp_path):
    death = np.arange(12, dtype=np.int32).reshape(3, 2, 2).transpose(2, 1, 0)
    history = Retention(np.array([9]), death, np.zeros_like(death, dtype=np.uint8), 2, positions=np.arange(3))
    history.save(tmp_path / "folder" / "r.safetensors")
    again = Retention.load(tmp_path / "folder" / "r.safetensors")
    assert np.array_equal(again.death, death)
    assert np.array_equal(again.positions, np.arange(3))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "folder" / "r.safetensors").read_bytes()[:40])
    with pytest.raises(ValueError, match="cut off, damaged or no eviction history"):
        Retention.load(tmp_path / "cut.safetensors")


def test_save_and_load(history, tmp_path):
    history.save(tmp_path / "r.safetensors")
    again = Retention.load(tmp_path / "r.safetensors")
    assert np.array_equal(again.death, history.death) and again.evicts == (0,) and again.prompt_length == 4
    assert Reason(3).name == "PROMPT"
