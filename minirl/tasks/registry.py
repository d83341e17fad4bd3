"""From `tasks.kind` to a task, from `train.objective` and `train.estimator` to a user's function.
Code is imported late, so that its own dependencies are needed only where it is used.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from minirl.config import Config, get
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task

BUILT_IN = {
    "arithmetic": "minirl.tasks.arithmetic:Arithmetic",
    "calculator": "minirl.tasks.arithmetic:Calculator",
    "countdown": "minirl.tasks.countdown:Countdown",
    "gsm8k": "minirl.tasks.gsm8k:Gsm8k",
    "math": "minirl.tasks.math:Mathematics",
    "code": "minirl.tasks.code:Code",
}
FUNCTIONS = {"train.objective": ("tokens", "train"), "train.estimator": ("groups",)}
"""Keys that may name a user's function, and what it must take."""


@contextmanager
def _as_recipe_error(key: str, value: str, what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except MinirlError:  # it says what is wrong itself
        raise
    except Exception as error:  # the user's code may raise anything
        why = one_line(f"{type(error).__name__}: {error}")
        raise RecipeError(key, value, f"{what} ({why})", remedy) from None


def make_task(config: Config) -> Task:
    """A task class is called with the recipe's [tasks] section and the seed."""
    kind = config.tasks.kind
    with _as_recipe_error("tasks.kind", kind, "cannot be loaded", "check file and class"):
        return _load(BUILT_IN.get(kind, kind))(config.tasks, config.seed)


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
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, inside)


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"minirl_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as the import system does: dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def self_check(task: Task, kind: str) -> str:
    """At start (rule 7): references score 1, other examples' references less; says how many. Two
    references may be one answer in two spellings (0.5 and 1/2): then each is right for the other,
    which is fine unless it is the rule."""
    remedy = "look at its load, example and reward"
    with _as_recipe_error("tasks.kind", kind, "its self-check failed", remedy):
        examples = [task.train(i) for i in range(min(32, task.num_train))]
        for example in [*examples, *task.heldout(8)]:
            if (right := _score(task, example, example)) != 1.0:
                rule = f"its own reference scores {right:g}, not 1"
                raise RecipeError("tasks.kind", kind, rule, f"look at {str(example)[:160]!r}")
        pairs = pairwise([*examples, *examples[:1]])
        others = [(a, b) for a, b in pairs if a.reference != b.reference]
        alike = [(a, b) for a, b in others if _score(task, a, b) >= 1.0]
        for here, there in alike:
            if 2 * len(alike) > len(others) or _score(task, there, here) < 1.0:
                rule = "a wrong answer scores 1"
                raise RecipeError("tasks.kind", kind, rule, f"look at {str(here)[:160]!r}")
        num_wrong = len(others) - len(alike)
        return f"{len(examples)} references score 1, {num_wrong} shuffled ones less"


def _score(task: Task, asked: Example, answered: Example) -> float:
    text = task.solution(answered)
    return float(task.reward(asked, Answer(text, StopReason.STOP, 1, (text,))))
