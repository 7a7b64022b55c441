"""The task ``steps``: its solutions are right, its splits apart, its words tokens."""

from __future__ import annotations

import re

import pytest

from epiviz import tasks
from epiviz.tasks import steps
from epiviz.tasks.outcomes import judge
from epiviz.tasks.words import word_tokenizer
from epiviz.text import token_spans

SIZES = [(kind, statements) for kind in steps.KINDS for statements in (3, 7, 12, 30)]
SIZES += [("rounds", 100), ("ledger", 100)]


def interpret(prompt):
    """Run a prompt's program straight from its text: the final values, and how many lines were executed."""
    given, _, rest = re.fullmatch(r"((?:\w=\d ?)+)(L.*) ask .*", prompt).group(1, 2, 2)
    values = {name: int(digit) for name, digit in re.findall(r"(\w)=(\d)", given)}
    before, loop, after = rest, "", ""
    turns = 0
    if found := re.fullmatch(r"(.*?)R(\d+) (.*) back (.*)", rest):
        before, turns, loop, after = found[1], int(found[2]) + 1, found[3], found[4]
    executed = 0
    for part in [before, *[loop] * turns, after]:
        for left, sign, right, target in re.findall(r"L\d+ (\w) ([+-]) (\w) (\w)", part):
            second = int(right) if right.isdigit() else values[right]
            values[target] = (values[left] + (second if sign == "+" else -second)) % 10
            executed += 1
    return values, executed


@pytest.mark.parametrize("kind, statements", SIZES)
def test_answers_are_those_of_the_program(kind, statements):
    for problem in tasks.load("steps", n=20, seed=3, kinds=kind, statements=statements):
        values, executed = interpret(problem.prompt)
        first, sign, second = problem.prompt.split()[-3:]
        expected = (values[first] + (values[second] if sign == "+" else -values[second])) % 10
        assert problem.answer == str(expected)
        assert executed == statements
        assert problem.solution.endswith(f"</think> {expected}")
        assert judge(problem, problem.solution, "finished").correct


@pytest.mark.parametrize("kind, statements", SIZES)
def test_every_step_of_a_solution_follows_from_what_stands_before_it(kind, statements):
    for problem in tasks.load("steps", n=5, seed=4, kinds=kind, statements=statements):
        values = dict(re.findall(r"(\w)=(\d)", problem.prompt))
        words = problem.solution.split()
        for position, word in enumerate(words):
            if re.fullmatch(r"[a-z]=\d", word):
                assert words[position - 2 : position] == [word[2], word[0]], "the digit and the bare name come before"
                values[word[0]] = word[2]
            elif re.fullmatch(r"[a-z]\d", word):
                assert words[position - 1] == word[0] and values[word[0]] == word[1], "a read repeats the latest value"
            elif word == ">":
                left, sign, right = [w[-1] for w in words[:position] if re.fullmatch(r"[a-z]?\d|[+-]", w)][-3:]
                assert int(words[position + 1]) == (int(left) + (int(right) if sign == "+" else -int(right))) % 10


def test_the_documented_example_is_solved_as_documented():
    found = re.search(r"(f=7[^\n]*)\n.*    (L4 f f7.*?) L6 ….* out (L7.*?</think> 5)", steps.__doc__, re.DOTALL)
    prompt, start, end = found.groups()
    lines = [steps.Line(int(n), *rest) for n, *rest in re.findall(r"L(\d) (\w) ([+-]) (\w) (\w)", prompt)]
    program = steps.Program((("f", 7), ("k", 3)), (lines[0],), tuple(lines[1:3]), (lines[3],), 3, ("p", "+", "c"))
    assert program.prompt() == prompt
    solution, answer = program.solve()
    assert solution.startswith(start) and solution.endswith(" ".join(end.split())) and answer == "5"


def test_a_solution_names_the_lines_in_the_order_they_are_executed():
    (problem,) = tasks.load("steps", n=1, seed=1, kinds="rounds", statements=20)
    prompt = re.findall(r"L\d+|R\d+|back", problem.prompt)
    loop = prompt.index("back")
    start = next(place for place, word in enumerate(prompt) if word.startswith("R"))
    body = prompt[start + 1 : loop]
    expected = prompt[: start + 1]
    for left in range(int(prompt[start][1:]), -1, -1):
        expected += [*body, "back", f"R{left - 1}" if left else "out"]
    expected += prompt[loop + 1 :]
    assert re.findall(r"L\d+|R\d+|back|out", problem.solution) == expected


def test_splits_have_no_program_in_common():
    def programs(split):
        problems = [
            problem
            for kind in steps.KINDS
            for problem in tasks.load("steps", n=60, seed=0, kinds=kind, statements=3, split=split)
        ]
        return {re.sub(r"\w=\d ", "", problem.prompt) for problem in problems}

    train, unseen = programs("train"), programs("unseen")
    assert len(train) > 150 and len(unseen) > 150
    assert not train & unseen


def test_which_split_a_program_is_in_follows_from_its_lines_alone():
    for split in steps.SPLITS:
        for problem in tasks.load("steps", n=30, seed=5, statements=12, split=split):
            assert steps.split_of(re.sub(r"^(\w=\d )+", "", problem.prompt)) == split
    share = sum(steps.split_of(f"L1 a + b c L2 c - {n} d") == "unseen" for n in range(2000)) / 2000
    assert 0.1 < share < 0.15, "one in eight"


