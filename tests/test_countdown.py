"""Countdown: every problem has a solution, and only a solution is right. Nothing is evaluated."""

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks.countdown import Countdown, evaluate, solve
from minirl.tasks.registry import self_check

ALL, SOME = (Countdown(TasksConfig(options={"use": use}), seed=3) for use in ("all", "some"))
EXAMPLE = Example("", json.dumps({"numbers": [3, 5, 7], "target": 56}))


def grade(text: str, task: Countdown = ALL, example: Example = EXAMPLE) -> float:
    return task.reward(example, Answer(text, StopReason.STOP, 1))


@pytest.mark.parametrize(
    "text",
    [
        "<answer>(3+5)*7</answer>",
        "<answer> 7 * ( 5 + 3 ) </answer>",
        "<answer>(3+5)*7 = 56</answer>",
        "<answer>3</answer> no: <answer>(3+5)*7</answer>",
        "<think><answer>3</answer></think>So \\boxed{(3+5)\\times 7}",
        "Let me see.\n(3 + 5) × 7",
        "\\boxed{7\\cdot(3+5)}",
    ],
)
def test_right(text: str) -> None:
    assert grade(text) == grade(text, SOME) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "56",
        "<answer>56</answer>",
        "<answer>(3+5)*7",
        "<answer>(3+5)*7+0</answer>",  # 0 is not one of the numbers
        "<answer>7*8</answer>",
        "<answer>(3+5)*7*1</answer>",
        "<answer>7+7+7+7+7+7+7+7</answer>",
        "<answer>(3+5)*7</answer> or <answer>3</answer>",
        "<answer>35+3*7</answer>",  # digits put together
        "<answer>3 5+21</answer>",
        "<answer>-(3+5)*-7</answer>",
        "<answer>2**3*7</answer>",
        "<answer>(3+5)*7; import os</answer>",
        "<answer>__import__('os').getpid()</answer>",
        "<answer>(3+5)*7.0</answer>",
        "<answer>3/0</answer>",
        "<answer>" + "(" * 90 + "3" + ")" * 90 + "</answer>",
        "<answer>" + "9" * 5000 + "</answer>",
    ],
)
def test_wrong(text: str) -> None:
    assert grade(text) == 0.0


def test_what_was_cut_is_wrong() -> None:
    assert ALL.reward(EXAMPLE, Answer("<answer>(3+5)*7</answer>", StopReason.LENGTH, 1)) == 0.0


def test_each_exactly_once_or_at_most_once() -> None:
    example = Example("", json.dumps({"numbers": [3, 5, 7, 2], "target": 56}))
    assert grade("<answer>(3+5)*7</answer>", ALL, example) == 0.0
    assert grade("<answer>(3+5)*7</answer>", SOME, example) == 1.0
    assert grade("<answer>(3+5)*7+2-2</answer>", SOME, example) == 0.0


@pytest.mark.parametrize("options", [{}, {"use": "some"}, {"min_numbers": 6, "max_numbers": 6}])
def test_every_drawn_problem_is_solvable_and_the_same_again(options: dict[str, object]) -> None:
    task = Countdown(TasksConfig(options=options), seed=5)
    self_check(task, "countdown")
    for index in range(200):
        example = task.train(index)
        assert grade(task.solution(example), task, example) == 1.0
        known = json.loads(example.reference)
        assert 1 <= known["target"] <= 100 and all(1 <= n <= 50 for n in known["numbers"])
    assert task.train(7) == Countdown(TasksConfig(options=options), seed=5).train(7)
    assert task.train(7) != Countdown(TasksConfig(options=options), seed=6).train(7)


def test_training_and_test_never_meet() -> None:
    def keys(examples: list[Example]) -> set[str]:
        return {
            f"{sorted(k['numbers'])}={k['target']}"
            for k in (json.loads(e.reference) for e in examples)
        }

    easy = Countdown(TasksConfig(options={"min_numbers": 2, "max_numbers": 2, "max_number": 9}))
    test = keys(list(easy.heldout(40)))
    assert test and keys([easy.train(i) for i in range(2000)]).isdisjoint(test)


leaves = st.integers(0, 99).map(str)
joined = st.tuples(leaves, st.sampled_from("+-*/"), leaves).map(lambda t: f"({''.join(t)})")
expressions = st.recursive(
    leaves | joined,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: "".join(t)),
    max_leaves=6,
)


@given(expressions)
def test_the_parser_agrees_with_pythons_own(text: str) -> None:
    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", text)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert evaluate(text) is None
    else:
        found = evaluate(text)
        assert found is not None and found[0] == expected


@given(st.text("0123456789+-*/() .e_x", max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    evaluate(text)


def test_the_solver_finds_what_there_is() -> None:
    assert solve((1, 2), 4) is None
    assert solve((3, 3, 8, 8), 24) is not None  # 8 / (3 - 8 / 3)
    assert solve((2, 50), 50) is None and solve((2, 50), 50, "some") == "50"
