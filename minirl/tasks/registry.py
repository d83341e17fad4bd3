"""From `tasks.kind` to a task, from `train.objective` and `train.estimator` to a user's function.
Code is imported late, so that its own dependencies are needed only where it is used. What a user's
code raises is said in one line, with the last line of the task's own file that it came through.
Leaves out: limits of time and memory (check.py at start, the verifiers afterwards).
"""

import importlib.util
import inspect
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any

from minirl.config import Config, get
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.recipe import TASKS
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task, has_turns

FUNCTIONS = {"train.objective": ("tokens", "train"), "train.estimator": ("groups",)}
"""Keys that may name a user's function, and what it must take."""


@contextmanager
def _as_recipe_error(key: str, value: str, what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except MinirlError:  # it says what is wrong itself
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise RecipeError(key, value, f"{what} ({failure(error, value)})", remedy) from None


def failure(error: BaseException, kind: str) -> str:
    """What was raised, and where in the file of `kind`."""
    said = one_line(f"{type(error).__name__}: {error}")
    return said + where(extract_tb(error.__traceback__), kind)


def where(frames: Sequence[FrameSummary], kind: str) -> str:
    """The innermost line of the file of `kind`, and its function; "" where there is none."""
    file, _, _ = TASKS.get(kind, kind).rpartition(":")
    file = file if file.endswith(".py") else f"{file.replace('.', '/')}.py"
    own = [frame for frame in frames if frame.filename.endswith(file)]
    if not own:
        return ""
    name = own[-1].name.replace("<module>", "its import")
    outer = f", from {own[0].name}" if own[0].name not in (name, "<module>") else ""
    return f" ({Path(file).name}, line {own[-1].lineno}, in {name}{outer})"


def dumped(stacks: str) -> list[FrameSummary]:
    """Of the main thread in the last dump of faulthandler in a log. The main thread is the last,
    its innermost frame the first."""
    _, _, last = stacks.rpartition(" (most recent call first)")
    found = re.findall(r'File "(.+)", line (\d+) in (.+)', last)
    return [FrameSummary(file, int(line), name) for file, line, name in reversed(found)]


def make_task(config: Config) -> Task:
    """A task class is called with the recipe's [tasks] section and the seed."""
    kind, remedy = config.tasks.kind, "check it: class MyTask(Task), from minirl.tasks import Task"
    with _as_recipe_error("tasks.kind", kind, "cannot be loaded", remedy):
        task = _load(TASKS.get(kind, kind))(config.tasks, config.seed)
        if not isinstance(task, Task):
            raise TypeError("it is no Task")
        return task


@contextmanager
def bounded(config: Config) -> Iterator[None]:
    """Around the user's code in the controller's main thread: what it raises, or that it takes
    longer than tasks.timeout_s, is one line with file and line. Code in C is not interrupted."""
    kind, limit_s = config.tasks.kind, config.tasks.timeout_s

    def late(*_: object) -> None:
        raise TimeoutError(f"it took longer than tasks.timeout_s = {limit_s:g}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        with _as_recipe_error("tasks.kind", kind, "an example failed", "mend it, and resume"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def load_function(key: str, value: str) -> Callable[..., Any]:
    """A user's function, once its signature is known to fit."""
    wanted = f"({', '.join(FUNCTIONS[key])})"
    remedy = f"write def {value.rpartition(':')[2]}{wanted}, as docs/algorithms.md shows"
    with _as_recipe_error(key, value, f"must be a function that takes {wanted}", remedy):
        function = _load(value)
        inspect.signature(function).bind(*FUNCTIONS[key])
        return function


def check_functions(config: Config) -> None:
    """At start, so that a trainer rank finds them right."""
    for key in FUNCTIONS:
        if ":" in (value := get(config, key)):
            load_function(key, value)


def _load(name: str) -> Any:
    """What "file.py:name" or "package.module:name" says."""
    place, _, inside = name.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"minirl_user_{Path(place).stem}", place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # as the import system does: dataclasses look themselves up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, inside):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", 0) == module.__name__]
        raise LookupError(f"there is no {inside} in it, but {', '.join(own) or 'nothing else'}")
    return getattr(module, inside)


def self_check(task: Task, kind: str) -> str:
    """At start (rule 7): references score 1, other examples' references less; says how many. Two
    references may be one answer in two spellings (0.5 and 1/2): then each is right for the other,
    which is fine unless it is the rule."""

    def wrong(rule: str, remedy: str) -> RecipeError:
        return RecipeError("tasks.kind", kind, rule, remedy)

    remedy = "look at its load, example and reward"
    with _as_recipe_error("tasks.kind", kind, "its self-check failed", remedy):
        examples = [task.train(i) for i in range(min(32, task.num_train))]
        for example in [*examples, *task.heldout(8)]:
            if (right := _score(task, example, example)) != 1.0:
                rule = f"its own reference scores {right:g}, not 1"
                raise wrong(rule, f"look at {str(example)[:160]!r}")
        pairs = pairwise([*examples, *examples[:1]])
        others = [(a, b) for a, b in pairs if a.reference != b.reference]
        alike = [(a, b) for a, b in others if _score(task, a, b) >= 1.0]
        for here, there in alike:
            if 2 * len(alike) > len(others) or _score(task, there, here) < 1.0:
                raise wrong("a wrong answer scores 1", f"look at {str(here)[:160]!r}")
        for example in examples[:8] if has_turns(task) else ():
            reply = task.reply(example, (task.solution(example),))
            if reply is not None and (not isinstance(reply, str) or not reply):
                rule = f"its reply is {one_line(repr(reply), 80)}"
                raise wrong(rule, "text, or None at the end")
        num_wrong = len(others) - len(alike)
        return f"{len(examples)} references score 1, {num_wrong} shuffled ones less"


def _score(task: Task, asked: Example, answered: Example) -> float:
    text = task.solution(answered)
    return score(task, asked, Answer(text, StopReason.STOP, 1, (text,)))


def score(task: Task, example: Example, answer: Answer) -> float:
    """The task's reward, if it is a number: text is none, even if it reads like one."""
    given, reward = task.reward(example, answer), math.nan
    with suppress(TypeError, ValueError, OverflowError):
        reward = math.nan if isinstance(given, str | bytes) else float(given)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {one_line(repr(given), 80)}, not a finite number")
    return reward
