"""From tasks.kind to a task that has proved itself, or to one line that says what is wrong."""

import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minirl import recipe
from minirl.config import Config, TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.arithmetic import Arithmetic
from minirl.tasks.registry import BUILT_IN, make_task, self_check

TASK = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Doubling:
    config: object
    seed: int
"""


def config_for(kind: str, data: str = "", seed: int = 0) -> Config:
    config = Config(seed=seed)
    return replace(config, tasks=replace(config.tasks, kind=kind, data=data))


def task_from(tmp_path: Path, text: str, name: str = "Doubling") -> Task:
    path = tmp_path / "my_task.py"
    path.write_text(text)
    return make_task(config_for(f"{path}:{name}", data="somewhere", seed=7))


@pytest.mark.parametrize("kind", ["arithmetic", "minirl.tasks.arithmetic:Arithmetic"])
def test_a_task_is_found_by_its_name_and_proves_itself(kind: str) -> None:
    task = make_task(config_for(kind, seed=3))
    checked = self_check(task, kind)
    assert isinstance(task, Arithmetic) and checked.num_right == 32 and checked.num_wrong >= 28


def test_a_task_in_a_file_gets_the_section_and_the_seed(tmp_path: Path) -> None:
    task = task_from(tmp_path, TASK)
    assert (task.config.data, task.seed) == ("somewhere", 7)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("class Doubling(:", "SyntaxError"),
        ("class Other: pass", "has no attribute 'Doubling'"),
        ("def Doubling(config, seed): raise OSError('no disk')", "(OSError: no disk)"),
    ],
)
def test_a_broken_task_file_is_one_recipe_error(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        task_from(tmp_path, text)
    assert caught.value.key == "tasks.kind"
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["nowhere.py:Task", "no_such_module:Task", "nonsense", ":"])
def test_a_kind_that_leads_nowhere_is_one_recipe_error(kind: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_task(config_for(kind))
    assert caught.value.key == "tasks.kind" and "\n" not in str(caught.value)


def test_the_built_in_tasks_are_those_that_the_rules_name() -> None:
    assert tuple(sorted(BUILT_IN)) == tuple(sorted(recipe.BUILT_IN["tasks.kind"]))


class Plain:
    """A right task, to be broken one way at a time."""

    num_train = 40

    def __init__(self, reward: Callable[[str, str], float] = operator.eq, **changes: Any):
        """`reward` is of an answer and a reference."""
        self._reward, self.seen = reward, set[StopReason]()
        self.__dict__.update(changes)

    def train(self, index: int) -> Example:
        return Example(str(index), str(index))

    def heldout(self, count: int) -> list[Example]:
        return []

    def reward(self, example: Example, answer: Answer) -> float:
        self.seen.add(answer.stop)
        return float(self._reward(answer.text, example.reference))

    def solution(self, example: Example) -> str:
        return example.reference


def spelled(index: int) -> Example:
    """7 and 7.0 are two references and one answer."""
    return Example(str(index), str(index // 2) if index % 2 else f"{index // 2}.0")


@pytest.mark.parametrize(
    "task",
    [
        Plain(),
        Plain(train=lambda index: Example(str(index), "yes")),
        Plain(num_train=1),
        Plain(lambda text, right: float(text) == float(right), train=spelled),
        Plain(lambda text, right: 1.0 if text == right else 0.3),
    ],
)
def test_a_right_task_passes(task: Plain) -> None:
    self_check(task, "mine")
    assert task.seen == {StopReason.STOP}, "asked as a model that ended"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Plain(lambda text, right: int(text) - int(right) in (0, 1)), "a wrong answer scores 1"),
        (Plain(lambda text, right: True), "a wrong answer scores 1"),
        (Plain(lambda text, right: {}[text]), r"its self-check failed \(KeyError: '0'\)"),
        (Plain(lambda text, right: text == right != "31"), "its own reference scores 0, not 1"),
        (Plain(lambda text, right: float("nan")), "its own reference scores nan, not 1"),
        (Plain(Task(TasksConfig()).reward), "Task has no reward"),
        (
            Plain(lambda text, right: text == right != "b", heldout=lambda _: [Example("", "b")]),
            "its own reference scores 0, not 1",
        ),
    ],
)
def test_a_task_that_contradicts_itself_is_refused(task: Plain, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as caught:
        self_check(task, "mine.py:Mine")
    assert 'tasks.kind = "mine.py:Mine"' in str(caught.value)
