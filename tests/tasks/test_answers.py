r"""Answers: what counts as one, and which two are the same. Right and wrong pairs by hand, outcomes in their order."""

from __future__ import annotations

import threading
import time
import warnings

import pytest

from epiviz import tasks
from epiviz.tasks import answers, mathematics
from epiviz.tasks.mathematics import as_number, same_mathematics
from epiviz.tasks.outcomes import OUTCOMES, ends_in_loop, is_empty, is_garbage, judge
from epiviz.tasks.problems import Problem

RIGHT = [
    # layout
    ("18", "18."),
    ("18", "$18$"),
    ("18", r"\(18\)"),
    ("33", "033"),
    ("3", "3.0"),
    ("-3", "−3"),
    # fractions and decimals
    ("1/2", "0.5"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\dfrac{14}{3}", "14/3"),
    (r"\frac{3}{2}", "1.5"),
    ("1.5", r"1\frac{1}{2}"),
    ("1.5", "1 1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    # thousands
    ("1234", "1,234"),
    ("1{,}234", "1234"),
    ("1000", "1 000"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    ("1{,}000{,}000", "10^6"),
    ("300,200,100", "100, 200, 300"),
    ("[0,100)", "0 \\le x < 100"),
    # percent
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    (r"\frac{1}{2}", "50%"),
    (r"10\%", "0.1"),
    (r"10\%", "10 percent"),
    # units and bases
    (r"5\text{ cm}", "5"),
    ("5", r"5 \text{ meters}"),
    (r"5\text{ meters}", r"5\,\mathrm{m}"),
    (r"12\text{ cm}^2", r"12 \text{ square cm}"),
    ("6", r"\$6.00"),
    ("6", "6 dollars"),
    ("90", r"90^{\circ}"),
    (r"90^\circ", "90 degrees"),
    (r"5\text{ m}", "5m"),
    (r"6\sqrt{3}", r"6\sqrt{3} m"),
    (r"9.8\text{ m/s}^2", r"9.8\text{ m/s^2}"),
    ("5000000", r"\$5 million"),
    ("1500000", r"1.5\text{ million dollars}"),
    ("2516_8", "2516_{8}"),
    ("2516_8", "2516"),
    (r"12\pi", r"12\pi\text{ square units}"),
    (r"12\pi\text{ cm}", r"12\pi"),
    ("4x", r"4x\text{ dollars}"),
    ("18", r"18\ "),
    (r"\frac13", r"0.\overline{3}"),
    (r"-\frac{7}{30}", r"-0.2\overline{3}"),
    (r"\emptyset", r"\varnothing"),
    # expressions
    (r"\frac{\sqrt 3}{3}", r"\frac{1}{\sqrt 3}"),
    (r"3\sqrt{13}", r"\sqrt{117}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("p-q", "-q+p"),
    ("9!", "362880"),
    ("x=5", "5"),
    ("5", "5=x"),
    ("5", "a_{n+1} = 5"),
    ("33", "m+n=33"),
    ("7", "3+4=7"),
    ("1024", "2^{10}=1024"),
    ("5", "|AB|=5"),
    ("2x+1", "f(x+1)=2x+1"),
    ("x+y=6", "y+x=6"),
    ("0.5x", r"\frac{x}{2}"),
    ("y=2x+1", "y = 1+2x"),
    # several values
    (r"\pm 2", "2,-2"),
    (r"3 \pm 2\sqrt{2}", r"3+2\sqrt2, 3-2\sqrt2"),
    ("1,2", "2, 1"),
    (r"\{1,2\}", "2,1"),
    (r"x=2 \text{ or } x=3", "2,3"),
    # pairs and intervals
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    ("[-2,7]", r"-2 \le x \le 7"),
    (r"(-\infty,3)", "x<3"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,0)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("(1,2)", "(x,y)=(1,2)"),
    # words
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{even}", "Even"),
    (r"\text{(C)}", "C"),
    (r"\text{June 20}", "June 20"),
]
WRONG = [
    # a comma that separates is no comma of thousands
    ("12", "1,2"),
    ("1,2", "12"),
    ("12", "1 2"),
    ("3", "1 2"),
    ("100", "1,00"),
    ("1,234", "1.234"),
    ("123456", "1,234,56"),
    ("100", "(0,100)"),
    ("1234", "(1,234)"),
    ("300", "100,200,300"),
    # off by a hundred
    ("700", "7"),
    ("7", "700"),
    ("7", "70000"),
    ("50", "0.5"),
    ("0.5", "50"),
    ("0.5", r"0.5\%"),
    ("5", r"500\%"),
    (r"10\%", "1000"),
    (r"10\%", "0.001"),
    # rounded
    (r"\frac{2}{3}", "0.667"),
    ("1/3", "0.33"),
    ("3.14159", r"\pi"),
    (r"\pi", "3.14159265358979"),
    (r"\sqrt2", "1.414214"),
    (r"\{\sqrt2\}", "1.414214"),
    ("1/3", r"0.3\overline{4}"),
    # units and bases
    (r"5\text{ km}", r"5\text{ m}"),
    (r"12\text{ cm}^2", r"12\text{ cm}"),
    (r"12\text{ cm}^2", r"12\text{ cm}^3"),
    ("5 cm", "5 m"),
    ("5 h", "5 s"),
    ("5", "5 million"),
    ("2", r"2\text{ hundred}"),
    ("1", "1 half"),
    ("6", "6 hundredths"),
    ("6", r"6\text{ tenths}"),
    ("30", "30 dozen"),
    (r"12\pi\text{ cm}", r"12\pi\text{ m}"),
    (r"12\pi", r"12\text{ pi or less}"),
    ("3", r"3\text{ squared}"),
    ("9", r"9\text{ or 8}"),
    ("7", r"7\text{ plus 3}"),
    ("2516_8", "2516_9"),
    ("5", "5i"),
    ("3", "3x"),
    ("5", "5m"),
    ("5", "5t"),
    ("2m", "2s"),
    ("2a", "2b"),
    # sets, pairs, intervals, ±
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", "1,2"),
    ("[-2,7]", r"-2 < x \le 7"),
    (r"(-\infty,3)", "x>3"),
    ("(0,1)", "(0,1]"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    (r"\pm 2", "2"),
    ("2", r"\pm 2"),
    ("2", "1,2"),
    ("1,2", "2"),
    ("2", r"2 \text{ or } 3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    # values
    ("-3", "3"),
    (r"\infty", r"-\infty"),
    ("18", "18 - 1"),
    ("2^{10}", "2^{11}"),
    ("x=5", "y=5"),
    ("(x,y)=(1,2)", "(y,x)=(1,2)"),
    (r"\emptyset", "0"),
    (r"\text{even}", r"\text{odd}"),
    (r"\text{no}", r"\text{on}"),
    ("C", "D"),
    ("k", r"k\text{ is odd}"),
    ("n", r"n\text{ even}"),
    ("5", ""),
    ("5", r"\text{five}"),
]


@pytest.mark.parametrize("reference, answer", RIGHT)
def test_right(reference, answer):
    assert same_mathematics(reference, answer)
    assert same_mathematics(reference, reference)


@pytest.mark.parametrize("reference, answer", WRONG)
def test_wrong(reference, answer):
    assert not same_mathematics(reference, answer)


def test_numbers_are_exact():
    assert as_number("1,234.5") * 2 == 2469
    assert as_number(r"\frac{1}{3}") == as_number("2/6") != as_number("0.3333333333")
    assert as_number("1/0") is None and as_number("1,2") is None and as_number("x") is None


def test_a_comparison_that_takes_too_long_is_different_and_the_next_one_is_answered():
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"took more than 0.5 s"):
        assert not same_mathematics("1", "9^{9^{9^{9}}}", seconds=0.5)
    assert time.monotonic() - started < 30
    assert same_mathematics("2^{10}", "1024"), "the process was started anew"


def test_threads_compare_too():
    found = {}

    def compare(index):
        found[index] = same_mathematics("x+1", "1+x" if index % 2 else "x-1")

    threads = [threading.Thread(target=compare, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: bool(index % 2) for index in range(6)}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('{0}').touch()",
        r"\text{{__import__('os').system('touch {0}')}}",
        r"\operatorname{{exec}}(open('{0}','w'))",
        "1/2 + __import__('os').system('touch {0}')",
    ],
)
def test_what_a_model_writes_is_never_executed(text, tmp_path):
    victim = tmp_path / "touched"
    problem = Problem("p", "", "5", form="mathematics")
    written = f"</think> \\boxed{{{text.format(victim)}}}"
    assert judge(problem, written, "finished").outcome == "wrong"
    assert not victim.exists()


def test_a_process_that_cannot_start_is_an_error_and_not_a_wrong_answer(monkeypatch):
    worker = mathematics._Worker()
    monkeypatch.setattr(mathematics.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process that compares answers did not start"):
        worker.same("a+b", "b+a", 5)


FINAL = [
    ("thoughts </think> \\boxed{5}", "5"),
    ("\\boxed{4} thoughts </think> so \\boxed{5}", "5"),
    ("<think> t </think> first \\boxed{4}, no: \\boxed{5}", "5"),  # the last of several
    ("t </think> \\boxed{5} </think> then \\boxed{6}", "6"),  # all of it stands after the first end of thoughts
    ("t </think> in \\boxed{}: \\boxed{5}", "5"),
    ("t </think> \\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
    ("t </think> \\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("t </think> \\boxed 7.", "7"),
    ("t </think> {\\boxed 7}", "7"),
    ("t </think> $\\boxed\\frac{6}{1}$.", "\\frac{6}{1}"),
    ("t </think> \\fbox{8}", "8"),
    ("the answer is \\boxed{5}", ""),  # no end of thoughts
    ("\\boxed{5} </think> The answer is above.", ""),  # only in the thoughts
    ("t </think> It is 5.", ""),
    ("t </think> \\boxed{4} or rather \\boxed{5", ""),  # the last one does not close
]


@pytest.mark.parametrize("text, answer", FINAL)
def test_what_counts_as_the_answer(text, answer):
    problem = Problem("p", "", "5", form="mathematics")
    assert answers.find_answer(problem, text) == answer
    outcome = "no answer" if not answer else "correct" if answer == "5" else "wrong"
    assert judge(problem, text, "finished").outcome == outcome


def test_a_model_without_thoughts_answers_with_the_whole_text():
    problem = Problem("p", "", "5", form="mathematics")
    assert judge(problem, "It is \\boxed{5}.", "finished", thinks=False).correct
    assert judge(problem, "<think> \\boxed{5}", "finished", thinks=False).outcome == "no answer"

    class Tokenizer:
        chat_template = "{% if add_generation_prompt %}<think>\n{% endif %}"

    assert answers.thinks_first(Tokenizer())
    Tokenizer.chat_template = "{{ messages }}"
    assert not answers.thinks_first(Tokenizer())


@pytest.mark.parametrize(
    "boxed, letter",
    [
        ("B", "B"),
        ("(b)", "B"),
        ("\\text{B}", "B"),
        ("\\textbf{(B)}", "B"),
        ("B. Helium", "B"),
        ("\\textrm{B}", "B"),
        ("B\\ ", "B"),
        ("Option B", "B"),
        ("Answer: (B)", "B"),
        ("Helium", ""),
        ("", ""),
    ],
)
def test_choices_are_letters(boxed, letter):
    problem = Problem("p", "", "B", form="choice")
    found = judge(problem, f"</think> \\boxed{{{boxed}}}", "finished")
    assert (found.answer, found.outcome) == (letter, "correct" if letter else "no answer")
    assert judge(Problem("p", "", "C", form="choice"), "</think> \\boxed{B}", "finished").outcome == "wrong"


def test_mentions_are_of_candidates():
    problem = Problem("p", "", "4821", meta={"candidates": ["4821", "1234"]}, form="mention")
    assert judge(problem, "The code is 4821.", "finished", thinks=False).correct
    assert judge(problem, "It is 1234, not 4821.", "finished", thinks=False).outcome == "wrong"
    assert judge(problem, "It is 48210.", "finished", thinks=False).outcome == "no answer"


def test_a_word_is_the_first_after_the_thoughts():
    (problem,) = tasks.load("steps", n=1, seed=1)
    for text, answer in (("x </think> 11", "11"), ("no end", ""), ("x </think>", ""), ("</think> a b", "a")):
        assert answers.find_answer(problem, text) == answer
    assert judge(problem, problem.solution + " and more", "finished").correct


def test_code_is_found_but_not_judged():
    problem = Problem("p", "", "", meta={"question_id": "q"}, form="code")
    found = judge(problem, "</think>\n```python\na\n```\nbetter:\n```python\nb = 1\n```\n", "finished")
    assert (found.outcome, found.answer) == ("ungraded", "b = 1")
    assert judge(problem, "</think> no code", "finished").outcome == "no answer"
    with pytest.raises(ValueError, match="p asks for code, which is not run here"):
        answers.is_right(problem, "b = 1")


PROBLEM = Problem("p", "", "5", form="mathematics")
LOOPING = [7, 8, 9] * 20


@pytest.mark.parametrize(
    "outcome, text, status, tokens, error",
    [
        ("error", "</think> \\boxed{5}", "finished", [], ValueError("out of memory")),
        ("error", "", "loop", LOOPING, "killed"),
        ("loop", "</think> \\boxed{5} 789", "length", LOOPING, None),
        ("loop", "</think> \\boxed{5} 789", "finished", [*LOOPING, 2], None),
        ("loop", "x", "loop", [], None),
        ("length", "</think> \\boxed{5} and", "length", list(range(60)), None),
        ("empty", " <think>\n\n</think> \n", "finished", [1], None),
        ("garbage", "</think> \\boxed{5}" + "!" * 150, "finished", [1], None),
        ("no answer", "</think> It is 5.", "finished", [1], None),
        ("correct", "</think> \\boxed{5}", "finished", [*LOOPING, *range(50)], None),  # a loop it got out of
        ("wrong", "</think> \\boxed{6}", "finished", [1], None),
    ],
)
def test_outcomes_exclude_each_other_in_their_order(outcome, text, status, tokens, error):
    assert outcome in OUTCOMES
    assert judge(PROBLEM, text, status, tokens, error=error).outcome == outcome


def test_an_answer_in_an_unfinished_text_is_noted_and_never_counts():
    for text in ("so \\boxed{5}, but wait", "t </think> \\boxed{5} so"):
        found = judge(PROBLEM, text, "length")
        assert (found.outcome, found.correct, found.answer) == ("length", False, "")
        assert (found.unfinished_answer, found.unfinished_right) == ("5", True)
    assert not judge(PROBLEM, "so \\boxed{6}", "length").unfinished_right
    (problem,) = tasks.load("steps", n=1)
    assert judge(problem, f"{problem.answer} and", "length").unfinished_answer == "", (
        "no word of the thoughts is marked"
    )
    assert judge(problem, f"x </think> {problem.answer}", "length").unfinished_right
    assert judge(PROBLEM, "</think> \\boxed{5}", "finished").unfinished_answer == ""


def test_a_loop_is_at_least_ten_tokens_five_times():
    assert ends_in_loop([3] * 50) and not ends_in_loop([3] * 49)
    stretch = list(range(20))
    assert ends_in_loop(stretch * 5) and not ends_in_loop(stretch * 4)
    assert ends_in_loop(list(range(500)) * 5), "long stretches too"
    assert not ends_in_loop([*stretch * 5, 99])
    assert ends_in_loop([*stretch * 5, 99], "finished")


def test_garbage_and_emptiness():
    assert is_garbage("漢" * 31) and not is_garbage("漢" * 30 + "abcde" * 10)
    assert is_garbage("ab" * 100 + "a" * 120) and not is_garbage("ab" * 100)
    assert not is_garbage("7777777") and not is_garbage("漢" * 40 + " so the answer is 5. It was checked twice. " * 3)
    assert not is_garbage("\\boxed{5}" + "\n" * 150)
    deep = "for x in y:\n" + "\n".join(" " * 20 + name for name in ("alpha()", "beta()", "gamma()", "delta()"))
    assert is_garbage(deep) and not is_garbage(deep, code=True)
    assert is_empty("") and is_empty("\n </think> ") and not is_empty("5")


def test_an_interrupted_run_has_no_outcome():
    with pytest.raises(ValueError, match="a run with the status 'stopped' has no outcome"):
        judge(PROBLEM, "</think> \\boxed{5}", "stopped")
    with pytest.raises(ValueError, match="p has the unknown form 'essay'"):
        judge(Problem("p", "", "5", form="essay"), "</think> 5", "finished")


def test_comparisons_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_mathematics("x+1", "1+x")
