"""Evaluation: batches, resumption, errors, draws, what is recorded. Tiny float64 models with the words of ``steps``."""

from __future__ import annotations

import functools
import signal
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from forked import Forked

import epiviz as ev
from epiviz import attempts, evaluation, policies, tasks, training
from epiviz.policies.base import Policy, Ranking
from epiviz.tasks.outcomes import OUTCOMES

LIMITS = {"sinks": 2, "recent": 4, "buffer": 4}
BUDGET = ev.Budget(total=24, **LIMITS)
NEW = 40  # tokens
# A selection of 64 tokens a block would select nothing of texts so short, and VaSE's windows want more recent tokens.
FITTING = {"seer-oracle": {"block": 8}, "seer-quest": {"block": 8}}


@functools.cache
def model() -> ev.Model:
    """A random model that knows the words of ``steps`` and ends its texts at different lengths."""
    plan = replace(training.TWIN, hidden=32, intermediate=48, initializer_range=0.4)
    small = training.new_model(plan)
    double = ev.Model(small.lm.double(), small.tokenizer, "twin")
    double.__dict__["stop_tokens"] = frozenset(range(20, 40))
    return double


def problems(n: int):
    return tasks.load("steps", n=n, seed=3, statements=(3, 6))


def run(chosen="random", n=4, budget=BUDGET, **settings):
    given = {"max_new_tokens": NEW, "progress": False} | settings
    return ev.evaluate(model(), problems(n), chosen, budget, **given)


def start(folder):
    """Let another process write the texts of two cells, each at once, and tell of each."""

    def work(tell):
        evaluation.WRITE_SECONDS, put = 0.0, evaluation._Writer._put

        def told(self, attempt, record):
            put(self, attempt, record)
            tell(attempt.id)

        evaluation._Writer._put = told
        run(["random", "epikv"], n=6, samples=2, batch_size=4, cache=folder)

    return Forked(work)


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="seconds")


def test_rows_end_at_different_times_and_most_evict(tmp_path):
    found = run(n=8, cache=tmp_path)
    assert len(set(found.frame["tokens"])) > 3 and found.frame["tokens"].min() < 10 < found.frame["tokens"].max()
    assert 0.5 < found.frame["evicted"].mean() <= 1


@pytest.mark.parametrize("name", policies.names())
def test_a_text_does_not_depend_on_its_batch(name, tmp_path):
    chosen = policies.get(name, **FITTING.get(name, {}))
    settings = {"n": 3, "samples": 1, "budget": ev.Budget(total=32, **LIMITS), "max_new_tokens": 24}
    alone = run(chosen, batch_size=1, cache=tmp_path / "alone", **settings)
    together = run(
        chosen, batch_size=2, cache=tmp_path / "together", **settings
    )  # the third takes the first free place
    pd.testing.assert_frame_equal(comparable(alone.frame), comparable(together.frame))
    assert alone.texts == together.texts
    assert (alone.frame["outcome"] != "error").all()


def test_places_are_filled_again_and_every_text_is_what_generate_writes(tmp_path, monkeypatch):
    joined = []
    join = evaluation.Continuous._fill

    def spy(self, session, logits):
        joined.append(len(self.running))
        return join(self, session, logits)

    monkeypatch.setattr(evaluation.Continuous, "_fill", spy)
    found = run("vase-dkv", n=7, samples=2, seed=5, batch_size=3, cache=tmp_path)
    assert len(joined) >= 3 and any(joined), "rows must join others that are still running"
    prompts = [problem.prompt for problem in problems(7)]
    alone = ev.generate(model(), [*prompts, *prompts], "vase-dkv", BUDGET, NEW, seed=5, progress=False)
    frame = found.frame.sort_values(["sample"], kind="stable")
    assert frame["tokens"].tolist() == [len(each.tokens) for each in alone]
    assert [found.texts[i].strip() for i in frame.index] == [each.text.strip() for each in alone]
    for name in ("mean_slots", "peak_slots", "evictions", "prefill_peak_slots"):
        assert frame[name].tolist() == pytest.approx([getattr(each.meter, name) for each in alone])


def test_draws_hang_on_seed_and_sample_alone(tmp_path):
    few = run(n=3, samples=1, seed=1, cache=tmp_path / "few")
    many = run(n=5, samples=2, seed=[1, 2], cache=tmp_path / "many")
    frame = many.frame
    same = frame[(frame["sample"] == 0) & (frame["seed"] == 1)].head(3)
    pd.testing.assert_frame_equal(comparable(few.frame), comparable(same.reset_index(drop=True)))
    wide = frame.assign(text=many.texts).pivot_table("text", "problem", ["seed", "sample"], aggfunc="first")
    apart = [(wide[one] != wide[other]).any() for one, other in ((((1, 0)), (1, 1)), ((1, 0), (2, 0)))]
    assert all(apart), "another sample or seed draws otherwise"


