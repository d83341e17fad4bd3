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
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task, need

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Zoe", "Sam", "Mia")
THINGS = ("apples", "plums", "pears", "nuts", "cakes", "figs", "beans", "eggs")
# As many verbs as days: a problem uses none twice, so that a verb points at one clause only.
MORE = ("buys", "finds", "wins", "gets", "picks", "earns", "grows")
LESS = ("sells", "eats", "loses", "drops", "lends", "cooks", "sends")
DOUBLES = "doubles"

GIVE_UP = 500  # draws in a row that gave nothing new: an easy setting has few problems
STEP_WEIGHTS = (0.20, 0.24, 0.20, 0.14, 0.10, 0.07, 0.05)  # of 1, 2, ... 7 steps
MAX_TOTAL = 60


@dataclass(frozen=True)
class Difficulty:
    """What [tasks.options] sets. The defaults are what the tiny model is warmed up on."""

    step_weights: tuple[float, ...] = STEP_WEIGHTS
    max_start: int = 20
    max_amount: int = 9
    max_total: int = MAX_TOTAL
    doubles: float = 0.12  # share of steps that double


DEFAULT = Difficulty()
HELDOUT_SHARE = 8  # one problem in so many is held out

_MARK = "#### "
_NUMBER = re.compile(r"-?\d+")


class Stream(StrEnum):
    """Where a problem is drawn from. The first two are on one side of the hash, the last two on
    the other: the warm-up probes itself with problems that no evaluation counts."""

    TRAIN = "train"
    WARMUP = "warmup"
    HELDOUT = "heldout"
    PROBE = "probe"

    @property
    def is_heldout(self) -> bool:
        return self in (Stream.HELDOUT, Stream.PROBE)


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

    def sum(self, total: int) -> str:
        """The left side of the working's equation."""
        if self.verb == DOUBLES:
            return f"{total}+{total}"
        return f"{total}{'+' if self.verb in MORE else '-'}{self.amount}"

    def apply(self, total: int) -> int:
        if self.verb == DOUBLES:
            return 2 * total
        return total + self.amount if self.verb in MORE else total - self.amount


@dataclass(frozen=True)
class Problem:
    name: str
    thing: str
    start: int
    steps: tuple[Step, ...]

    @property
    def prompt(self) -> str:
        story = "".join(f" {self.name} on {step.clause}." for step in self.steps)
        question = f" How many {self.thing} does {self.name} have?"
        return f"{self.name} has {self.start} {self.thing}.{story}{question}"

    @property
    def result(self) -> int:
        total = self.start
        for step in self.steps:
            total = step.apply(total)
        return total

    @property
    def is_heldout(self) -> bool:
        return hashlib.sha256(self.prompt.encode()).digest()[0] % HELDOUT_SHARE == 0


def draw_problem(
    seed: int,
    stream: Stream,
    index: int,
    step_weights: Sequence[float] | None = None,
    difficulty: Difficulty = DEFAULT,
) -> Problem:
    """The problem at `index` of a stream, the same at every call and on its stream's side."""
    rng = random.Random(f"{seed}/{stream.value}/{index}")
    weights = difficulty.step_weights if step_weights is None else step_weights
    num_steps = rng.choices(range(1, len(weights) + 1), weights)[0]
    while True:  # the redraw keeps num_steps, and with it the distribution of lengths
        problem = _draw(rng, num_steps, difficulty)
        if problem.is_heldout == stream.is_heldout:
            return problem


def _draw(rng: random.Random, num_steps: int, difficulty: Difficulty) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start = rng.randint(2, difficulty.max_start)
    more, less = rng.sample(MORE, len(MORE)), rng.sample(LESS, len(LESS))
    total, steps = start, []
    for day in DAYS[:num_steps]:
        step = _draw_step(rng, day, total, (more, less), difficulty)
        total = step.apply(total)
        steps.append(step)
    return Problem(name, thing, start, tuple(steps))


