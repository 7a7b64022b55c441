"""The public sets, read from rows in their original columns: made up here, as long as the readers need them."""

from __future__ import annotations

import json
import sys
import types

import pandas as pd
import pytest

from epiviz import tasks
from epiviz.tasks.outcomes import judge

GSM8K = [
    {"question": "Two dozen eggs, one breaks?", "answer": "2*12=<<2*12=24>>24\n24-1=23\n#### 23"},
    {"question": "A thousand and two hundred?", "answer": "1000+200=1200\n#### 1,200"},
]
MATH500 = [
    {
        **{"problem": "What is $2+3$?", "solution": "It is $\\boxed{5}$.", "answer": "5"},
        **{"subject": "Algebra", "level": 1, "unique_id": f"test/algebra/{index}.json"},
    }
    for index in range(3)
]
AIME24 = [{"ID": "2024-I-9", "Problem": "Find $n$.", "Solution": "…", "Answer": 33}]
ARENA = [{"problem_idx": 1, "problem": "Find $m+n$.", "answer": 70, "problem_type": ["Algebra"]}]
GPQA = [
    {
        **{"Question": f"Which gas is number {index}?", "Correct Answer": "helium"},
        **{"Incorrect Answer 1": "neon", "Incorrect Answer 2": "argon", "Incorrect Answer 3": "xenon"},
        **{"Record ID": f"rec{index}", "High-level domain": "Chemistry"},
    }
    for index in range(40)
]
CODE = [
    {
        **{"question_id": f"abc{index}", "question_title": "Sum", "question_content": "Add two numbers."},
        **{"starter_code": starter, "difficulty": difficulty, "platform": "atcoder", "contest_date": "2025-01-04"},
        **{"public_test_cases": "[]", "private_test_cases": "not read"},
    }
    for index, (starter, difficulty) in enumerate([("", "easy"), ("class Solution:", "medium"), ("", "medium")])
]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name, rows, answers, form",
    [
        ("gsm8k", GSM8K, ["23", "1200"], "mathematics"),
        ("math500", MATH500, ["5"] * 3, "mathematics"),
        ("aime24", AIME24, ["33"], "mathematics"),
        ("aime25", ARENA, ["70"], "mathematics"),
        ("aime26", ARENA, ["70"], "mathematics"),
        ("hmmt25", ARENA * 2, ["70"] * 2, "mathematics"),
        ("livecodebench", CODE, [""] * 3, "code"),
    ],
)
def test_original_rows_become_problems(name, rows, answers, form, tmp_path):
    for suffix in (".jsonl", ".json"):
        problems = tasks.load(name, path=write(tmp_path / f"rows{suffix}", rows))
        assert [problem.answer for problem in problems] == answers
        assert {problem.form for problem in problems} == {form}
        assert all(isinstance(problem.prompt, str) and problem.prompt.strip() for problem in problems)
        ids = [problem.id for problem in problems]
        assert len(set(ids)) == len(rows) and all(one.startswith(name + "-") for one in ids)
        assert tasks.load(name, n=1, path=tmp_path / f"rows{suffix}") == problems[:1]


def test_tables_keep_an_answer_as_it_is_spelled(tmp_path):
    frame = pd.DataFrame({"problem": ["p", "q"], "answer": ["033", "1,234"]})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    for file in ("rows.csv", "rows.parquet"):
        assert [one.answer for one in tasks.load("aime25", path=tmp_path / file)] == ["033", "1,234"]


def test_a_line_separator_within_a_text_ends_no_row(tmp_path):
    rows = [{"problem": "one\u2028two", "answer": "3"}]
    assert len(tasks.load("aime25", path=write(tmp_path / "rows.jsonl", rows))) == 1


def test_answers_to_them_are_checked(tmp_path):
    (problem,) = tasks.load("gsm8k", n=1, path=write(tmp_path / "rows.jsonl", GSM8K))
    assert judge(problem, "t </think> \\boxed{23}", "finished").correct
    assert judge(problem, "t </think> \\boxed{23 \\text{ eggs}}", "finished").correct
    assert judge(problem, "t </think> \\boxed{24}", "finished").outcome == "wrong"


def test_copies_that_ask_already_are_not_asked_twice(tmp_path):
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"Find $n$.\n{asked}", "answer": 7}])
    (problem,) = tasks.load("aime24", path=path)
    assert problem.prompt == f"Find $n$.\n{asked}"
    (problem,) = tasks.load("aime24", path=path, protocol="epikv")
    assert problem.prompt == [{"role": "system", "content": asked}, {"role": "user", "content": "Find $n$."}]