def test_sampled_tokens_do_not_depend_on_the_batch(tmp_path):
    settings = {"n": 4, "samples": 2, "temperature": 1.0, "top_p": 0.9}
    one = run("epikv", batch_size=1, cache=tmp_path / "1", **settings)
    three = run("epikv", batch_size=3, cache=tmp_path / "3", **settings)
    assert one.texts == three.texts and len(set(one.texts)) > 4


def test_a_killed_evaluation_goes_on_and_gives_the_same_frame(tmp_path):
    killed = start(tmp_path / "killed")
    for _ in range(5):
        killed.next()
    killed.kill()
    there = sum(len(evaluation._records(folder)) for folder in (tmp_path / "killed").iterdir() if folder.is_dir())
    assert 5 <= there < 24, "killed in the middle"
    settings = {"n": 6, "samples": 2, "batch_size": 4}
    resumed = run(["random", "epikv"], cache=tmp_path / "killed", **settings)
    whole = run(["random", "epikv"], cache=tmp_path / "whole", **settings)
    pd.testing.assert_frame_equal(comparable(resumed.frame), comparable(whole.frame))
    assert resumed.texts == whole.texts
    assert len(list((tmp_path / "killed").rglob("*.parquet"))) == 2, "one file per cell in the end"


def test_a_second_call_reads_and_more_problems_add(tmp_path, monkeypatch):
    first = run(n=3, cache=tmp_path)
    written = []
    put = evaluation._Writer._put
    monkeypatch.setattr(
        evaluation._Writer, "_put", lambda self, attempt, record: (written.append(attempt), put(self, attempt, record))
    )
    again = run(n=3, cache=tmp_path)
    assert not written and again.texts == first.texts
    pd.testing.assert_frame_equal(again.frame, first.frame)
    run(n=5, samples=2, cache=tmp_path)
    assert len(written) == 10 - 3


def test_a_text_that_would_end_elsewhere_is_written_anew(tmp_path):
    before = run(n=3, cache=tmp_path)
    other = ev.Model(model().lm, model().tokenizer, "twin")
    other.__dict__["stop_tokens"] = frozenset(range(10, 30))
    after = ev.evaluate(other, problems(3), "random", BUDGET, max_new_tokens=NEW, progress=False, cache=tmp_path)
    assert after.texts != before.texts and run(n=3, cache=tmp_path).texts == before.texts


def test_a_changed_grader_judges_texts_that_are_there_anew(tmp_path, monkeypatch):
    before = run(n=3, cache=tmp_path)
    monkeypatch.setattr(evaluation.kept, "code_hash", lambda modules: f"changed {modules is attempts.GRADING}")
    monkeypatch.setattr(evaluation.Settings, "key", lambda self, *cell: next(
        path.name for path in tmp_path.iterdir() if path.is_dir()))  # fmt: skip
    monkeypatch.setattr(attempts, "judge", lambda *args, **kwargs: evaluation.Judgement("garbage"))
    after = run(n=3, cache=tmp_path)
    assert set(after.frame["outcome"]) == {"garbage"} and after.texts == before.texts


def test_a_model_told_not_to_think_answers_with_its_whole_text(tmp_path, monkeypatch):
    """Its texts are those that are there; only what counts as their answer changes."""
    before = run(n=6, cache=tmp_path)
    monkeypatch.setattr(evaluation, "_run", lambda *args: pytest.fail("nothing is to be written"))
    after = run(n=6, thinks=False, cache=tmp_path)
    assert after.texts == before.texts and "no answer" in set(before.frame["outcome"])
    ended = after.frame[after.frame["status"] == "finished"]
    assert "no answer" not in set(ended["outcome"]) and {"correct", "wrong"} & set(ended["outcome"])
    pd.testing.assert_frame_equal(run(n=6, cache=tmp_path).frame, before.frame)


@dataclass(frozen=True)
class Breaks(Policy):
    """Raises at an eviction of a text whose number of tokens seen at event 1 is even, if ``always`` at any."""

    always: bool = False
    name = "breaks"

    def rank(self, slots, state, draws):
        if self.always or any(sample % 3 == 0 for sample in draws.samples):
            raise ZeroDivisionError("nothing left to divide")
        return Ranking(slots.positions.float())