def _draw_step(
    rng: random.Random,
    day: str,
    total: int,
    verbs: tuple[list[str], list[str]],
    difficulty: Difficulty,
) -> Step:
    """A step that keeps the total between 1 and max_total; takes its verb from more or less."""
    more, less = verbs
    if 2 * total <= difficulty.max_total and rng.random() < difficulty.doubles:
        return Step(day, DOUBLES, 0)
    amount = rng.randint(1, difficulty.max_amount)
    can_add, can_take = total + amount <= difficulty.max_total, total - amount >= 1
    is_more = can_add if can_add != can_take else rng.random() < 0.5
    return Step(day, (more if is_more else less).pop(), amount)


def demonstration(problem: Problem) -> str:
    """The worked answer: it quotes each clause, so that a step is a copy plus a small sum."""
    return _worked(problem, lambda total: total)


def sloppy_demonstration(
    problem: Problem, rng: random.Random, no_working: float, slip: float
) -> str:
    """As `demonstration`, but a share `no_working` guesses without working, and each step of the
    others slips with probability `slip`; what follows is computed from its wrong total."""
    if rng.random() < no_working:
        return f" {_MARK}{problem.result}"

    def slipped(total: int) -> int:
        is_slip = rng.random() < slip
        return max(1, total + rng.choice((-2, -1, 1, 2))) if is_slip else total

    return _worked(problem, slipped)


def _worked(problem: Problem, said: Callable[[int], int]) -> str:
    """`said` is what the answer says in place of a step's total."""
    total, working = problem.start, ""
    for step in problem.steps:
        after = said(step.apply(total))
        working += f" {step.clause}: {step.sum(total)}={after}."
        total = after
    return f"{working} {_MARK}{total}"


class Arithmetic(Task):
    """Its prompts are text; the answer starts with a space."""

    num_train = 2**31
    options = {**asdict(DEFAULT), "step_weights": list(STEP_WEIGHTS)}  # noqa: RUF012

    def __init__(self, config: TasksConfig, seed: int = 0):
        super().__init__(config, seed)
        given, weights = self.options, self.options["step_weights"]
        is_weights = all(type(w) in (int, float) and w >= 0 for w in weights)
        is_weights = is_weights and 1 <= len(weights) <= len(DAYS) and sum(weights) > 0
        rule = "must be the weights of 1, 2, … up to 7 steps, not all 0"
        need(self, "step_weights", is_weights, rule)
        need(self, "max_amount", given["max_amount"] >= 1, "must be at least 1")
        need(self, "max_start", given["max_start"] >= 2, "must be at least 2")
        most = given["max_start"] + given["max_amount"]
        rule = "must be at least max_start + max_amount, so that every step can be taken"
        need(self, "max_total", given["max_total"] >= most, rule)
        need(self, "doubles", 0 <= given["doubles"] <= 1, "must be a share between 0 and 1")
        known = {field.name: given[field.name] for field in fields(Difficulty)}
        self.difficulty = Difficulty(**{**known, "step_weights": tuple(map(float, weights))})

    def _drawn(self, stream: Stream, index: int) -> Example:
        problem = draw_problem(self.seed, stream, index, difficulty=self.difficulty)
        return Example(problem.prompt, str(problem.result), demonstration(problem))

    def train(self, index: int) -> Example:
        return self._drawn(Stream.TRAIN, index)

    def heldout(self, count: int) -> Sequence[Example]:
        """`count` different examples, where there are so many."""
        found: dict[str, Example] = {}
        index = newest = 0
        while len(found) < count and index - newest <= GIVE_UP:
            example = self._drawn(Stream.HELDOUT, index)
            index += 1
            if str(example.prompt) not in found:
                found[str(example.prompt)], newest = example, index
        return list(found.values())

    def reward(self, example: Example, answer: Answer) -> float:
        """1 if the model ended its answer and the number after the last mark is right."""
        _, mark, tail = answer.text.rpartition(_MARK)
        number = _NUMBER.match(tail)
        is_right = bool(mark) and number is not None and number.group() == example.reference
        return float(is_right and answer.stop is StopReason.STOP)

    def solution(self, example: Example) -> str:
        return f" {_MARK}{example.reference}"
