"""From `tasks.kind` to a task. Takes the recipe, gives an instance; classes are imported late, so
that a task's own dependencies are needed only where it is used.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

from minirl.config import Config
from minirl.errors import RecipeError, one_line
from minirl.records import Answer, StopReason
from minirl.tasks import Task

BUILT_IN = {
    "arithmetic": "minirl.tasks.arithmetic:Arithmetic",
    "gsm8k": "minirl.tasks.gsm8k:Gsm8k",
    "code": "minirl.tasks.code:Code",
}
SELF_CHECK_EXAMPLES = 32


def make_task(config: Config) -> Task:
    """A task class is called with the recipe's [tasks] section and the seed."""
    target = BUILT_IN.get(config.tasks.kind, config.tasks.kind)
    place, _, name = target.rpartition(":")
    try:
        module = (
            _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
        task_class = getattr(module, name)
    except Exception as error:  # the user's code: whatever it raises, it is one wrong task
        why = one_line(f"{type(error).__name__}: {error}")
        raise RecipeError(
            "tasks.kind", config.tasks.kind, f"cannot be loaded ({why})", "check file and class"
        ) from None
    return task_class(config.tasks, config.seed)


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"minirl_task_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise OSError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as the import system does: dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def self_check(task: Task, kind: str) -> None:
    """At start (rule 7): reference answers score 1, another example's reference scores less."""
    count = min(SELF_CHECK_EXAMPLES, task.num_train)
    examples = [task.train(i) for i in range(count)]
    for here, there in zip(examples, examples[1:] + examples[:1], strict=True):
        right = task.reward(here, Answer(task.solution(here), StopReason.STOP, 1))
        if right != 1.0:
            raise RecipeError(
                "tasks.kind", kind, f"its own reference scores {right:g}, not 1", _shown(here)
            )
        wrong = task.reward(here, Answer(task.solution(there), StopReason.STOP, 1))
        if here.reference != there.reference and wrong >= 1.0:
            raise RecipeError("tasks.kind", kind, f"a wrong answer scores {wrong:g}", _shown(here))


def _shown(example: object) -> str:
    return f"look at the reward of {str(example)[:160]!r}"