def test_what_a_policy_raises_is_the_error_of_that_text_alone(tmp_path):
    with pytest.warns(UserWarning, match="texts ended in an error, the first on .* under breaks: ZeroDivisionError"):
        found = run([Breaks(), "recency"], n=9, batch_size=4, cache=tmp_path)
    frame = found.frame[found.frame["policy"] == "breaks"]
    failed = frame["outcome"] == "error"
    assert 1 <= failed.sum() <= 8
    assert (frame.loc[failed, "error"] == "ZeroDivisionError: nothing left to divide").all()
    assert not frame["correct"][failed].any() and frame.loc[failed, "tokens"].isna().all()
    assert (frame.loc[~failed, "error"] == "").all()
    # Who did not raise did what it does under a policy that ranks alike.
    alike = found.frame[found.frame["policy"] == "recency"]
    assert frame.loc[~failed, "tokens"].tolist() == alike["tokens"][(~failed).to_numpy()].tolist()
    row = found.table[found.table["policy"] == "breaks"].iloc[0]
    assert row["errors"] == failed.sum() and row["n"] == 9 and "errors" in repr(found)


def test_a_policy_that_always_raises_does_not_end_the_others(tmp_path):
    with pytest.warns(UserWarning, match="ended in an error"):
        found = run([Breaks(always=True), "recency"], n=5, batch_size=5, cache=tmp_path)
    counts = found.frame.groupby("policy")["outcome"].agg(lambda outcome: (outcome == "error").mean())
    assert counts["breaks(always=True)"] >= 0.6 and counts["recency"] == 0


def test_errors_are_tried_again(tmp_path, monkeypatch):
    prefill, calls = evaluation.Session.prefill, []

    def fails_once(self):
        calls.append(len(self.rows))
        if len(calls) <= 3:  # the batch of two, and both alone
            raise MemoryError("full")
        return prefill(self)

    monkeypatch.setattr(evaluation.Session, "prefill", fails_once)
    with pytest.warns(UserWarning, match="2 of 2 texts ended in an error.*MemoryError: full"):
        assert run(n=2, cache=tmp_path).outcomes == {"error": 2}
    assert calls == [2, 1, 1]
    assert "error" not in run(n=2, cache=tmp_path).outcomes


