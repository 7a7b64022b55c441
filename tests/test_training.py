"""Training: batches, gradients, checkpoints; and what a short one learns."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import epiviz as ev
from epiviz import tasks, training
from epiviz.tasks import batches, steps
from epiviz.training import Stage, TrainingPlan

PLAN = TrainingPlan(
    steps=8,
    stages=(Stage(0, (3, 4), 300), Stage(4, (5, 6), 300)),
    hidden=32,
    layers=2,
    intermediate=32,
    warmup=2,
)


def weights(model):
    return dict(model.lm.named_parameters())


def test_a_resumed_training_ends_where_an_uninterrupted_one_does(tmp_path):
    options = {"evaluate": training.unseen((3,), n=2), "checkpoint_every": 3, "progress": False}
    whole = training.train(PLAN, tmp_path / "whole", **options)
    training.train(PLAN, tmp_path / "parts", stop_at=5, **options)
    half = (tmp_path / "parts" / training.CHECKPOINT).read_bytes()
    training.train(PLAN, tmp_path / "parts", stop_at=7, **options)
    (tmp_path / "parts" / training.CHECKPOINT).write_bytes(half)  # as after a kill between metrics and checkpoint
    resumed = training.train(PLAN, tmp_path / "parts", **options)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name
    metrics = pd.read_csv(tmp_path / "parts" / training.METRICS)
    assert metrics["step"].tolist() == [3, 5, 6, 8]
    assert metrics["statements"].tolist() == [4, 6, 6, 6]
    assert {"tokens", "seconds", "loss", "exact_3", "lookups_3", "loss_3"} <= set(metrics)
    assert pd.read_csv(tmp_path / "whole" / training.METRICS)["loss"].iloc[-1] == metrics["loss"].iloc[-1]


def test_a_finished_training_is_not_repeated(tmp_path):
    first = training.train(PLAN, tmp_path, progress=False)
    written = (tmp_path / training.CHECKPOINT).stat().st_mtime_ns
    again = training.train(PLAN, tmp_path, progress=False)
    assert (tmp_path / training.CHECKPOINT).stat().st_mtime_ns == written
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(first).items())


def test_workers_share_a_batch_and_change_nothing(tmp_path):
    alone = training.train(PLAN, tmp_path / "one", progress=False, stop_at=3)
    shared = training.train(PLAN, tmp_path / "three", progress=False, stop_at=3, workers=3)
    for name, value in weights(alone).items():
        torch.testing.assert_close(value, weights(shared)[name], rtol=1e-3, atol=1e-5)


def test_a_short_training_learns(tmp_path):
    plan = replace(PLAN, steps=40, hidden=64, stages=(Stage(0, (3, 4), 600),), learning_rate=4e-3)
    model = training.train(plan, tmp_path, checkpoint_every=5, progress=False)
    metrics = pd.read_csv(tmp_path / training.METRICS)
    assert metrics["loss"].iloc[-1] < 0.7 * metrics["loss"].iloc[0]
    known = tasks.load("steps", n=40, seed=1, statements=(3, 4), split="train")
    unseen = tasks.load("steps", n=20, seed=1, statements=(3, 4))
    loss = batches.score(model, unseen)["loss"].mean()
    assert loss < batches.unigram_loss(known, unseen, model.tokenizer) < np.log(len(model.tokenizer))


def test_only_the_solution_has_labels():
    tokenizer = training.new_model(PLAN).tokenizer
    problems = tasks.load("steps", n=3, statements=(3, 9))
    tokens, labels = batches.collate(problems, tokenizer)
    for problem, row, label in zip(problems, tokens, labels, strict=True):
        assert tokenizer.decode(label[label != batches.IGNORED]) == f"{problem.solution} <eos>"
        known = row[: int((row != tokenizer.pad_token_id).sum())]
        assert tokenizer.decode(known) == f"<bos> {problem.prompt} <think> {problem.solution}"
        first = int((label != batches.IGNORED).nonzero()[0])
        assert tokenizer.decode(row[first]) == "<think>"


def test_batches_are_functions_of_their_step():
    tokenizer = training.new_model(PLAN).tokenizer
    one, other = training.Batches(PLAN, tokenizer), training.Batches(PLAN, tokenizer)
    later = other(training.POOL + 1)
    assert torch.equal(later[0], other(training.POOL + 1)[0])
    for step in (0, 3, training.POOL + 1):
        assert torch.equal(one(step)[0], other(step)[0]) and torch.equal(one(step)[1], other(step)[1])
    assert one(0)[0].shape != one(1)[0].shape or not torch.equal(one(0)[0], one(1)[0])


def test_a_batch_holds_what_the_plan_says_and_nothing_unseen():
    plan = replace(PLAN, stages=(Stage(0, (3, 4), 1000), Stage(16, (5, 6), 1000)))
    drawn = training.Batches(plan, training.new_model(plan).tokenizer)
    problems = [problem for batch in drawn._draw(0) for problem in batch]
    assert {problem.meta["split"] for problem in problems} == {"train"}
    assert {problem.meta["kind"] for problem in problems} == set(steps.KINDS)
    assert {problem.meta["statements"] for problem in problems} == {3, 4}
    sizes = [drawn(step)[0].numel() for step in range(training.POOL)]
    assert 900 < np.mean(sizes) < 1200, "little padding"
    assert {p.meta["statements"] for batch in drawn._draw(1) for p in batch} == {5, 6}, "the stage of a later pool"


def test_a_stage_without_carries_draws_short_problems_that_need_none():
    plan = replace(PLAN, stages=(Stage(0, (3, 20), 500, carry_free=1.0),))
    problems = [p for batch in training.Batches(plan, training.new_model(plan).tokenizer)._draw(0) for p in batch]
    assert {problem.meta["statements"] for problem in problems} == set(range(3, steps.MAX_CARRY_FREE + 1))
    assert all(re.search(r"ask .+ > (\d) . check \1", p.solution) for p in problems)
    sums = [s for p in problems for s in re.findall(r"[a-z]?(\d) \+(?: [a-z])? [a-z]?(\d) > (\d)", p.solution)]
    assert sums and all(int(a) + int(b) == int(c) for a, b, c in sums)


def test_the_learning_rate_warms_up_stays_and_falls():
    plan = TrainingPlan(steps=1000, stages=PLAN.stages, warmup=100, decay=0.3, learning_rate=1.0)
    rates = [plan.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == 0.01 and rates[99:700] == [1.0] * 601
    assert np.all(np.diff(rates[700:]) < 0) and rates[-1] == pytest.approx(1 / 300)
    longer = replace(plan, steps=2000)
    assert [longer.learning_rate_at(step) for step in range(700)] == rates[:700], (
        "a longer plan continues a shorter one"
    )


def test_composite_words_start_as_the_sum_of_their_parts():
    model = training.new_model(PLAN)
    embeddings = model.lm.get_input_embeddings().weight
    name, digit, both = embeddings[model.tokenizer.convert_tokens_to_ids(["k", "6", "k6"])]
    torch.testing.assert_close(both, (name + digit) / 2**0.5)
    assert model.lm.lm_head.weight is embeddings


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_generates_through_the_library(architecture):
    model = training.new_model(replace(PLAN, architecture=architecture))
    assert model.shape.group == 2
    (problem,) = tasks.load("steps", n=1, statements=5)
    budget = ev.Budget(24, recent=8, buffer=4)
    run = ev.generate(model, problem.prompt, "random", budget, max_new_tokens=20, seed=0, progress=False)
    assert model.tokenizer.decode(run.prompt_tokens) == f"<bos> {problem.prompt} <think>"
