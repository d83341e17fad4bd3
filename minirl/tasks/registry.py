"""From `tasks.kind` to a task that has proved itself. Takes the recipe, gives an instance; classes
are imported late, so that a task's own dependencies are needed only where it is used.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from minirl.config import Config
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


@contextmanager
def _as_recipe_error(kind: str, what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except MinirlError:  # it says what is wrong itself
        raise
    except Exception as error:  # the user's code may raise anything
        why = one_line(f"{type(error).__name__}: {error}")
        raise RecipeError("tasks.kind", kind, f"{what} ({why})", remedy) from None


def make_task(config: Config) -> Task:
    """A task class is called with the recipe's [tasks] section and the seed."""
    kind = config.tasks.kind
    place, _, name = BUILT_IN.get(kind, kind).rpartition(":")
    with _as_recipe_error(kind, "cannot be loaded", "check file and class"):
        is_file = place.endswith(".py")
        module = _from_file(Path(place)) if is_file else importlib.import_module(place)
        return getattr(module, name)(config.tasks, config.seed)


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"minirl_task_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as the import system does: dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def self_check(task: Task, kind: str) -> str:
    """At start (rule 7): references score 1, other examples' references less; says how many. Two
    references may be one answer in two spellings (0.5 and 1/2): then each is right for the other,
    which is fine unless it is the rule."""
    with _as_recipe_error(kind, "its self-check failed", "look at its load, example and reward"):
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
