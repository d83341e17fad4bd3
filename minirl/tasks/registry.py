"""From `tasks.kind` to a task. Takes the recipe, gives an instance; classes are imported late, so
that a task's own dependencies are needed only where it is used.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from minirl.config import Config
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task

BUILT_IN = {
    "arithmetic": "minirl.tasks.arithmetic:Arithmetic",
    "calculator": "minirl.tasks.calculator:Calculator",
    "countdown": "minirl.tasks.countdown:Countdown",
    "gsm8k": "minirl.tasks.gsm8k:Gsm8k",
    "math": "minirl.tasks.math:Mathematics",
    "code": "minirl.tasks.code:Code",
}
SELF_CHECK_EXAMPLES = 32
SELF_CHECK_HELDOUT = 8


def make_task(config: Config) -> Task:
    """A task class is called with the recipe's [tasks] section and the seed."""
    target = BUILT_IN.get(config.tasks.kind, config.tasks.kind)
    place, _, name = target.rpartition(":")
    try:
        module = (
            _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
        return getattr(module, name)(config.tasks, config.seed)
    except MinirlError:  # it says what is wrong itself
        raise
    except Exception as error:  # the user's code: whatever it raises, it is one wrong task
        why = one_line(f"{type(error).__name__}: {error}")
        raise RecipeError(
            "tasks.kind", config.tasks.kind, f"cannot be loaded ({why})", "check file and class"
        ) from None


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"minirl_task_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise OSError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as the import system does: dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Checked:
    """What the self-check saw: how many references score 1, how many shuffled ones less."""

    num_right: int
    num_wrong: int

    def __str__(self) -> str:
        return f"{self.num_right} references score 1, {self.num_wrong} shuffled ones less"


def self_check(task: Task, kind: str) -> Checked:
    """At start (rule 7): reference answers score 1, another example's reference scores less. Two
    references may be one answer in two spellings (0.5 and 1/2): then each is right for the other,
    which is fine unless it is the rule."""
    try:
        return _self_check(task, kind)
    except MinirlError:
        raise
    except Exception as error:  # the user's code
        why = one_line(f"{type(error).__name__}: {error}")
        rule = f"its self-check failed ({why})"
        raise RecipeError(
            "tasks.kind", kind, rule, "look at its load, example and reward"
        ) from None


def _self_check(task: Task, kind: str) -> Checked:
    count = min(SELF_CHECK_EXAMPLES, task.num_train)
    examples = [task.train(i) for i in range(count)]
    for example in [*examples, *task.heldout(SELF_CHECK_HELDOUT)]:
        right = _score(task, example, example)
        if right != 1.0:
            rule = f"its own reference scores {right:g}, not 1"
            raise RecipeError("tasks.kind", kind, rule, _shown(example))
    pairs = zip(examples, examples[1:] + examples[:1], strict=True)
    others = [(a, b) for a, b in pairs if a.reference != b.reference]
    alike = [(a, b) for a, b in others if _score(task, a, b) >= 1.0]
    for here, there in alike:
        if 2 * len(alike) > len(others) or _score(task, there, here) < 1.0:
            rule = "a wrong answer scores 1"
            raise RecipeError("tasks.kind", kind, rule, _shown(here))
    return Checked(count, len(others) - len(alike))


def _score(task: Task, asked: Example, answered: Example) -> float:
    text = task.solution(answered)
    return float(task.reward(asked, Answer(text, StopReason.STOP, 1, (text,))))


def _shown(example: Example) -> str:
    return f"look at the reward of {str(example)[:160]!r}"
