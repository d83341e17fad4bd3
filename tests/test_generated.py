"""Arithmetic, calculator and countdown: the same problems every time, two sides that never meet,
honest rewards. What a model writes is computed and never run as code."""

import json
import re
from fractions import Fraction

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Generated, arithmetic
from minirl.tasks.arithmetic import Arithmetic, Calculator
from minirl.tasks.countdown import Countdown, evaluate
from minirl.tasks.registry import self_check
from minirl.tasks.turns import has_turns

TASK, TOOL = Arithmetic(TasksConfig(), seed=3), Calculator(TasksConfig(), seed=3)


def score(task: Generated, example: Example, text: str, is_cut: bool = False) -> float:
    stop = StopReason.LENGTH if is_cut else StopReason.STOP
    return task.reward(example, Answer(text, stop, num_tokens=len(text)))


@pytest.mark.parametrize("kind", [Arithmetic, Calculator, Countdown])
def test_problems_are_solvable_on_one_side(kind: type[Generated]) -> None:
    def identity(example: Example) -> str:
        """Countdown's numbers may come in any order."""
        known = json.loads(example.reference) if kind is Countdown else {}
        return f"{sorted(known['numbers'])}={known['target']}" if known else str(example.prompt)

    task, other = (kind(TasksConfig(), seed) for seed in (3, 4))
    self_check(task, "mine")
    assert task.train(7) == kind(TasksConfig(), seed=3).train(7) != other.train(7)
    assert task.heldout(300)[:100] == task.heldout(100), "a longer one only appends"
    assert len({str(example.prompt) for example in task.heldout(300)}) == 300
    heldout = set(map(identity, task.heldout(300)))
    for index in range(300):
        trained = task.train(index)
        assert score(task, trained, task.solution(trained)) == 1.0
        assert heldout.isdisjoint({identity(trained), identity(other.train(index))})


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_clean_demonstrations_score_1_and_damaged_ones_0(num_steps: int) -> None:
    hard = arithmetic.Difficulty([i == num_steps for i in range(1, 8)])
    for index in range(100):
        problem = arithmetic.draw_problem(3, "train", index, hard)
        answer, total = arithmetic.demonstration(problem), problem.start
        asked, wrong = Example("", str(problem.result)), f" #### {problem.result + 1}"
        assert len(problem.steps) == num_steps and score(TASK, asked, answer) == 1.0
        assert score(TASK, asked, answer, is_cut=True) == 0.0
        damaged = f"{answer}0", answer + wrong, answer.partition(" ####")[0]
        assert not any(score(TASK, asked, text) for text in damaged)
        assert score(TASK, asked, wrong + answer) == 1.0, "the last mark"
        for clause, added in problem.steps:
            assert f" on {clause}." in problem.prompt and f" {clause}: {total}" in answer
            total += added or total
            assert 1 <= total <= arithmetic.Difficulty().max_total
        verbs = [clause.split()[1] for clause, added in problem.steps if added]
        assert total == problem.result and len(set(verbs)) == len(verbs), "no verb comes twice"


def test_a_call_is_computed_never_run_and_worked_answers_agree() -> None:
    for text, reply in (case.values() for case in cases("calculator_cases")):
        assert TOOL.reply(TOOL.train(0), (text,)) == reply, text
        assert TOOL.reply(TOOL.train(0), ("<<1+1>>", " = 2", text)) == reply
    assert has_turns(TOOL)
    for index in range(50):
        example = TOOL.train(index)
        assert isinstance(example.prompt, tuple) and "<<12*3>>" in example.prompt[0]["content"]
        *calls, last = re.split(r"(?<=>>)( = -?\d+)", example.worked)
        assert calls, "at least one call"
        for call, result in zip(calls[::2], calls[1::2], strict=True):
            assert TOOL.reply(example, (call,)) == result
        assert TOOL.reply(example, (last,)) is None and score(TOOL, example, last) == 1.0


EXAMPLE = Example("", json.dumps({"numbers": [3, 5, 7], "target": 56}))


def test_only_a_solution_is_right() -> None:
    task = Countdown(TasksConfig(), seed=3)
    for text, is_right in (case.values() for case in cases("countdown_cases")):
        assert score(task, EXAMPLE, text) == is_right, text
    assert score(task, EXAMPLE, "<answer>(3+5)*7</answer>", is_cut=True) == 0.0, "it was truncated"
    for known in (json.loads(task.train(index).reference) for index in range(200)):
        assert 1 <= known["target"] <= 100 and all(1 <= n <= 50 for n in known["numbers"])


FORMS = [form.replace("+", sign) for sign in "+-*/" for form in ("{}+{}", "({}+{})")]
expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.builds(str.format, st.sampled_from(FORMS), inner, inner),
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
