"""Word problems that a tiny model learns on a CPU in minutes, with GSM8K's shape of answer.

    prompt   Tom has 7 apples. Tom on Monday buys 5 more. Tom on Tuesday eats 3. How many apples
             does Tom have?
    answer    Monday buys 5 more: 7+5=12. Tuesday eats 3: 12-3=9. #### 9

Takes a seed; gives examples, rewards and worked answers (for the warm-up). A problem has 1 to 7
steps, and the answer grows with it: that is the long tail of lengths an asynchronous run needs.
Training and held-out problems are disjoint by construction: a hash of the prompt's text says to
which side a problem belongs, and each stream redraws until it lands on its own side.

Leaves out: files, torch, the tokenizer.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Generated, need

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Zoe", "Sam", "Mia")
THINGS = ("apples", "plums", "pears", "nuts", "cakes", "figs", "beans", "eggs")
# As many verbs as days: a problem uses none twice, so that a verb points at one clause only.
MORE = ("buys", "finds", "wins", "gets", "picks", "earns", "grows")
LESS = ("sells", "eats", "loses", "drops", "lends", "cooks", "sends")
DOUBLES = "doubles"
DOUBLES_SHARE = 0.12  # of the steps
STEP_WEIGHTS = (0.20, 0.24, 0.20, 0.14, 0.10, 0.07, 0.05)  # of 1, 2, ... 7 steps
HELDOUT_SHARE = 8  # one problem in so many is held out
MARK = "#### "


@dataclass(frozen=True)
class Limits:
    """How large the numbers get. The defaults are what the tiny model is warmed up on."""

    max_start: int = 20
    max_amount: int = 9
    max_total: int = 60  # at least start + amount, so that a step is always possible


class Stream(StrEnum):
    """Where a problem is drawn from; the last two are on the held-out side of the hash. The warm-up
    has a stream of its own on each side."""

    TRAIN = "train"
    WARMUP = "warmup"
    HELDOUT = "heldout"
    PROBE = "probe"


@dataclass(frozen=True)
class Step:
    day: str
    verb: str
    amount: int  # 0 where the verb is DOUBLES

    @property
    def clause(self) -> str:
        """What the prompt says and the working quotes, word for word."""
        if self.verb == DOUBLES:
            return f"{self.day} doubles them"
        return f"{self.day} {self.verb} {self.amount}" + (" more" if self.verb in MORE else "")

    def equation(self, total: int) -> tuple[str, int]:
        """Of the working: its left side, and the total after the step."""
        if self.verb == DOUBLES:
            return f"{total}+{total}", 2 * total
        if self.verb in MORE:
            return f"{total}+{self.amount}", total + self.amount
        return f"{total}-{self.amount}", total - self.amount


@dataclass(frozen=True)
class Problem:
    name: str
    thing: str
    start: int
    steps: tuple[Step, ...]
    result: int

    @property
    def prompt(self) -> str:
        story = "".join(f" {self.name} on {step.clause}." for step in self.steps)
        question = f" How many {self.thing} does {self.name} have?"
        return f"{self.name} has {self.start} {self.thing}.{story}{question}"

    @property
    def is_heldout(self) -> bool:
        return hashlib.sha256(self.prompt.encode()).digest()[0] % HELDOUT_SHARE == 0


def draw_problem(
    seed: int,
    stream: Stream,
    index: int,
    step_weights: Sequence[float] = STEP_WEIGHTS,
    limits: Limits = Limits(),
) -> Problem:
    """The problem at `index` of a stream, the same at every call and on its stream's side."""
    rng = random.Random(f"{seed}/{stream.value}/{index}")
    num_steps = rng.choices(range(1, len(step_weights) + 1), step_weights)[0]
    while True:  # the redraw keeps num_steps, and with it the distribution of lengths
        problem = _draw(rng, num_steps, limits)
        if problem.is_heldout == (stream in (Stream.HELDOUT, Stream.PROBE)):
            return problem


def _draw(rng: random.Random, num_steps: int, limits: Limits) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start = rng.randint(2, limits.max_start)
    more, less = rng.sample(MORE, len(MORE)), rng.sample(LESS, len(LESS))
    total, steps = start, []
    for day in DAYS[:num_steps]:
        if 2 * total <= limits.max_total and rng.random() < DOUBLES_SHARE:
            steps.append(Step(day, DOUBLES, 0))
        else:
            amount = rng.randint(1, limits.max_amount)
            can_add, can_take = total + amount <= limits.max_total, total - amount >= 1
            is_more = can_add if can_add != can_take else rng.random() < 0.5
            steps.append(Step(day, (more if is_more else less).pop(), amount))
        _, total = steps[-1].equation(total)
    return Problem(name, thing, start, tuple(steps), total)


def demonstration(problem: Problem, said: Callable[[int], int] = int) -> str:
    """The worked answer: it quotes each clause, so that a step is a copy plus a small sum. `said`
    is what it says in place of a step's total."""
    total, working = problem.start, ""
    for step in problem.steps:
        left, right = step.equation(total)
        total = said(right)
        working += f" {step.clause}: {left}={total}."
    return f"{working} {MARK}{total}"


def sloppy_demonstration(
    problem: Problem, rng: random.Random, no_working: float, slip: float
) -> str:
    """As `demonstration`, but a share `no_working` guesses without working, and each step of the
    others slips with probability `slip`; what follows is computed from its wrong total."""
    if rng.random() < no_working:
        return f" {MARK}{problem.result}"

    def slipped(total: int) -> int:
        is_slip = rng.random() < slip
        return max(1, total + rng.choice((-2, -1, 1, 2))) if is_slip else total

    return demonstration(problem, slipped)


class Arithmetic(Generated):
    """Its prompts are text; the answer starts with a space."""

    limits = Limits()
    options = {"step_weights": list(STEP_WEIGHTS)}  # noqa: RUF012

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        weights = self.options["step_weights"]
        is_weights = all(type(w) in (int, float) and w >= 0 for w in weights)
        is_weights = is_weights and 1 <= len(weights) <= len(DAYS) and sum(weights) > 0
        rule = "must be the weights of 1, 2, … up to 7 steps, not all 0"
        need(self, "step_weights", is_weights, rule)

    def draw(self, index: int, is_test: bool) -> Example:
        stream, weights = Stream.HELDOUT if is_test else Stream.TRAIN, self.options["step_weights"]
        return self.asked(draw_problem(self.seed, stream, index, weights, self.limits))

    def asked(self, problem: Problem) -> Example:
        return Example(problem.prompt, str(problem.result), demonstration(problem))

    def reward(self, example: Example, answer: Answer) -> float:
        """1 if the model ended its answer and the number after the last mark is right."""
        _, mark, tail = answer.text.rpartition(MARK)
        number = re.match(r"-?\d+", tail)
        is_right = bool(mark) and number is not None and number.group() == example.reference
        return float(is_right and answer.stop is StopReason.STOP)

    def solution(self, example: Example) -> str:
        return f" {MARK}{example.reference}"
