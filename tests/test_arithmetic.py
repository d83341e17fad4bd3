"""Arithmetic and calculator: the same problems every time, two sides that never meet, honest
rewards, and a tool that computes and never runs code."""

import random
import re
from collections import Counter

import pytest

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks.arithmetic import (
    STEP_WEIGHTS,
    Arithmetic,
    Calculator,
    DigitLimits,
    Problem,
    Stream,
    demonstration,
    draw_problem,
    sloppy_demonstration,
)
from minirl.tasks.registry import self_check
from minirl.tasks.turns import has_turns

TASK, TOOL = Arithmetic(TasksConfig(), seed=3), Calculator(TasksConfig(), seed=3)


def grade(result: int, text: str, stop: StopReason = StopReason.STOP) -> float:
    return TASK.reward(Example("", str(result)), Answer(text, stop, num_tokens=len(text)))


def drawn(seed: int, stream: Stream, count: int, num_steps: int = 0) -> list[Problem]:
    weights = [i == num_steps for i in range(1, 8)] if num_steps else STEP_WEIGHTS
    return [draw_problem(seed, stream, index, weights) for index in range(count)]


def test_heldout_examples_are_different_and_never_trained() -> None:
    heldout = {example.prompt for example in TASK.heldout(1000)}
    assert len(heldout) == 1000
    assert TASK.heldout(300)[:100] == TASK.heldout(100), "a longer one only appends"
    assert TASK.train(7) != Arithmetic(TasksConfig(), seed=4).train(7)
    heldout |= {problem.prompt for problem in drawn(3, Stream.PROBE, 1000, num_steps=1)}
    for seed in (3, 4):
        for stream in (Stream.TRAIN, Stream.WARMUP):
            for num_steps in (0, 1):
                trained = drawn(seed, stream, 1500, num_steps)
                assert heldout.isdisjoint(problem.prompt for problem in trained)


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_clean_demonstrations_score_1_and_damaged_ones_0(num_steps: int) -> None:
    for problem in drawn(3, Stream.TRAIN, 100, num_steps):
        answer, total = demonstration(problem), problem.start
        assert len(problem.steps) == num_steps and grade(problem.result, answer) == 1.0
        assert grade(problem.result, answer, StopReason.LENGTH) == 0.0
        damaged = f"{answer}0", f"{answer} #### {problem.result + 1}", answer.partition(" ####")[0]
        assert not any(grade(problem.result, text) for text in damaged)
        for clause, added in problem.steps:
            assert f" on {clause}." in problem.prompt and f" {clause}: {total}" in answer
            total += added or total
            assert 1 <= total <= DigitLimits().max_total
        verbs = [clause.split()[1] for clause, added in problem.steps if added]
        assert total == problem.result and len(set(verbs)) == len(verbs), "no verb comes twice"


def test_the_number_after_the_last_mark_counts() -> None:
    right = ["#### 9", " #### 9.", "#### 4 #### 9", "7+2=9. #### 9 plums"]
    wrong = ["", "9", "####", "#### ", "#### nine", "#### 9 #### ", "####9"]
    assert all(grade(9, text) == (text in right) for text in right + wrong)


def test_sloppy_demonstrations_guess_and_slip_as_often_as_asked() -> None:
    rng, problems = random.Random(0), drawn(0, Stream.WARMUP, 2000, num_steps=3)
    guesses = [sloppy_demonstration(p, rng, no_working=0.6, slip=0.0) for p in problems]
    assert sum("=" not in g for g in guesses) / 2000 == pytest.approx(0.6, abs=0.04)
    assert all(grade(p.result, g) == 1.0 for p, g in zip(problems, guesses, strict=True))
    slips = [sloppy_demonstration(p, rng, no_working=0.0, slip=0.2) for p in problems]
    clean = sum(s == demonstration(p) for p, s in zip(problems, slips, strict=True))
    assert clean / 2000 == pytest.approx(0.8**3, abs=0.04)


def test_step_counts_follow_their_weights_and_few_problems_are_held_out_as_far_as_they_go() -> None:
    for weights in (STEP_WEIGHTS, (0, 0, 0, 0, 0, 0.25, 0.75)):
        task = Arithmetic(TasksConfig(options={"step_weights": list(weights)}), seed=3)
        for is_test in (False, True):
            prompts = [str(task.draw(index, is_test).prompt) for index in range(2000)]
            counts = Counter(prompt.count(" on ") for prompt in prompts)
            shares = [counts[num_steps] / 2000 for num_steps in range(1, 8)]
            assert shares == pytest.approx(weights, abs=0.04)
    few = Arithmetic(TasksConfig(options={"step_weights": [1]}))
    few.limits = DigitLimits(max_start=2, max_amount=1, max_total=3)
    assert 0 < len(few.heldout(500)) < 500


def test_the_tiny_model_was_warmed_up_on_these_problems() -> None:
    from minirl.train.tiny import tiny_model_folder

    assert tiny_model_folder(0).name == "tiny-4e895def-seed0"


REPLIES = [
    *((" so <<12*3>>", " = 36"), ("<< (7+5) / 8 >>", " = 1.5"), ("<<1/3>>", " = 0.333333")),
    *(("<<3-10>>", " = -7"), ("1+2>>", " = 3"), ("#### 36", None), ("<<1+2", None)),
    ("<<2/1>>.", " = 2"),  # a token may hold more than the stop text
    *((f"<<{wrong}>>", " = error") for wrong in ("", "1/0", "__import__('os')", "2**9999999")),
]


def test_a_call_is_computed_and_never_run() -> None:
    for text, reply in REPLIES:
        assert TOOL.reply(TOOL.train(0), (text,)) == reply, text
        assert TOOL.reply(TOOL.train(0), ("<<1+1>>", " = 2", text)) == reply


def test_the_calculators_worked_answers_are_what_the_tool_says() -> None:
    assert self_check(TOOL, "calculator").startswith("32 references") and has_turns(TOOL)
    for index in range(50):
        example = TOOL.train(index)
        assert isinstance(example.prompt, tuple) and "<<12*3>>" in example.prompt[0]["content"]
        *calls, last = re.split(r"(?<=>>)( = -?\d+)", example.worked)
        assert calls, "at least one call"
        for call, result in zip(calls[::2], calls[1::2], strict=True):
            assert TOOL.reply(example, (call,)) == result
        assert TOOL.reply(example, (last,)) is None
        assert TOOL.reward(example, Answer(last, StopReason.STOP, 9)) == 1.0
