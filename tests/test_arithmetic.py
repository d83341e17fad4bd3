"""The arithmetic task: the same problems every time, two sides that never meet, honest rewards."""

import random
import subprocess
import sys
from collections import Counter

import pytest

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks.arithmetic import (
    STEP_WEIGHTS,
    Arithmetic,
    Limits,
    Problem,
    Step,
    Stream,
    demonstration,
    draw_problem,
    sloppy_demonstration,
)

TASK = Arithmetic(TasksConfig(), seed=3)
WEIGHTS_OF_K = {k: tuple(float(i == k) for i in range(1, 8)) for k in range(1, 8)}


def grade(problem: Problem, text: str, stop: StopReason = StopReason.STOP) -> float:
    example = Example(problem.prompt, str(problem.result))
    return TASK.reward(example, Answer(text, stop, num_tokens=len(text)))


def test_the_example_of_the_header() -> None:
    steps = (Step("Monday", "buys", 5), Step("Tuesday", "eats", 3), Step("Wednesday", "doubles", 0))
    problem = Problem("Tom", "apples", 7, steps, 18)
    assert problem.prompt == (
        "Tom has 7 apples. Tom on Monday buys 5 more. Tom on Tuesday eats 3. "
        "Tom on Wednesday doubles them. How many apples does Tom have?"
    )
    assert demonstration(problem) == (
        " Monday buys 5 more: 7+5=12. Tuesday eats 3: 12-3=9. Wednesday doubles them: 9+9=18."
        " #### 18"
    )


def test_a_seed_gives_the_same_problems_in_another_process() -> None:
    code = (
        "from minirl.tasks.arithmetic import Arithmetic; from minirl.config import TasksConfig\n"
        "t = Arithmetic(TasksConfig(), seed=3)\n"
        "print([t.train(i).prompt for i in (0, 7, 2**31 - 1)] + [t.heldout(2)[1].prompt])\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [TASK.train(i).prompt for i in (0, 7, 2**31 - 1)] + [TASK.heldout(2)[1].prompt]
    assert shown.stdout.strip() == str(here)
    other = Arithmetic(TasksConfig(), seed=4)
    assert [TASK.train(i) for i in range(20)] != [other.train(i) for i in range(20)]
    assert TASK.heldout(300)[:100] == TASK.heldout(100), "a longer one only appends"


def test_heldout_examples_are_different_and_never_trained() -> None:
    heldout = {example.prompt for example in TASK.heldout(1000)}
    assert len(heldout) == 1000
    for seed in (3, 4):
        for stream in (Stream.TRAIN, Stream.WARMUP):
            drawn = [draw_problem(seed, stream, index) for index in range(1500)]
            assert not any(problem.is_heldout for problem in drawn)
            assert heldout.isdisjoint(problem.prompt for problem in drawn)
    for stream in (Stream.HELDOUT, Stream.PROBE):
        assert all(draw_problem(3, stream, index).is_heldout for index in range(300))


def test_step_counts_follow_their_weights_on_both_sides() -> None:
    for stream in (Stream.TRAIN, Stream.HELDOUT):
        counts = Counter(len(draw_problem(0, stream, index).steps) for index in range(3000))
        for num_steps, weight in enumerate(STEP_WEIGHTS, start=1):
            assert counts[num_steps] / 3000 == pytest.approx(weight, abs=0.03)


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_clean_demonstrations_score_1_and_damaged_ones_0(num_steps: int) -> None:
    for index in range(100):
        problem = draw_problem(3, Stream.TRAIN, index, WEIGHTS_OF_K[num_steps])
        answer = demonstration(problem)
        assert len(problem.steps) == num_steps
        assert grade(problem, answer) == 1.0
        assert grade(problem, answer, StopReason.LENGTH) == 0.0
        assert grade(problem, answer + "0") == 0.0
        assert grade(problem, f"{answer} #### {problem.result + 1}") == 0.0
        assert grade(problem, answer.partition(" ####")[0]) == 0.0
        total, verbs = problem.start, [step.verb for step in problem.steps if step.amount]
        for step in problem.steps:
            total = step.equation(total)[1]
            assert 1 <= total <= Limits().max_total
        assert len(set(verbs)) == len(verbs), "no verb comes twice"


def test_the_number_after_the_last_mark_counts() -> None:
    right = ["#### 9", " #### 9.", "#### 4 #### 9", "7+2=9. #### 9 plums"]
    wrong = ["", "9", "####", "#### ", "#### nine", "#### 9 #### ", "####9"]
    for text in right + wrong:
        reward = TASK.reward(Example("", "9"), Answer(text, StopReason.STOP, 1))
        assert reward == (text in right), text


def test_sloppy_demonstrations_guess_and_slip_as_often_as_asked() -> None:
    rng = random.Random(0)
    problems = [draw_problem(0, Stream.WARMUP, index, WEIGHTS_OF_K[3]) for index in range(2000)]
    guesses = [sloppy_demonstration(p, rng, no_working=0.6, slip=0.0) for p in problems]
    assert sum("=" not in g for g in guesses) / 2000 == pytest.approx(0.6, abs=0.04)
    assert all(grade(p, g) == 1.0 for p, g in zip(problems, guesses, strict=True))
    slips = [sloppy_demonstration(p, rng, no_working=0.0, slip=0.2) for p in problems]
    clean = sum(s == demonstration(p) for p, s in zip(problems, slips, strict=True))
    assert clean / 2000 == pytest.approx(0.8**3, abs=0.04)


def test_lengths_are_the_recipes_and_numbers_a_subclass_may_change() -> None:
    class Hard(Arithmetic):
        limits = Limits(max_start=900, max_amount=400, max_total=2000)

    task = Hard(TasksConfig(options={"step_weights": [0, 0, 0, 0, 0, 1, 3]}), seed=3)
    prompts = [str(task.train(index).prompt) for index in range(300)]
    steps = Counter(prompt.count(" on ") for prompt in prompts)
    assert set(steps) == {6, 7} and steps[7] > 2 * steps[6]
    assert max(int(task.train(index).reference) for index in range(300)) > 500
    Hard.limits = Limits(max_start=2, max_amount=1, max_total=3)
    few = Hard(TasksConfig(options={"step_weights": [1]}))
    assert 0 < len(few.heldout(5000)) < 5000, "it stops where there are no more"


def test_the_tiny_model_was_warmed_up_on_these_problems() -> None:
    from minirl.train.tiny import tiny_model_folder

    assert tiny_model_folder(0).name == "tiny-bd084f75-seed0"
