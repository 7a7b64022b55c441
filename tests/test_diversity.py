"""Diversity against loops over pairs, windows and gaps, and the slots that an observer of evictions is shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import diversity

quick = settings(max_examples=60, deadline=None)


def pairwise_loop(keys):
    cosines = []
    for i in range(len(keys)):
        for j in range(len(keys)):
            if i != j:
                lengths = keys[i].norm() * keys[j].norm()
                cosines.append(float(keys[i] @ keys[j] / lengths) if lengths else 0.0)
    return np.mean(cosines)


@quick
@given(st.integers(2, 9), st.integers(1, 6), st.integers(0, 2**20), st.booleans())
def test_the_mean_cosine_is_that_of_all_pairs(n, width, seed, with_zero):
    keys = torch.randn(2, 1, 3, n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if with_zero:
        keys[0, 0, 1, 0] = 0
    found = diversity.mean_pairwise_cosine(keys)
    assert found.shape == (2, 1, 3)
    for layer in range(2):
        for head in range(3):
            assert float(found[layer, 0, head]) == pytest.approx(pairwise_loop(keys[layer, 0, head]), abs=1e-12)
    half = diversity.mean_pairwise_cosine(keys.to(torch.bfloat16))
    assert half.dtype == torch.float32 and half == pytest.approx(found.numpy(), abs=0.05)


def test_mean_cosines_by_hand():
    same, axes, opposite = torch.ones(5, 3), torch.eye(3) * torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0], [-2.0]])
    assert float(diversity.mean_pairwise_cosine(same)) == pytest.approx(1)
    assert float(diversity.mean_pairwise_cosine(axes)) == pytest.approx(0)
    assert float(diversity.mean_pairwise_cosine(opposite)) == pytest.approx(-1)
    assert diversity.mean_pairwise_cosine(torch.ones(2, 1, 3)).isnan().all()
    assert diversity.mean_pairwise_cosine(torch.ones(2, 0, 3)).isnan().all()


def test_effective_ranks_by_hand():
    assert float(diversity.effective_rank(torch.eye(4))) == pytest.approx(4)
    assert float(diversity.effective_rank(torch.outer(torch.arange(1.0, 6), torch.ones(3)))) == pytest.approx(
        1, abs=1e-3
    )
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert float(diversity.effective_rank(torch.diag(torch.tensor([3.0, 1.0])))) == pytest.approx(np.exp(entropy))
    assert diversity.effective_rank(torch.zeros(2, 3, 4)).isnan().all()
    assert diversity.effective_rank(torch.zeros(2, 0, 4)).isnan().all()
    keys = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(0))
    each = [[float(diversity.effective_rank(keys[i, j])) for j in range(3)] for i in range(2)]
    assert diversity.effective_rank(keys).numpy() == pytest.approx(np.array(each), rel=1e-5)
    assert (diversity.effective_rank(keys) <= 4).all()


@quick
@given(st.sets(st.integers(3, 40), max_size=20), st.integers(1, 9))
def test_spread_is_that_of_loops_over_windows_and_gaps(kept, window):
    start, stop = 3, 41
    positions = torch.tensor(sorted(kept), dtype=torch.int64).reshape(1, 1, -1)
    stretches = [range(at, min(at + window, stop)) for at in range(start, stop, window)]
    covered = sum(any(token in kept for token in stretch) for stretch in stretches) / len(stretches)
    assert diversity.coverage(positions, start, stop, window).item() == pytest.approx(covered)
    longest = run = 0
    for token in range(start, stop):
        run = 0 if token in kept else run + 1
        longest = max(longest, run)
    assert diversity.largest_gap(positions, start, stop).item() == longest
    marks = [start - 1, *sorted(kept), stop]
    shares = np.diff(marks) / (stop - start + 1)
    even = np.exp(-(shares * np.log(shares)).sum()) / len(shares)
    assert diversity.gap_evenness(positions, start, stop).item() == pytest.approx(even, rel=1e-5)


def test_equal_steps_are_even_and_a_clump_is_not():
    even, clump = torch.arange(9, 100, 10), torch.arange(90, 100)
    assert float(diversity.gap_evenness(even, 0, 99 + 10)) == pytest.approx(1)
    assert float(diversity.gap_evenness(clump, 0, 100)) < 0.2
    both = torch.stack([torch.arange(0, 40, 4), torch.arange(30, 40)])
    assert diversity.coverage(both, 0, torch.tensor([40, 80]), 10).tolist() == [1, pytest.approx(1 / 8)]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_an_observer_sees_what_the_history_says_was_kept(architecture):
    model = tiny_model(architecture)
    trace = ev.record(model, random_prompt(30), tokens=random_prompt(90, 9), progress=False)
    budget = ev.Budget(24, sinks=2, recent=6, buffer=8)
    shown = []

    def look(slots):
        shown.append((slots.keys.clone(), slots.positions.clone(), slots.candidates.clone(), int(slots.seen)))

    found = ev.replay(model, trace, "random", budget, on_event=look, progress=False)
    assert [seen for *_, seen in shown] == found.retention.event_steps.tolist() and len(shown) >= 3
    for keys, positions, candidates, seen in shown:
        alive = found.retention.alive(seen)[found.retention.evicting]
        assert keys.shape == (len(found.retention.evicting), 1, 2, 24, 16)
        for layer in range(alive.shape[0]):
            for head in range(2):
                assert positions[layer, 0, head].tolist() == np.flatnonzero(alive[layer, head]).tolist()
        assert candidates[0, 0, 0].tolist() == [False] * 2 + [True] * 16 + [False] * 6


def test_the_keys_shown_are_those_of_the_kept_tokens():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(30), tokens=random_prompt(60, 9), progress=False)
    shown = []
    ev.replay(
        model, trace, "random", ev.Budget(24, 2, 6, 8), progress=False,
        on_event=lambda slots: shown.append((slots.keys[0, 0].clone(), slots.positions[0, 0].clone())),
    )  # fmt: skip
    with torch.inference_mode():  # keys of the first layer do not depend on what was evicted
        full = model.lm(torch.tensor(trace.tokens[None]), use_cache=True).past_key_values.layers[0].keys[0]
    for keys, positions in shown:
        assert keys.numpy() == pytest.approx(full.gather(1, positions[..., None].expand(-1, -1, 16)).numpy(), abs=1e-12)


def test_the_recorder_measures_each_event():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(30), tokens=random_prompt(60, 9), progress=False)
    chosen, everything, shown = diversity.DiversityRecorder(), diversity.DiversityRecorder(chosen=False), []

    def look(slots):
        chosen(slots)
        everything(slots)
        shown.append((slots.keys[:, 0].clone(), slots.positions[:, 0].clone()))

    found = ev.replay(model, trace, "random", ev.Budget(24, 2, 6, 8), on_event=look, progress=False)
    part, whole = chosen.result(), everything.result()
    assert part.steps.tolist() == whole.steps.tolist() == found.retention.event_steps.tolist()
    assert set(part.slots) == {16} and set(whole.slots) == {24}
    for event, (keys, positions) in enumerate(shown):
        step = int(part.steps[event])
        assert part.measures["key_cosine"][event, 1, 1] == pytest.approx(pairwise_loop(keys[1, 1, 2:18]), abs=1e-6)
        assert whole.measures["key_cosine"][event, 1, 1] == pytest.approx(pairwise_loop(keys[1, 1]), abs=1e-6)
        rank = float(diversity.effective_rank(keys[3, 0, 2:18]))
        assert part.measures["effective_rank"][event, 3, 0] == pytest.approx(rank, rel=1e-5)
        gaps = np.diff([1, *positions[2, 1, 2:18].tolist(), step - 6]) - 1
        assert part.measures["largest_gap"][event, 2, 1] == gaps.max()
    assert (whole.measures["largest_gap"] >= part.measures["largest_gap"]).all()
    assert all(measured.shape == (len(part.steps), 4, 2) for measured in part.measures.values())
    assert set(part.measures) == set(diversity.MEASURES)


def test_a_run_without_evictions_has_nothing_to_measure():
    model = tiny_model("qwen3")
    trace = ev.record(model, random_prompt(8), tokens=random_prompt(10, 9), progress=False)
    recorder = diversity.DiversityRecorder()
    ev.replay(model, trace, "random", ev.Budget(24, 2, 6, 8), on_event=recorder, progress=False)
    assert recorder.result().steps.tolist() == [] and recorder.result().measures["coverage"].size == 0


def test_one_sequence_at_a_time():
    from epiviz.policies.base import Slots

    two = Slots(torch.zeros(1, 2, 1, 3, 4), torch.zeros(1, 2, 1, 3, 4), torch.zeros(1, 2, 1, 3, dtype=torch.int64),
                torch.ones(1, 1, 1, 3, dtype=torch.bool), None, {})  # fmt: skip
    with pytest.raises(ValueError, match="one sequence at a time, got 2"):
        diversity.DiversityRecorder()(two)
