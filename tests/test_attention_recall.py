"""Attention recall, against the weights of a plain full pass."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import attention_weights, seen
from tiny import fitting, random_prompt, tiny_model

import epiviz as ev

BUDGET = ev.Budget(30, sinks=2, recent=8, buffer=8)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1)])
def test_recall_is_the_mass_on_what_is_held(heads):
    model = tiny_model("qwen3", *heads)
    trace = ev.record(model, random_prompt(40), tokens=random_prompt(160, 9), progress=False)
    names = ["full", "random", "vase-attnv", "seer-quest"]
    replays = [ev.replay(model, trace, fitting(name), BUDGET, progress=False) for name in names]
    causal = np.broadcast_to(np.tril(np.ones((199, 199), dtype=bool)), (4, heads[1], 199, 199))
    weights = attention_weights(model, trace.tokens[:-1].tolist(), causal).numpy()
    weights = weights.reshape(4, heads[1], -1, 199, 199).mean(2)
    for found, recalled in zip(replays, ev.attention_recall(model, trace, replays, progress=False), strict=True):
        expected = (weights * seen(found)).sum(-1)
        assert recalled[..., 40:199] == pytest.approx(expected[..., 40:], abs=1e-6)
        assert np.isnan(recalled[..., :40]).all() and np.isnan(recalled[..., 199]).all()
    assert recalled[..., 40:199].min() < 0.9, "something is forgotten"


def test_sliding_layers_recall_everything():
    model = tiny_model("gemma3")
    trace = ev.record(model, random_prompt(20), tokens=random_prompt(80, 9), progress=False)
    found = ev.replay(model, trace, "random", BUDGET, progress=False)
    (recalled,) = ev.attention_recall(model, trace, [found], progress=False)
    assert (recalled[[0, 2], :, 20:99] == 1).all()
    assert recalled[[1, 3], :, 20:99].min() < 0.99


def test_a_replay_of_another_trace_is_refused():
    model = tiny_model("qwen3")
    one, two = (ev.record(model, random_prompt(20), tokens=random_prompt(60, s), progress=False) for s in (1, 2))
    found = ev.replay(model, one, "random", BUDGET, progress=False)
    with pytest.raises(ValueError, match="a replay of .* cannot be measured on the trace"):
        ev.attention_recall(model, two, [found])
