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


def task_of(kind: str) -> Task:
    config = Config(seed=7)
    return make_task(replace(config, tasks=replace(config.tasks, kind=kind)))


@pytest.mark.parametrize("kind", ["arithmetic", "minirl.tasks.arithmetic:Arithmetic"])
def test_a_task_is_found_by_its_name_and_proves_itself(kind: str) -> None:
    assert isinstance(task_of(kind), Arithmetic)
    assert self_check(task_of(kind), kind) == "32 references score 1, 30 shuffled ones less"
    assert BUILT_IN.keys() == {*recipe.BUILT_IN["tasks.kind"]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("class Mine(:", "SyntaxError"),
        ("class Other: pass", "(LookupError: there is no Mine in it, but Other)"),
        (
            "def Mine(config, seed): raise OSError('no disk')",
            "(OSError: no disk (mine.py, line 1, in Mine))",
        ),
        *((kind, "cannot be loaded") for kind in ("no.py:Task", "no_module:Task", "nonsense", ":")),
    ],
)
def test_a_task_that_cannot_be_loaded_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(RecipeError) as caught:
        task_of(text if why == "cannot be loaded" else f"{tmp_path / 'mine.py'}:Mine")
    assert caught.value.key == "tasks.kind"
    assert why in str(caught.value) and "\n" not in str(caught.value)


class Plain:
    """A right task, to be broken one way at a time."""

    num_train = 40

    def __init__(self, reward: Callable[[str, str], float] = operator.eq, **changes: Any):
        """`reward` is of an answer and a reference."""
        self._reward = reward
        self.__dict__.update(changes)

    def train(self, index: int) -> Example:
        return Example(str(index), str(index))

    def heldout(self, count: int) -> list[Example]:
        return []

    def reward(self, example: Example, answer: Answer) -> float:
        assert answer.stop is StopReason.STOP, "asked as a model that ended"
        return float(self._reward(answer.text, example.reference))

    def solution(self, example: Example) -> str:
        return example.reference


def spelled(index: int) -> Example:
    """7 and 7.0 are two references and one answer."""
    return Example(str(index), str(index // 2) if index % 2 else f"{index // 2}.0")


WRONG, OTHER = "a wrong answer scores 1", "its own reference scores 0, not 1"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Plain(num_train=1), ""),
        (Plain(lambda text, right: float(text) == float(right), train=spelled), ""),
        (Plain(lambda text, right: 1.0 if text == right else 0.3), ""),
        (Plain(lambda text, right: int(text) - int(right) in (0, 1)), WRONG),
        (Plain(lambda text, right: {}[text]), r"its self-check failed \(KeyError: '0'\)"),
        (Plain(lambda text, right: text == right != "31"), OTHER),
        (Plain(lambda text, right: float("nan")), "ValueError: the reward is nan, not a finite"),
        (Plain(Task(TasksConfig()).reward), "Task has no reward"),
        (
            type("Short", (), {"reward": 1})(),
            "it has no num_train, train, heldout, solution; write",
        ),
        (Plain(lambda t, right: t == right != "b", heldout=lambda _: [Example("", "b")]), OTHER),
    ],
)
def test_a_task_that_contradicts_itself_is_refused_and_no_other(task: Plain, why: str) -> None:
    if not why:
        self_check(task, "mine")
        return
    with pytest.raises(RecipeError, match=why) as caught:
        self_check(task, "mine.py:Mine")
    assert 'tasks.kind = "mine.py:Mine"' in str(caught.value)