def test_what_the_grader_raises_is_no_error_of_the_policy(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the grader is broken")

    monkeypatch.setattr(attempts, "judge", broken)
    with pytest.raises(RuntimeError, match="the grader is broken"):
        run(n=2, cache=tmp_path)


def test_ctrl_c_keeps_what_has_ended(tmp_path, monkeypatch):
    put, ended = evaluation._Writer._put, []

    def press(self, attempt, record):
        put(self, attempt, record)
        ended.append(attempt.id)
        if len(ended) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(evaluation._Writer, "_put", press)
    with pytest.raises(KeyboardInterrupt):
        run(n=6, batch_size=2, cache=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert set(ended) <= set(evaluation._records(folder)) and len(ended) < 6
    monkeypatch.setattr(evaluation._Writer, "_put", put)
    resumed = run(n=6, batch_size=2, cache=tmp_path)
    assert resumed.texts == run(n=6, batch_size=2, cache=tmp_path / "whole").texts


def test_ctrl_c_while_the_last_running_text_is_graded_is_not_lost(tmp_path, monkeypatch):
    grade, graded = attempts.judge, []

    def press(*args, **kwargs):
        graded.append(1)
        if len(graded) == 2:
            signal.raise_signal(signal.SIGINT)
        return grade(*args, **kwargs)

    monkeypatch.setattr(attempts, "judge", press)
    with pytest.raises(KeyboardInterrupt):
        run(n=3, batch_size=1, cache=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert len(evaluation._records(folder)) == 2, "the text that was being graded is kept"
    assert len(run(n=3, batch_size=1, cache=tmp_path)) == 3 and len(graded) == 3


def test_reading_waits_for_who_joins_the_files(tmp_path, monkeypatch):
    """Another process makes one file of all while we are about to read the first."""
    run(n=2, cache=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    records = list(evaluation._records(folder).values())
    (whole,) = folder.glob("*.parquet")
    whole.unlink()
    for record in records:
        evaluation._write(folder, [record])
    read = pd.read_parquet

    def joined_meanwhile(path):
        monkeypatch.setattr(pd, "read_parquet", read)
        evaluation._Writer(None, evaluation.Cell(None, None, 0, folder), None).join_parts()
        return read(path)

    monkeypatch.setattr(pd, "read_parquet", joined_meanwhile)
    assert set(evaluation._records(folder)) == {record["id"] for record in records}
    assert len(list(folder.glob("*.parquet"))) == 1


def test_numbers_of_numpy_are_numbers_and_a_seed_counts_once(tmp_path):
    found = run(n=2, budget=np.int64(80), seed=np.int64(1), cache=tmp_path)
    assert set(found.frame["seed"]) == {1} and set(found.frame["slots"]) == {80}
    assert len(run(n=2, seed=[0, 0], cache=tmp_path)) == 2


def test_accuracy_is_conditional_on_an_eviction_where_one_happened(tmp_path):
    limits = [ev.Budget(total=24, **LIMITS), ev.Budget(total=400, **LIMITS)]
    found = run(["full", "random"], n=6, budget=limits, cache=tmp_path)
    table = found.table.set_index(["policy", "budget"])
    assert table.loc[("random", 400.0), "n_evicted"] == 0 and np.isnan(table.loc[("random", 400.0), "accuracy_evicted"])
    tight = found.frame[(found.frame["policy"] == "random") & (found.frame["budget"] == 24)]
    evicted = tight["evictions"] > 0
    assert table.loc[("random", 24.0), "n_evicted"] == evicted.sum() > 0
    assert table.loc[("random", 24.0), "accuracy_evicted"] == tight["correct"][evicted].mean()
    roomy = found.frame[(found.frame["policy"] == "random") & (found.frame["budget"] == 400)]
    full = found.frame[found.frame["policy"] == "full"]
    assert roomy["tokens"].tolist() == full["tokens"].tolist(), "nothing evicted, nothing changed"
    assert full["budget"].isna().all() and not full["evicted"].any()
    assert (found.frame["seconds"] > 0).all()
    assert set(found.frame["outcome"]) <= set(OUTCOMES)
    assert {"kind", "statements", "look_back"} <= set(found.frame.columns)
    with pytest.raises(ValueError, match="3 pairs of policy and budget"):
        found.accuracy  # noqa: B018


def test_shares_are_resolved_for_each_problem(tmp_path):
    found = run(n=4, budget=ev.Budget(total=0.5, **LIMITS), cache=tmp_path)
    expected = (0.5 * (found.frame["prompt_tokens"] + NEW)).round().astype("Int64")
    assert found.frame["slots"].tolist() == expected.tolist() and set(found.frame["budget"]) == {0.5}
    assert (found.frame["peak_slots"] <= found.frame["slots"] + 4).all()


def test_bad_input_fails_before_anything_is_written(tmp_path):
    protected = ev.Budget(total=24, protect_prompt=True, **LIMITS)
    with pytest.raises(
        ev.BudgetError, match=r"random, budget 24, seed 0 does not fit \d of 4 problems; steps-.*prompt"
    ):
        run(budget=[BUDGET, protected], cache=tmp_path)
    with pytest.raises(ev.BudgetError, match="snapkv, .* 4 of 4 problems; .* the last 64 queries, but only"):
        run(["random", "snapkv"], positions="rerotated", cache=tmp_path)
    with pytest.raises(ev.BudgetError, match="policy 'random' needs a budget"):
        run(budget=None, cache=tmp_path)
    with pytest.raises(ev.UnknownPolicyError, match="did you mean"):
        run("randon", cache=tmp_path)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        run(samples=0, cache=tmp_path)
    with pytest.raises(ValueError, match="no problems"):
        ev.evaluate(model(), [], cache=tmp_path)
    with pytest.raises(ValueError, match="stands 2 times"):
        ev.evaluate(model(), problems(1) * 2, cache=tmp_path)
    with pytest.raises(TypeError, match="list of Problem"):
        ev.evaluate(model(), ["1 + 1"], cache=tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        ev.evaluate(ev.Model(model().lm, None, "mute"), problems(1), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_share_the_cells(tmp_path, monkeypatch):
    """A cell that another process is at is waited for, and read."""
    written, put = [], evaluation._Writer._put
    monkeypatch.setattr(evaluation._Writer, "_put", lambda self, *told: (written.append(1), put(self, *told)))
    other = start(tmp_path)
    other.next()
    mine = run(["random", "epikv"], n=6, samples=2, batch_size=4, cache=tmp_path)
    assert len(written) + 1 + len(other.rest()) == 24, "no text twice, none left out"
    assert len(mine) == 24