def test_a_problem_is_a_function_of_its_keys():
    few = tasks.load("steps", n=3, seed=7, statements=(5, 20))
    more = tasks.load("steps", n=12, seed=7, statements=(5, 20))
    assert few == more[:3] and few != tasks.load("steps", n=3, seed=8, statements=(5, 20))
    assert len({problem.id for problem in more}) == len({problem.prompt for problem in more}) == 12


@pytest.mark.parametrize("kind", ["rounds", "ledger"])
def test_traces_look_back_far(kind):
    problems = tasks.load("steps", n=8, seed=0, kinds=kind, statements=48)
    for problem in problems:
        words = [*problem.prompt.split(), "<think>", *problem.solution.split()]
        distances = []
        for position, word in enumerate(words):
            if re.fullmatch(r"[a-z]\d", word):
                assignment = max(p for p in range(position) if re.fullmatch(rf"{word[0]}=\d", words[p]))
                distances.append(position - assignment)
        assert problem.meta["look_back"] == max(distances)
        assert problem.meta["mean_look_back"] == pytest.approx(sum(distances) / len(distances))
        assert problem.meta["solution_words"] == len(problem.solution.split()) > 400
    assert min(problem.meta["look_back"] for problem in problems) >= 100


@pytest.mark.parametrize("kind", steps.KINDS)
def test_a_stale_value_never_lies_nearly_as_close_as_the_valid_one(kind):
    for problem in tasks.load("steps", n=20, seed=2, kinds=kind, statements=24):
        written, line = {}, 0
        for word in problem.solution.split():
            line += word == "."
            if re.fullmatch(r"[a-z]=\d", word):
                written.setdefault(word[0], []).append(line)
            elif re.fullmatch(r"[a-z]\d", word) and len(times := written.get(word[0], [])) > 1:
                assert line - times[-2] >= steps.CLEAR_RATIO * (line - times[-1])


@pytest.mark.parametrize("kind, statements", [("chain", 3), ("rounds", 7), ("ledger", 5)])
def test_a_problem_without_carries_is_solved_without_mod_10(kind, statements):
    for index in range(10):
        problem = steps.make_problem(1, index, kind=kind, statements=statements, carry_free=True)
        sums = re.findall(r"[a-z]?(\d) ([+-])(?: [a-z])? [a-z]?(\d) > (\d)", problem.solution)
        assert len(sums) == statements + 2  # the question and its check
        for left, sign, right, result in sums:
            assert int(result) == int(left) + (int(right) if sign == "+" else -int(right))


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="without carries has at most 7 statements, not 8"):
        steps.make_problem(0, 0, kind="chain", statements=8, carry_free=True)
    with pytest.raises(ValueError, match="no task 'stairs'; choose one of .*steps"):
        tasks.load("stairs", n=1)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        tasks.load("steps", n=0)
    with pytest.raises(ValueError, match="unknown kind 'loop'; use one of chain, rounds, ledger"):
        tasks.load("steps", n=1, kinds="loop")
    with pytest.raises(ValueError, match="unknown split 'test'"):
        tasks.load("steps", n=1, split="test")
    with pytest.raises(ValueError, match="a chain problem has 3 to 32 statements, not 40"):
        tasks.load("steps", n=1, kinds="chain", statements=40)


@pytest.mark.parametrize(
    "text, right",
    [("L1 </think> 4", True), ("</think> 4 and more", True), ("</think> 5", False), ("4", False), ("</think>", False)],
)
def test_the_first_word_after_the_thoughts_is_the_answer(text, right):
    assert judge(tasks.Problem("p", "a=4 ask a + a", "4"), text, "finished").correct is right


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The word tokenizer as transformers reads it back from a folder."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("words")
    word_tokenizer(steps.vocabulary()).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_words_are_tokens_and_come_back_exactly(tokenizer):
    for problem in tasks.load("steps", n=20, seed=1, statements=(3, 32)):
        text = f"{problem.prompt} <think> {problem.solution}"
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text.split()) and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        spans = token_spans(tokenizer, ids)
        assert spans.text == text and "".join(spans.pieces) == text
        assert [piece.strip() for piece in spans.pieces] == text.split()


def test_a_prompt_is_put_through_the_chat_template(tokenizer):
    messages = [{"role": "user", "content": "a=4 b=2 L1 a + b c ask c - a"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos> a=4 b=2 L1 a + b c ask c - a <think>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == tokenizer("a=4 b=2 L1 a + b c ask c - a <think>").input_ids
    assert tokenizer.decode(ids) == text


def test_composite_words_name_their_parts():
    assert steps.word_parts("k=6") == ("k", "=", "6") and steps.word_parts("k6") == ("k", "6")
    assert steps.word_parts("L12") == ("L", "12") and steps.word_parts("R0") == ("R", "0")
    assert all(steps.word_parts(word) == (word,) for word in ["k", "6", "+", "check", "</think>"])


def test_prompts_may_be_kept_short():
    short = tasks.load("steps", n=4, seed=7, statements=(3, 16), longest_prompt=40)
    every = tasks.load("steps", n=30, seed=7, statements=(3, 16))
    assert short == [problem for problem in every if len(problem.prompt.split()) <= 40][:4] != every[:4]
    with pytest.raises(ValueError, match=r"0 of 202 problems have prompts of at most 4 words; the shortest has \d\d"):
        tasks.load("steps", n=2, statements=3, longest_prompt=4)
