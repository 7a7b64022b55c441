"""ThinKV's evicting half, held to slow references: sparsities, thoughts, the ladder, medoids, and whole histories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import deviation, evicting_run
from stepper import Stepper
from tiny import random_prompt, tiny_model

import epiviz as ev
from epiviz import calibration, policies
from epiviz.policies import Budget, ReserveValues, Sample, thinkv
from epiviz.policies.medoids import medoids
from epiviz.policies.thinkv import EXECUTION, REASONING, TRANSITION, Segment, Thresholds, shrink

LADDER = (64, 32, 16, 8, 4)
SMALL = {"interval": 16, "ladder": (8, 4, 2)}


# -- medoids -----------------------------------------------------------------------------------------------------------


def slow_medoids(keys: np.ndarray, count: int) -> set[int]:
    """The tokens that stand for the keys ``[n, head_dim]`` of one head; ties go to the newer."""
    n = len(keys)
    if count >= n or count < 1:
        return set(range(n)) if count >= n else set()

    chosen = [n - 1]
    while len(chosen) < count:
        gap = ((keys[:, None] - keys[chosen]) ** 2).sum(-1).min(1)
        chosen.append(max(set(range(n)) - set(chosen), key=lambda i: (gap[i], i)))
    centres = keys[chosen].copy()
    for _ in range(20):
        cluster = ((keys[:, None] - centres) ** 2).sum(-1).argmin(1)
        for number in range(count):
            if (cluster == number).any():
                centres[number] = keys[cluster == number].mean(0)
    distance = ((keys[:, None] - centres) ** 2).sum(-1)
    cluster, own = distance.argmin(1), distance.min(1)
    slack = 1e-5 * ((keys - keys[-1]) ** 2).sum(-1).max()  # a pair's members are equally near to its centre
    kept = set()
    for number in set(cluster.tolist()):
        members = np.flatnonzero(cluster == number)
        kept.add(max(i for i in members.tolist() if own[i] <= own[members].min() + slack))
    return kept | set(sorted(set(range(n)) - kept)[len(kept) - count :] if len(kept) < count else ())


@pytest.mark.parametrize("n, count", [(2, 1), (9, 3), (17, 16), (40, 8), (128, 64)])
def test_medoids_against_loops(n, count):
    random = np.random.default_rng(n)
    centres = random.normal(size=(6, 5)) * 3
    keys = centres[random.integers(0, 6, size=(3, n))] + random.normal(size=(3, n, 5))
    found = medoids(torch.from_numpy(keys), count)
    for head, mark in enumerate(found):
        assert set(mark.nonzero()[:, 0].tolist()) == slow_medoids(keys[head], count)


def test_a_cluster_keeps_the_member_nearest_to_its_centre():
    """Two groups of three on a line; −1 and 12 lie in the middle of theirs."""
    keys = torch.tensor([[[-3.0], [-1.0], [1.5], [10.0], [12.0], [13.5]]])
    assert medoids(keys, 2)[0].tolist() == [False, True, False, False, True, False]


def test_fewer_keys_than_centres_and_equal_keys():
    assert medoids(torch.randn(2, 3, 4), 3).all() and medoids(torch.randn(2, 3, 4), 9).all()
    assert not medoids(torch.randn(2, 3, 4), 0).any() and medoids(torch.randn(2, 0, 4), 2).shape == (2, 0)
    equal = torch.full((2, 7, 4), 1 / 3)
    assert medoids(equal, 3).tolist() == [[False] * 4 + [True] * 3] * 2, "of equal keys the newest stay"
    two = torch.tensor([[[1.0], [5.0], [1.0], [5.0], [5.0]]])
    assert medoids(two, 2)[0].tolist() == [False, False, True, False, True]
    assert medoids(two, 4)[0].tolist() == [False, True, True, True, True], (
        "the newest take the places of empty clusters"
    )


# -- sparsity and thoughts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_sparsity_against_a_loop(seed):
    random = np.random.default_rng(seed)
    visible = np.tril(np.ones((5, 12), dtype=bool), 7)[None, None].repeat(2, 0)
    visible[1, :, :, 9:] = False
    weights = random.exponential(size=(2, 3, 5, 12)) ** 6 * visible
    found = thinkv.attention_sparsity(torch.from_numpy(weights), torch.from_numpy(visible))
    for row, query in np.ndindex(2, 5):
        seen = visible[row, 0, query]
        shares = [(w[query, seen] < 0.01 * w[query, seen].max()).mean() for w in weights[row]]
        assert found[row, query].item() == pytest.approx(np.mean(shares), abs=1e-15)


def test_a_weight_at_the_limit_is_not_faint_and_an_unseen_one_is_not_counted():
    rows = torch.tensor([1.0, 0.0078125, 0.25, 0.0, 0.0])[None, None, None].double()
    visible = torch.tensor([True, True, True, True, False])[None, None, None]
    assert thinkv.attention_sparsity(rows, visible).item() == 0.5
    assert thinkv.attention_sparsity(rows, visible, least=0.0078125).item() == 0.25


def test_thoughts_of_sparsities():
    x = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    assert thinkv.classify(x, 0.3, 0.7).tolist() == [EXECUTION, REASONING, REASONING, TRANSITION, TRANSITION]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=25), st.integers(0, 25))
def test_tertiles_are_those_of_the_sequence_so_far(values, split):
    sparsity = torch.tensor([values], dtype=torch.float64) / 30
    state = {"sparsities": torch.zeros(1, thinkv.BINS + 1, dtype=torch.int64)}
    parts = [part for part in (sparsity[:, :split], sparsity[:, split:]) if part.shape[1]]
    found = torch.cat([thinkv.tertile_thoughts(part, state) for part in parts], dim=1)[0].tolist()
    for t, value in enumerate(values):
        so_far = values[: t + 1]
        place = (sum(v < value for v in so_far) + sum(v == value for v in so_far) / 2) / len(so_far)
        thirds = round(6 * place * len(so_far)), 2 * len(so_far)
        expected = EXECUTION if thirds[0] < thirds[1] else REASONING if thirds[0] < 2 * thirds[1] else TRANSITION
        assert found[t] == expected
    assert found[0] == REASONING


# -- the ladder --------------------------------------------------------------------------------------------------------


def segments(*thoughts_and_sizes, fixed=0):
    """Segments one behind the other; the newest ``fixed`` slots are protected."""
    found, start = [], 0
    for thought, size in thoughts_and_sizes:
        found.append([start, start + size, "TER".index(thought)])
        start += size
    return [Segment(a, b, min(max(b - start + fixed, 0), b - a), thought) for a, b, thought in found]


def test_letters_are_thoughts():
    assert (TRANSITION, EXECUTION, REASONING) == (0, 1, 2)


@pytest.mark.parametrize(
    "pieces, room, complete, kept",
    [
        # A completed transition: everything before it goes one rung down, itself not.
        ([("R", 128), ("E", 64), ("T", 4), ("T", 128)], 999, True, [64, 32, 4, 128]),
        ([("R", 100), ("E", 33), ("T", 128)], 999, True, [64, 32, 128]),
        # Running, or complete but no transition: nothing happens.
        ([("R", 128), ("T", 128)], 999, False, [128, 128]),
        ([("R", 128), ("E", 128)], 999, True, [128, 128]),
        # Over budget: transitions first, the oldest first, each down to the last rung before the next is touched.
        ([("T", 128), ("E", 128), ("T", 128), ("R", 10)], 390, False, [64, 128, 128, 10]),
        ([("E", 128), ("T", 128), ("R", 128), ("T", 128), ("R", 10)], 390, False, [128, 4, 128, 64, 10]),
        ([("R", 128), ("E", 128), ("R", 128), ("R", 10)], 211, False, [64, 4, 128, 10]),
        ([("R", 128), ("R", 128), ("R", 10)], 18, False, [4, 4, 10]),
        # A transition and the budget at once.
        ([("R", 64), ("E", 64), ("T", 128)], 170, True, [32, 8, 128]),
        # Less than every minimum: whole segments go, in the same order, then the running one gives what is missing.
        ([("R", 4), ("T", 4), ("E", 4), ("R", 10)], 17, False, [4, 0, 0, 10]),
        ([("R", 4), ("T", 4), ("E", 4), ("R", 10)], 9, False, [0, 0, 0, 9]),
        ([("R", 100)], 30, False, [30]),
    ],
)
def test_rungs(pieces, room, complete, kept):
    assert shrink(segments(*pieces), room, LADDER, complete) == kept


def test_protected_slots_stay_whatever_the_rung():
    assert shrink(segments(("E", 128), ("R", 40), fixed=100), 110, LADDER, False) == [64, 40]
    assert shrink(segments(("E", 128), ("R", 40), fixed=130), 131, LADDER, False) == [90, 40]
    assert shrink(segments(("E", 128), ("T", 10), fixed=120), 999, LADDER, True) == [110, 10]
    assert shrink(segments(("E", 128), ("R", 40), fixed=30), 30, LADDER, False) == [0, 30]


@given(
    st.lists(st.tuples(st.sampled_from("TER"), st.integers(1, 140)), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(0, 400),
    st.booleans(),
)
def test_what_every_ladder_keeps(pieces, fixed, extra, complete):
    given = segments(*pieces, fixed=fixed)
    room = sum(piece.fixed for piece in given) + extra
    kept = shrink(given, room, LADDER, complete)
    sizes = [piece.stop - piece.start for piece in given]
    assert sum(kept) <= room
    for piece, count, size in zip(given[:-1], kept, sizes, strict=False):
        assert count in {size, piece.fixed, *(max(rung, piece.fixed) for rung in (*LADDER, 0) if rung < size)}
    assert given[-1].fixed <= kept[-1] <= sizes[-1]
    assert kept[-1] == sizes[-1] or kept[:-1] == [piece.fixed for piece in given[:-1]], "the running one is the last"


# -- whole histories ---------------------------------------------------------------------------------------------------


class SlowSegment:
    """The tokens of one segment behind the protected front, per layer and head."""

    def __init__(self, thought, heads):
        self.thought, self.tokens, self.size = thought, {head: [] for head in heads}, 0

    def step_down(self, ladder, safe) -> bool:
        """Agree to keep as many tokens as the next rung says, but no fewer than are safe; tell whether that is less."""
        rungs = [rung for rung in ladder if rung < self.size]
        size = max(rungs[0], len(safe & set(self.tokens[0, 0]))) if rungs else self.size
        self.size, before = size, self.size
        return size < before

    def pick(self, keys, safe):
        """Keep what was agreed on."""
        for (layer, head), tokens in self.tokens.items():
            free = [t for t in tokens if t not in safe]
            kept = slow_medoids(keys[layer, head, free], self.size - (len(tokens) - len(free)))
            self.tokens[layer, head] = sorted({free[i] for i in kept} | (safe & set(tokens)))


class SlowThinKV:
    """Lists of tokens, and the rules one by one."""

    def __init__(self, budget, prompt, interval, ladder, keys):
        self.budget, self.prompt, self.interval, self.ladder, self.keys = budget, prompt, interval, ladder, keys
        self.front, self.segments, self.events, self.seen = [], [], [], 0

    def add(self, thought):
        if self.seen % self.interval == 0 or self.seen == self.prompt:
            heads = list(np.ndindex(self.keys.shape[:2]))
            self.segments.append(SlowSegment("R" if self.seen < self.prompt else thought, heads))
        if self.seen < self.budget.front:
            self.front.append(self.seen)
        else:
            self.segments[-1].size += 1
            for tokens in self.segments[-1].tokens.values():
                tokens.append(self.seen)
        self.seen += 1

    @property
    def held(self):
        return len(self.front) + sum(segment.size for segment in self.segments)

    def evict_if_due(self):
        border = self.seen % self.interval == 0
        protected = self.budget.front + self.budget.recent
        due = self.held > self.budget.total if self.seen == self.prompt else self.held >= self.budget.peak
        if not due and not (border and self.held > protected and self.seen > self.prompt):
            return
        held, safe = self.held, set(range(self.seen - self.budget.recent, self.seen))
        *earlier, running = [segment for segment in self.segments if segment.size]
        order = [segment for thought in "TER" for segment in earlier if segment.thought == thought]
        if border and running.thought == "T":
            for segment in order:
                segment.step_down(self.ladder, safe)
        for ladder in (self.ladder, [0]):
            while self.held > self.budget.total and any(segment.step_down(ladder, safe) for segment in order):
                pass
        running.size -= max(0, self.held - self.budget.total)
        if self.held < held:
            for segment in self.segments:
                segment.pick(self.keys, safe)
            heads = self.segments[0].tokens
            kept = {head: [*self.front, *(t for s in self.segments for t in s.tokens[head])] for head in heads}
            self.events.append((self.seen, kept))


def given_row(thought: str, n: int) -> np.ndarray:
    """Weights of which a quarter, half or nearly all are faint."""
    faint = {"E": n // 4, "R": n // 2, "T": n - 1}[thought]
    return np.concatenate([np.full(n - faint, 1.0), np.full(faint, 0.001)])


@pytest.mark.parametrize("total, protect", [(40, True), (40, False), (22, True), (17, True), (12, False), (8, False)])
def test_a_whole_history_against_lists(total, protect):
    """Budgets from ample to one slot above what is protected; thoughts of all kinds in random order."""
    random = np.random.default_rng(total)
    prompt, tokens, interval, ladder = 11, 150, 8, (4, 2, 1)
    keys = random.normal(size=(2, 2, tokens, 4)) * 3
    thresholds = Thresholds("made-up", 2, (0, 1), 0.4, 0.7)
    policy = policies.get("thinkv", interval=interval, ladder=ladder, thresholds=thresholds)
    budget = Budget(total, sinks=2, recent=5, buffer=6, protect_prompt=protect).resolve(prompt, tokens)
    stepper = Stepper(policy, budget, size=4, layers=2, heads=2, kv_heads=2)
    slow = SlowThinKV(budget, prompt, interval, ladder, keys)
    thoughts = random.choice(list("RRRETT"), size=tokens)
    for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, tokens))]:
        row = given_row(thoughts[start], stepper.cache.held[0] + stop - start)
        stepper.feed(stop - start, keys=keys[:, None, :, start:stop], rows=row[None].repeat(stop - start, 0))
        for t in range(start, stop):
            slow.add(thoughts[t])
        slow.evict_if_due()
        assert stepper.cache.held[0] == slow.held <= budget.peak
    assert len(slow.events) >= 5
    ranked = torch.cat([ranking.flatten() for ranking in stepper.rankings])
    assert set(ranked.tolist()) == {-np.inf, TRANSITION, EXECUTION, REASONING}, "what stays ranks by its thought"
    found = dict(stepper.events)
    for seen, kept in slow.events:
        for (layer, head), positions in kept.items():
            assert found[seen][layer, 0, head].tolist() == positions


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def trace(model):
    return ev.record(model, random_prompt(21), tokens=random_prompt(160, 9), progress=False)


@pytest.fixture(scope="module")
def found(model, trace):
    """Thresholds by which the tiny model thinks thoughts of all kinds."""
    layers = (1, 3)
    sparsity = calibration.sparsities(model, trace)[list(layers)].mean(0)
    return Thresholds(model.name, 4, layers, *np.quantile(sparsity, [0.3, 0.6]).tolist())


@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_the_oracle_and_the_ladder(model, found, own, protect):
    """Prompts of one segment and of several; every segment but the newest holds what a rung allows."""
    policy = policies.get("thinkv", **SMALL, thresholds=found if own else "tertiles")
    budget = Budget(60, sinks=2, recent=6, buffer=10, protect_prompt=protect)
    for row in evicting_run(model, [random_prompt(12), random_prompt(41, 1)], policy, budget, 160):
        assert deviation(model, row) <= 1e-9
        history = row.retention
        assert history.events >= 5 and row.meter.peak_slots <= 70
        alive = history.alive(history.tokens)
        assert (alive.sum(-1) == alive.sum(-1)[0, 0]).all(), "all heads keep equally many"
        assert not protect or alive[:, :, : len(row.prompt)].all()
        assert (alive != alive[0, 0]).any(), "and each its own"
        for start in range(-(-len(row.prompt) // 16) * 16, history.tokens - 32, 16):
            assert alive[0, 0, start : start + 16].sum() in (16, 8, 4, 2, 0)


def test_every_transition_takes_all_before_it_one_rung_down(model, monkeypatch):
    """Long before the budget is exceeded; the prompt of 20 tokens stays, and the first segment is the rest of 12."""
    monkeypatch.setattr(thinkv, "mean_sparsity", lambda new, layers: torch.ones(new.positions.shape))
    policy = policies.get("thinkv", **SMALL, thresholds=Thresholds(model.name, 4, (0,), 0.2, 0.4))
    budget = Budget(300, sinks=2, recent=6, buffer=10, protect_prompt=True)
    (row,) = evicting_run(model, [random_prompt(20)], policy, budget, 90)
    assert row.retention.event_steps.tolist() == [48, 64, 80, 96]
    for step, held in {48: [8, 16], 64: [4, 8, 16], 80: [2, 4, 8, 16], 96: [2, 2, 4, 8, 16]}.items():
        alive = row.retention.alive(step)
        assert (alive[..., :20].sum(-1) == 20).all()
        for number, count in enumerate(held):
            start = 20 if number == 0 else 16 + 16 * number
            assert (alive[..., start : 32 + 16 * number].sum(-1) == count).all()


def test_hybrid_models(found):
    model = tiny_model("gemma3")
    budget = Budget(40, sinks=2, recent=6, buffer=10)
    policy = policies.get("thinkv", **SMALL, thresholds=Thresholds(model.name, 2, (1,), found.low, found.high))
    for chosen in (policy, policies.get("thinkv", **SMALL)):
        (row,) = evicting_run(model, [random_prompt(30)], chosen, budget, 80)
        assert deviation(model, row) <= 1e-4 and row.retention.events >= 3


@pytest.mark.parametrize("own", [True, False])
def test_chunks_equal_single_steps(model, trace, found, own):
    policy = policies.get("thinkv", **SMALL, thresholds=found if own else "tertiles")
    budget = Budget(50, sinks=2, recent=6, buffer=10)
    one, many = (ev.replay(model, trace, policy, budget, compare=False, chunk=q, progress=False) for q in (1, 64))
    assert np.array_equal(one.retention.event_steps, many.retention.event_steps)
    assert np.array_equal(one.retention.death, many.retention.death)


def test_an_occasion_on_which_nothing_leaves_is_no_event(model):
    """Refreshes at 16, 32, … evict nothing while the budget holds and no transition was completed."""
    never = Thresholds(model.name, 4, (0,), 0.0, 1.0)
    policy = policies.get("thinkv", **SMALL, thresholds=never)
    run = ev.generate(model, random_prompt(20), policy, Budget(90, 2, 6, 10), 60, progress=False)
    assert run.meter.evictions == 0 and run.meter.peak_slots == 79


@pytest.mark.parametrize("wrap", [Sample, lambda policy: ReserveValues(policy, 0.3)], ids=["sample", "reserve"])
def test_wrapped_it_fills_the_budget_though_heads_hold_other_segments(model, found, wrap):
    policy = wrap(policies.get("thinkv", **SMALL, thresholds=found))
    prompts = [random_prompt(30), random_prompt(12, 1)]
    alone = [evicting_run(model, [prompt], policy, Budget(48, 2, 6, 8), 60)[0] for prompt in prompts]
    for row, single in zip(evicting_run(model, prompts, policy, Budget(48, 2, 6, 8), 60), alone, strict=True):
        assert deviation(model, row) <= 1e-9
        assert (row.retention.alive(row.retention.event_steps[-1]).sum(-1) == 48).all()
        assert np.array_equal(row.retention.death, single.retention.death)


def test_parameters_that_cannot_be():
    for parameters, message in (
        ({"interval": 0}, "interval must be at least 1"),
        ({"ladder": (4, 4)}, "ladder must descend"),
        ({"ladder": ()}, "ladder must descend"),
        ({"thresholds": "kde"}, "thresholds must be 'auto'"),
    ):
        with pytest.raises(ValueError, match=message):
            policies.get("thinkv", **parameters)
    with pytest.raises(ValueError, match=r"layers must be some of the 4 that evict, got \(4,\)"):
        Thresholds("x", 4, (4,), 0.2, 0.4)
    with pytest.raises(ValueError, match="thresholds must ascend"):
        Thresholds("x", 4, (0,), 0.4, 0.4)


# -- thresholds and the models they belong to --------------------------------------------------------------------------


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EPIVIZ_CACHE", str(tmp_path))
    return tmp_path / thinkv.FILE


def test_an_unknown_model_says_what_it_goes_by(model, no_cache):
    budget = Budget(40, 2, 6, 10)
    run = ev.generate(model, random_prompt(30), "thinkv", budget, 20, progress=False)
    assert run.policy == "thinkv(thresholds=tertiles)"
    wrapped = Sample(policies.get("thinkv"))
    run = ev.generate(model, random_prompt(30), wrapped, budget, 20, progress=False)
    assert run.policy == "sample(thinkv(thresholds=tertiles))"
    with pytest.raises(thinkv.UncalibratedError, match="epiviz calibrate thinkv TRACES --model tiny-qwen3-4:2"):
        ev.generate(model, random_prompt(30), policies.get("thinkv", thresholds="calibrated"), budget, 20)
    with pytest.raises(RuntimeError, match="does not know its model yet"):
        policies.get("thinkv").thoughts(None, {})


def test_the_bundled_model_goes_by_what_is_shipped(no_cache):
    shape = replace(tiny_model("qwen3").shape, layers=30, evicts=tuple(range(30)), name="smollm2-135m")
    policy = policies.get("thinkv", thresholds="calibrated").for_model(shape)
    assert policy.label == "thinkv" and policy.thresholds.shipped
    assert policies.get("thinkv").for_model(shape) == policy
    assert policies.get("thinkv", interval=64).for_model(shape).label == "thinkv(interval=64)"
    with pytest.raises(ValueError, match="on a model with 30 evicting layers, and smollm2-135m has 4"):
        policies.get("thinkv").for_model(replace(shape, layers=4, evicts=(0, 1, 2, 3)))