def test_two_halves_of_a_set_are_read_one_after_the_other(tmp_path):
    halves = [write(tmp_path / f"{month}.jsonl", ARENA) for month in ("feb", "nov")]
    problems = tasks.load("hmmt25", path=halves)
    assert [problem.id for problem in problems] == ["hmmt25-0", "hmmt25-1"], "both halves count from 1"


def test_the_order_is_the_sets_own_unless_it_is_drawn(tmp_path):
    rows = [{"problem": f"p{index}", "answer": index} for index in range(30)]
    path = write(tmp_path / "rows.jsonl", rows)
    assert [problem.answer for problem in tasks.load("aime25", n=5, path=path)] == list("01234")
    drawn = tasks.load("aime25", n=10, seed=1, path=path, shuffled=True)
    assert drawn[:5] == tasks.load("aime25", n=5, seed=1, path=path, shuffled=True)
    assert [problem.answer for problem in drawn] != [str(index) for index in range(10)]
    assert {problem.id: problem.answer for problem in drawn}[f"aime25-{drawn[0].answer}"] == drawn[0].answer


@pytest.mark.parametrize("circulating", [False, True])
def test_options_are_shuffled_by_the_seed(circulating, tmp_path):
    rows = GPQA
    if circulating:  # one text with the options in it, the right one always first
        options = "A. helium\nB. neon\nC. argon\nD. xenon"
        asks = "Please reason step by step, and put your choice letter within \\boxed{}."
        rows = [{"problem": f"{row['Question']}\n{options}\n\n{asks}", "answer": "A"} for row in GPQA]
    path = write(tmp_path / "rows.jsonl", rows)
    problems = tasks.load("gpqa-diamond", path=path, seed=0)
    letters = [problem.answer for problem in problems]
    assert min(letters.count(letter) for letter in "ABCD") >= 4, "the letter gives nothing away"
    for problem in problems:
        options = dict(line.split(". ", 1) for line in problem.prompt.splitlines() if line[1:3] == ". ")
        assert options[problem.answer] == "helium"
        assert sorted(options.values()) == ["argon", "helium", "neon", "xenon"]
        assert problem.prompt.count("\\boxed{}") == 1
        assert judge(problem, f"</think> \\boxed{{{problem.answer}}}", "finished").correct
    assert tasks.load("gpqa-diamond", path=path, seed=0) == problems
    other = tasks.load("gpqa-diamond", path=path, seed=1)
    assert [one.answer for one in other] != letters and not {one.id for one in other} & {one.id for one in problems}
    assert tasks.load("gpqa-diamond", path=write(tmp_path / "last.jsonl", rows[-1:]), seed=0)[0].answer == letters[-1]


def test_programming_problems_say_what_to_write(tmp_path):
    path = write(tmp_path / "rows.jsonl", CODE)
    without, with_starter, _ = tasks.load("livecodebench", path=path)
    assert "# YOUR CODE HERE" in without.prompt and "stdin" in without.prompt
    assert "```python\nclass Solution:\n```" in with_starter.prompt and "stdin" not in with_starter.prompt
    medium = tasks.load("livecodebench", path=path, difficulty="medium")
    assert [one.meta["question_id"] for one in medium] == ["abc1", "abc2"]
    assert tasks.load("livecodebench", path=path, protocol="vase")[0].id == medium[0].id
    with pytest.raises(ValueError, match="no problems of difficulty 'odd'; it has easy, medium"):
        tasks.load("livecodebench", path=path, difficulty="odd")
    with pytest.raises(ValueError, match="livecodebench has 2 problems of difficulty 'medium', fewer than n=3"):
        tasks.load("livecodebench", n=3, path=path, difficulty="medium")


