"""Bad input gets a typed error that names the numbers and the remedy, before anything is computed."""

from __future__ import annotations

import pytest
from tiny import random_prompt, tiny_model

import epiviz as ev


def generate(**arguments):
    defaults = {"prompt": random_prompt(30), "policy": "random", "budget": ev.Budget(40, 2, 8, 8), "max_new_tokens": 20}
    return ev.generate(tiny_model("qwen3"), **{**defaults, **arguments}, progress=False)


@pytest.mark.parametrize("total", [float("nan"), float("inf"), 0, -5, -0.5, 1.5, 200.5, "many", None, True])
def test_totals_that_are_no_budget(total):
    with pytest.raises(ev.BudgetError, match=r"total"):
        ev.Budget(total)


@pytest.mark.parametrize("field, value", [("sinks", -1), ("recent", 2.5), ("buffer", 0)])
def test_parts_that_are_no_counts(field, value):
    with pytest.raises(ev.BudgetError, match=f"{field} must be a whole number of at least"):
        ev.Budget(512, **{field: value})


def test_a_budget_smaller_than_what_it_protects():
    with pytest.raises(
        ev.BudgetError, match="11 slots cannot hold 4 sinks . 8 recent tokens; raise total to at least 12"
    ):
        ev.Budget(11, sinks=4, recent=8)
    with pytest.raises(
        ev.BudgetError,
        match=r"40 slots cannot hold a protected prompt of 33 tokens \+ 8 recent .*at least 41.*protect_prompt=False",
    ):
        generate(prompt=random_prompt(33), budget=ev.Budget(40, 2, 8, 8, protect_prompt=True))
    with pytest.raises(
        ev.BudgetError, match=r"5 slots \(a share of 0.1 of 50 tokens\) cannot hold 2 sinks \+ 8 recent"
    ):
        generate(budget=ev.Budget(0.1, 2, 8, 8))


def test_a_budget_of_what_it_protects_leaves_no_choice():
    run = generate(budget=ev.Budget(10, 2, 8, 1))
    assert (run.retention.alive(run.retention.tokens).sum(-1) == 10).all()


def test_a_missing_budget():
    with pytest.raises(ev.BudgetError, match="policy 'random' needs a budget, got None"):
        generate(budget=None)
    with pytest.raises(ev.BudgetError, match="needs a budget, got 512; pass epiviz.Budget"):
        generate(budget=512)


def test_more_reserved_than_free():
    with pytest.raises(ev.BudgetError, match="reserves 34 beside 2 sinks, but only 30 are free"):
        generate(policy=ev.policies.get("vase-attnv", value_share=0.9))


def test_unknown_policies_and_parameters():
    with pytest.raises(
        ev.UnknownPolicyError, match="unknown policy 'epiky'; did you mean 'epikv'.*known policies: .*epikv, .*full"
    ):
        generate(policy="epiky")
    with pytest.raises(
        TypeError,
        match=r"'snapkv' has no parameter 'windows'; did you mean 'window'\? its parameters: .*pool, .*window",
    ):
        ev.policies.get("snapkv", windows=3)
    with pytest.raises(ValueError, match="pool must be odd"):
        ev.policies.get("snapkv", pool=4)
    with pytest.raises(ValueError, match="layer 9 does not exist: the model has layers 0 … 3"):
        generate(policy=ev.policies.get("epikv", layers=(1, 9)))


def test_empty_prompts_and_lengths():
    for prompt in ("", [], [[]]):
        with pytest.raises(ValueError, match="empty"):
            generate(prompt=prompt)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        generate(max_new_tokens=0)
    with pytest.raises(ValueError, match="sampling must be 'greedy' or 'model', got 'hot'"):
        generate(sampling="hot")
    with pytest.raises(ValueError, match="temperature ≥ 0"):
        generate(temperature=-1.0)


def test_ids_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"token id 500 is outside the vocabulary .97 ids"):
        generate(prompt=[1, 500])


@pytest.mark.parametrize("prompt", [None, {"role": "user", "content": "hi"}, [1.5, 2.0]])
def test_prompts_of_the_wrong_kind(prompt):
    with pytest.raises(ValueError, match="a prompt is a text|must be whole numbers"):
        generate(prompt=prompt)


def test_numbers_of_numpy_and_prompts_in_tensors_are_taken():
    import numpy as np
    import torch

    budget = ev.Budget(np.int64(40), sinks=2.0, recent=np.int32(8), buffer=8)
    assert budget == ev.Budget(40, 2, 8, 8)
    assert isinstance(budget.sinks, int)
    first = generate(prompt=np.arange(30), budget=budget, seed=np.int64(3))
    assert first.seed == 3
    assert [run.tokens for run in generate(prompt=torch.arange(30)[None], seed=3)] == [first.tokens]


def test_what_cannot_be_wrapped_and_what_is_taken():
    with pytest.raises(ValueError, match="'full' cannot be wrapped: it never evicts"):
        ev.policies.ReserveValues(ev.policies.get("full"))
    with pytest.raises(ValueError, match="'lagkv-ratio' cannot be wrapped: it decides how much it keeps itself"):
        ev.policies.Sample(ev.policies.get("lagkv-ratio"))

    class Greedy(ev.policies.Policy):
        def needs(self, shape):
            import torch

            return ev.policies.Needs(tracks={"position": torch.float32})

    with pytest.raises(ValueError, match="names a track 'position', which the engine keeps for itself"):
        generate(policy=Greedy())


def test_a_policy_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from epiviz.policies import Policy, Ranking, register\n"
        "@register('from-a-file')\n"
        "class Mine(Policy):\n"
        "    def rank(self, slots, state, draws):\n"
        "        return Ranking(-slots.positions.double())\n"
    )
    run = generate(policy=str(file), max_new_tokens=60)
    assert run.policy == "from-a-file" in ev.policies.names()
    assert generate(policy=f"{file}:from-a-file", max_new_tokens=60).tokens == run.tokens
    with pytest.raises(ev.UnknownPolicyError, match="there is no policy file"):
        generate(policy=str(tmp_path / "none.py"))
