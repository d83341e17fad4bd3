"""Countdown: every problem has a solution, and only a solution is right. Nothing is evaluated."""

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks.countdown import Countdown, evaluate
from minirl.tasks.registry import self_check

EXAMPLE = Example("", json.dumps({"numbers": [3, 5, 7], "target": 56}))
RIGHT = [
    "<answer>(3+5)*7</answer>",
    "<answer> 7 × ( 5 + 3 ) </answer>",
    "<answer>(3+5)*7 = 56</answer>",
    "<think><answer>3</answer></think><answer>3</answer> no: <answer> in <answer>(3+5)*7</answer>",
]
BAD = [
    *("", "(3+5)*7+0", "7*8", "7+7+7+7+7+7+7+7", "35+3*7", "3 5+21", "-(3+5)*-7", "2**3*7"),
    *("(3+5)*7; import os", "__import__('os').getpid()", "(3+5)*7.0", "3/0", "3(5)7"),
    *("(" * 90 + "3" + ")" * 90, "9" * 5000),
]
WRONG = ["", "56", "(3+5)*7", "<answer>(3+5)*7", "<answer>(3+5)*7</answer> or <answer>3</answer>"]
WRONG += [f"<answer>{text}</answer>" for text in BAD]


def test_right_and_wrong() -> None:
    task = Countdown(TasksConfig(), seed=3)
    for text in RIGHT + WRONG:
        assert task.reward(EXAMPLE, Answer(text, StopReason.STOP, 1)) == (text in RIGHT), text
    assert task.reward(EXAMPLE, Answer(RIGHT[0], StopReason.LENGTH, 1)) == 0.0, "it was truncated"


@pytest.mark.parametrize("options", [{}, {"min_numbers": 6, "max_numbers": 6}])
def test_every_drawn_problem_is_solvable_and_the_same_again(options: dict[str, object]) -> None:
    task = Countdown(TasksConfig(options=options), seed=5)
    self_check(task, "countdown")
    for index in range(200):
        example = task.train(index)
        assert task.reward(example, Answer(task.solution(example), StopReason.STOP, 1)) == 1.0
        known = json.loads(example.reference)
        assert 1 <= known["target"] <= 100 and all(1 <= n <= 50 for n in known["numbers"])
    assert task.train(7) == Countdown(TasksConfig(options=options), seed=5).train(7)
    assert task.train(7) != Countdown(TasksConfig(options=options), seed=6).train(7)


def test_training_and_test_never_meet() -> None:
    def keys(examples: list[Example]) -> set[str]:
        known = (json.loads(example.reference) for example in examples)
        return {f"{sorted(k['numbers'])}={k['target']}" for k in known}

    easy = Countdown(TasksConfig(options={"min_numbers": 2, "max_numbers": 2}))
    test = keys(list(easy.heldout(400)))
    assert test and keys([easy.train(i) for i in range(3000)]).isdisjoint(test)


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(
        st.sampled_from(("{}{}{}", "({}{}{})")), inner, st.sampled_from("+-*/"), inner
    ).map(lambda parts: parts[0].format(*parts[1:])),
    max_leaves=6,
)


@given(expressions, st.text("0123456789+-*/() .e_x", max_size=30))
def test_the_parser_agrees_with_pythons_own_and_no_text_breaks_it(text: str, noise: str) -> None:
    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", text)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert evaluate(text) is None
    else:
        found = evaluate(text)
        assert found is not None and found[0] == expected
    evaluate(noise)