def test_completions_are_written_for_a_sandbox(tmp_path):
    problems = tasks.load("livecodebench", n=2, path=write(tmp_path / "rows.jsonl", CODE))
    text = "thoughts\n```python\nx = 1\n```\n</think>\n```python\nprint(2)\n```"
    path = tasks.export_completions(problems, [[text, "no end"], ["</think> none", text]], tmp_path / "out" / "c.json")
    assert json.loads(path.read_text()) == [
        {"question_id": "abc0", "code_list": ["print(2)", ""]},
        {"question_id": "abc1", "code_list": ["", "print(2)"]},
    ]
    with pytest.raises(ValueError, match="there are 2 problems and completions for 1"):
        tasks.export_completions(problems, [[text]], path)
    with pytest.raises(ValueError, match=r"equally many completions, got lists of \[1, 2\]"):
        tasks.export_completions(problems, [[text], [text, text]], path)
    with pytest.raises(ValueError, match="does not ask for code"):
        tasks.export_completions(tasks.load("recall", n=1), [[text]], path)


def test_protocols_are_the_published_ones(tmp_path):
    epikv, vase = tasks.protocol("epikv", "math500"), tasks.protocol("vase", "hmmt25")
    assert (epikv.n_problems, epikv.max_new_tokens, epikv.budgets) == (100, 8192, (512, 1024, 2048, 4096))
    assert epikv.sampling == {"temperature": 0, "top_p": 1, "top_k": 0} and epikv.new_tokens(100) == 8192
    assert (vase.n_problems, vase.samples, vase.new_tokens(100)) == (60, 16, 32668)
    assert vase.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    with pytest.raises(ValueError, match="the prompt has 40000 tokens, and vase on hmmt25 allows 32768"):
        vase.new_tokens(40000)
    with pytest.raises(ValueError, match="no published protocol of 'epikv' on 'gsm8k'"):
        tasks.protocol("epikv", "gsm8k")
    rows = [{"question": f"q{index}", "answer": "#### 1"} for index in range(600)]
    path = write(tmp_path / "rows.jsonl", rows)
    problems = tasks.load("gsm8k", path=path, protocol="vase")
    assert len(problems) == 500 and problems[0].prompt == "q0 Put your final answer within \\boxed{}."
    assert len(tasks.load("gsm8k", path=path, protocol="vase", n=510)) == 510


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*gone\.jsonl"):
        tasks.load("gsm8k", path=tmp_path / "gone.jsonl")
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(ValueError, match=r"rows\.txt is none of \.jsonl, \.json, \.csv, \.parquet"):
        tasks.load("gsm8k", path=tmp_path / "rows.txt")
    (tmp_path / "broken.jsonl").write_text('{"question": ')
    with pytest.raises(ValueError, match=r"broken\.jsonl is not valid jsonl"):
        tasks.load("gsm8k", path=tmp_path / "broken.jsonl")
    for content in ("{}", "[]"):
        (tmp_path / "empty.json").write_text(content)
        with pytest.raises(ValueError, match=r"empty\.json holds no list of rows"):
            tasks.load("gsm8k", path=tmp_path / "empty.json")
    path = write(tmp_path / "rows.jsonl", MATH500)
    with pytest.raises(ValueError, match=r"row 0 of gsm8k has no column with the question: .*found problem, solution"):
        tasks.load("gsm8k", path=path)
    with pytest.raises(
        ValueError, match="neither a column 'Correct Answer' nor lines A to D .*found the columns problem"
    ):
        tasks.load("gpqa-diamond", path=path)
    with pytest.raises(ValueError, match="math500 has 3 problems, fewer than n=4"):
        tasks.load("math500", n=4, path=path)
    path = write(tmp_path / "other.jsonl", [{"question": "q", "answer": "it is 5"}])
    with pytest.raises(ValueError, match="a GSM8K answer ends in '#### ' and a number, this one in 'it is 5'"):
        tasks.load("gsm8k", path=path)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'aime25 comes from the hub .*pip install "epiviz\[hub\]", or give path='):
        tasks.load("aime25")


def test_the_hub_is_asked_for_the_right_sets(monkeypatch):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        return CODE if "data_files" in options else GSM8K if "openai/gsm8k" in names else ARENA

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [one.answer for one in tasks.load("gsm8k")] == ["23", "1200"]
    assert asked.pop() == (("openai/gsm8k", "main"), {"split": "test"})
    assert len(tasks.load("hmmt25")) == 2
    assert [names[0] for names, _ in asked] == ["MathArena/hmmt_feb_2025", "MathArena/hmmt_nov_2025"]
    assert len(tasks.load("livecodebench")) == 3
    names, options = asked.pop()
    assert names == ("json",) and options["streaming"] and len(options["data_files"]) == 6
    assert options["data_files"][0] == "hf://datasets/livecodebench/code_generation_lite/test.jsonl"
