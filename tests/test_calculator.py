"""The task with a tool: what is a call, what comes back, and what is right at the end."""

import re

import pytest

from minirl.config import TasksConfig
from minirl.records import Answer, StopReason
from minirl.tasks.calculator import Calculator
from minirl.tasks.registry import self_check
from minirl.tasks.turns import has_turns

TASK = Calculator(TasksConfig(), seed=3)


def right(text: str, stop: StopReason = StopReason.STOP) -> float:
    example = TASK.train(0)
    return TASK.reward(example, Answer(text.replace("N", example.reference), stop, 9))


@pytest.mark.parametrize(
    "text, reply",
    [
        (" so <<12*3>>", " = 36"),
        ("<< (7+5) / 8 >>", " = 1.5"),
        ("<<1/3>>", " = 0.333333"),
        ("<<3-10>>", " = -7"),
        ("<<2/1>>.", " = 2"),  # a token may hold more than the stop text
        ("<<1/0>>", " = error"),
        ("<<__import__('os')>>", " = error"),
        ("<<2**9999999>>", " = error"),
        ("1+2>>", " = 3"),
        (">>", " = error"),
        ("#### 36", None),
        ("<<1+2", None),
    ],
)
def test_a_call_is_computed_and_never_run(text: str, reply: str | None) -> None:
    assert TASK.reply(TASK.train(0), (text,)) == reply
    assert TASK.reply(TASK.train(0), ("<<1+1>>", " = 2", text)) == reply


def test_the_number_after_the_hashes_of_the_last_turn_counts() -> None:
    assert right(" so #### N") == right("####N") == 1.0
    assert right(" so N") == right("#### N0") == right("") == 0.0
    assert right("#### N", StopReason.LENGTH) == 0.0


def test_it_checks_itself_and_its_worked_answers_are_what_the_tool_says() -> None:
    assert self_check(TASK, "calculator").num_right == 32 and has_turns(TASK)
    for index in range(50):
        example = TASK.train(index)
        assert isinstance(example.prompt, tuple) and "<<12*3>>" in example.prompt[0]["content"]
        *calls, last = re.split(r"(?<=>>)( = -?\d+)", example.worked)
        assert calls, "at least one call"
        for call, result in zip(calls[::2], calls[1::2], strict=True):
            assert TASK.reply(example, (call,)) == result
        assert TASK.reply(example, (last,)) is None
        assert TASK.reward(example, Answer(last, StopReason.STOP, 9)) == 1.0
