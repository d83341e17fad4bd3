"""Word problems that a tiny model learns on a CPU in minutes, alone or with a calculator.

    prompt   Tom has 7 apples. Tom on Monday buys 5 more. How many apples does Tom have?
    answer    Monday buys 5 more: 7+5=12. #### 12
    turns     Monday buys 5 more: <<7+5>>   then the tool:  = 12   then the model: . #### 12

Takes a seed; gives examples, rewards, worked answers (for the warm-up) and the tool's replies. 1 to
7 steps give the long tail of lengths that an asynchronous run needs.
"""

import hashlib
import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Generated
from minirl.tasks.countdown import evaluate

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Zoe", "Sam", "Mia")
THINGS = ("apples", "plums", "pears", "nuts", "cakes", "figs", "beans", "eggs")
# As many verbs as days: a problem uses none twice, so that a verb points at one clause only.
MORE = ("buys", "finds", "wins", "gets", "picks", "earns", "grows")
LESS = ("sells", "eats", "loses", "drops", "lends", "cooks", "sends")
MARK = "#### "
INSTRUCTION = (
    "You have a calculator: write a sum in << >>, such as <<12*3>>, and the result is put after "
    "it. Put your final answer after ####."
)


class Difficulty(NamedTuple):  # the defaults are what the tiny model is warmed up on
    step_weights: Sequence[float] = (0.20, 0.24, 0.20, 0.14, 0.10, 0.07, 0.05)  # of 1 to 7 steps
    max_start: int = 20
    max_amount: int = 9
    max_total: int = 60  # at least start + amount, so that a step is always possible


USUAL = Difficulty()


class Problem(NamedTuple):
    prompt: str
    start: int
    steps: tuple[tuple[str, int], ...]  # a clause, and what it adds; 0 doubles what there is
    result: int


def draw_problem(seed: int, stream: str, index: int, difficulty: Difficulty = USUAL) -> Problem:
    """The problem at `index` of a stream, the same at every call. Those of "heldout" are of no
    other stream."""
    rng = Random(f"{seed}/{stream}/{index}")
    weights = difficulty.step_weights
    num_steps = rng.choices(range(1, len(weights) + 1), weights)[0]
    while True:  # the redraw keeps num_steps, and with it the distribution of lengths
        problem = _draw(rng, num_steps, difficulty)
        is_heldout = hashlib.sha256(problem.prompt.encode()).digest()[0] % 8 == 0
        if is_heldout == (stream == "heldout"):
            return problem


def _draw(rng: Random, num_steps: int, limits: Difficulty) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start = total = rng.randint(2, limits.max_start)
    more, less = rng.sample(MORE, len(MORE)), rng.sample(LESS, len(LESS))
    steps = []
    for day in DAYS[:num_steps]:
        if 2 * total <= limits.max_total and rng.random() < 0.12:
            steps.append((f"{day} doubles them", 0))
        else:
            amount = rng.randint(1, limits.max_amount)
            can_add, can_take = total + amount <= limits.max_total, total - amount >= 1
            if can_add if can_add != can_take else rng.random() < 0.5:
                steps.append((f"{day} {more.pop()} {amount} more", amount))
            else:
                steps.append((f"{day} {less.pop()} {amount}", -amount))
        total += steps[-1][1] or total
    story = "".join(f" {name} on {clause}." for clause, _ in steps)
    prompt = f"{name} has {start} {thing}.{story} How many {thing} does {name} have?"
    return Problem(prompt, start, tuple(steps), total)


def demonstration(problem: Problem, form: str = "{}={}.") -> str:
    """The worked answer: it quotes each clause, so that a step is a copy plus a small sum. `form`
    is how it writes a sum."""
    total, working = problem.start, ""
    for clause, added in problem.steps:
        left = f"{total}{added or total:+d}"
        total += added or total
        working += f" {clause}: {form.format(left, total)}"
    return f"{working} {MARK}{total}"


class Arithmetic(Generated):
    """Its prompts are text; the answer starts with a space."""

    difficulty = USUAL
    options = {"step_weights": list(difficulty.step_weights)}  # noqa: RUF012
    solution_form = f" {MARK}{{}}"

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        weights = self.options["step_weights"]
        self.difficulty = type(self).difficulty._replace(step_weights=weights)
        is_weights = 1 <= len(weights) <= len(DAYS) and min(weights) >= 0 < sum(weights)
        rule = "must be the weights of 1, 2, … up to 7 steps, not all 0"
        self.check_option("step_weights", is_weights, rule)

    def draw(self, index: int, is_test: bool) -> Example:
        stream = "heldout" if is_test else "train"
        return self.asked(draw_problem(self.seed, stream, index, self.difficulty))

    def asked(self, problem: Problem) -> Example:
        return Example(problem.prompt, str(problem.result), demonstration(problem))

    def reward(self, example: Example, answer: Answer) -> float:
        """1 if the model ended its answer and the number after the last mark is right."""
        last = answer.text.rpartition(MARK)[2] if MARK in answer.text else ""
        number = re.match(r"-?\d+", last)
        is_right = number is not None and number[0] == example.reference
        return float(is_right and answer.stop is StopReason.STOP)


class Calculator(Arithmetic):
    """Its prompts are chat messages. An expression in << >> ends a turn; none: the last turn."""

    turn_stop = (">>",)
    difficulty = Difficulty(max_start=200, max_amount=99, max_total=999)

    def asked(self, problem: Problem) -> Example:
        message = {"role": "user", "content": f"{problem.prompt}\n{INSTRUCTION}"}
        worked = demonstration(problem, form="<<{}>> = {}.")
        return Example((message,), str(problem.result), worked)

    def reply(self, example: Example, turns: tuple[str, ...]) -> str | None:
        before, call, _ = turns[-1].rpartition(">>")
        if not call:
            return None
        found = evaluate(before.rpartition("<<")[2].strip())  # exactly, and never as code
        if found is None:
            return " = error"
        return f" = {float(found[0]):.6f}".rstrip("0").rstrip(".")
