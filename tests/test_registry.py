"""From tasks.kind to a task that has proved itself, or to one line that says what is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import BUILTIN_TASKS
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.arithmetic import Arithmetic
from minirl.tasks.registry import BUILT_IN, make_task, self_check

TASK = """
from minirl.records import Example


class Doubling:
    num_train = 40

    def __init__(self, config, seed=0):
        self.data, self.seed = config.data, seed

    def train(self, index):
        return Example(f"{index} + {index} =", str(2 * index))

    def heldout(self, count):
        return []

    def reward(self, example, answer):
        return float(answer.text == example.reference)

    def solution(self, example):
        return example.reference
"""


def config_for(kind: str, data: str = "", seed: int = 0) -> Config:
    config = Config(seed=seed)
    return replace(config, tasks=replace(config.tasks, kind=kind, data=data))


def task_from(tmp_path: Path, text: str, name: str = "Doubling") -> Task:
    path = tmp_path / "my_task.py"
    path.write_text(text)
    return make_task(config_for(f"{path}:{name}", data="somewhere", seed=7))


def test_a_built_in_task_is_found_by_its_name() -> None:
    task = make_task(config_for("arithmetic", seed=3))
    assert isinstance(task, Arithmetic)
    self_check(task, "arithmetic")
    assert task.train(5) == make_task(config_for("arithmetic", seed=3)).train(5)


def test_a_task_in_a_module() -> None:
    task = make_task(config_for("minirl.tasks.arithmetic:Arithmetic"))
    assert isinstance(task, Arithmetic)


def test_a_task_in_a_file_gets_the_section_and_the_seed(tmp_path: Path) -> None:
    task = task_from(tmp_path, TASK)
    assert (task.data, task.seed) == ("somewhere", 7)  # type: ignore[attr-defined]
    assert task.train(4) == Example("4 + 4 =", "8")
    self_check(task, "my_task.py:Doubling")


def test_a_task_file_may_hold_dataclasses(tmp_path: Path) -> None:
    header = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    record = "\n\n@dataclass\nclass Note:\n    text: str\n"
    task = task_from(tmp_path, header + TASK + record)
    self_check(task, "my_task.py:Doubling")


def test_a_task_file_does_not_hide_a_module_of_its_name(tmp_path: Path) -> None:
    import json

    path = tmp_path / "json.py"
    path.write_text(TASK)
    make_task(config_for(f"{path}:Doubling"))
    import json as again

    assert again is json and json.loads("1") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("from minirl.records import Nonsense", "cannot import name 'Nonsense'"),
        ("class Doubling(:", "SyntaxError"),
        ("Doubling = undefined_name", "NameError: name 'undefined_name' is not defined"),
        ("open('no such file')", "No such file"),
        ("class Other: pass", "has no attribute 'Doubling'"),
    ],
)
def test_a_broken_task_file_is_one_recipe_error(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        task_from(tmp_path, text)
    assert caught.value.key == "tasks.kind"
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["nowhere.py:Task", "no_such_module:Task", "minirl.records:Task", "nonsense", ":"]
)
def test_a_kind_that_leads_nowhere_is_one_recipe_error(kind: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_task(config_for(kind))
    assert caught.value.key == "tasks.kind" and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["arithmetic", "countdown"])
def test_generated_tasks_prove_themselves(kind: str) -> None:
    checked = self_check(make_task(config_for(kind)), kind)
    assert checked.num_right == 32 and checked.num_wrong >= 28


def test_the_built_in_tasks_are_those_that_the_rules_name() -> None:
    assert tuple(sorted(BUILT_IN)) == tuple(sorted(BUILTIN_TASKS))


def test_a_task_without_a_reward_says_so(tmp_path: Path) -> None:
    text = "from minirl.tasks import Task\n\nclass Doubling(Task):\n    "
    text += "def load(self, split): return [{'prompt': 'a', 'reference': 'b'}]"
    with pytest.raises(RecipeError, match="Doubling has no reward"):
        self_check(task_from(tmp_path, text), "mine.py:Doubling")


def test_a_constructor_that_raises_is_one_recipe_error(tmp_path: Path) -> None:
    text = "class Doubling:\n    def __init__(self, config, seed): raise OSError('no disk')"
    with pytest.raises(RecipeError, match=r"cannot be loaded \(OSError: no disk\)"):
        task_from(tmp_path, text)


class Plain:
    """A right task, to be broken one way at a time."""

    num_train = 40

    def train(self, index: int) -> Example:
        return Example(str(index), str(index))

    def heldout(self, count: int) -> list[Example]:
        return []

    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.text == example.reference)

    def solution(self, example: Example) -> str:
        return example.reference


class WrongSolution(Plain):
    def solution(self, example: Example) -> str:
        return f"The answer is {example.reference}"


class AllRight(Plain):
    def reward(self, example: Example, answer: Answer) -> float:
        return 1.0


class NotANumber(Plain):
    def reward(self, example: Example, answer: Answer) -> float:
        return float("nan")


class LastIsWrong(Plain):
    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.text == example.reference != "31")


class SameReferences(Plain):
    def train(self, index: int) -> Example:
        return Example(str(index), "yes")


class Single(Plain):
    num_train = 1


class Spellings(Plain):
    """7 and 7.0 are two references and one answer."""

    def train(self, index: int) -> Example:
        number = index // 2
        return Example(str(index), str(number) if index % 2 else f"{number}.0")

    def reward(self, example: Example, answer: Answer) -> float:
        return float(float(answer.text) == float(example.reference))


class Partial(Plain):
    def reward(self, example: Example, answer: Answer) -> float:
        return 1.0 if answer.text == example.reference else 0.3


@pytest.mark.parametrize("task", [Plain(), SameReferences(), Single(), Spellings(), Partial()])
def test_a_right_task_passes(task: Task) -> None:
    self_check(task, "mine")


class OneWay(Plain):
    """Takes 8 for 7, but not 7 for 8."""

    def reward(self, example: Example, answer: Answer) -> float:
        return float(int(answer.text) - int(example.reference) in (0, 1))


class Raising(Plain):
    def reward(self, example: Example, answer: Answer) -> float:
        raise KeyError("no such column")


class WrongInTest(Plain):
    def heldout(self, count: int) -> list[Example]:
        return [Example("a", "b"), Example("a", "31")]

    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.text == example.reference and example.prompt != "a")


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (OneWay(), "a wrong answer scores 1"),
        (Raising(), r"its self-check failed \(KeyError: 'no such column'\)"),
        (WrongInTest(), "its own reference scores 0, not 1"),
        (WrongSolution(), "its own reference scores 0, not 1"),
        (LastIsWrong(), "its own reference scores 0, not 1"),
        (NotANumber(), "its own reference scores nan, not 1"),
        (AllRight(), "a wrong answer scores 1"),
    ],
)
def test_a_task_that_contradicts_itself_is_refused(task: Task, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as caught:
        self_check(task, "mine.py:Mine")
    assert 'tasks.kind = "mine.py:Mine"' in str(caught.value)


def test_the_self_check_answers_as_a_model_that_ended() -> None:
    seen: set[StopReason] = set()

    class Watching(Plain):
        def reward(self, example: Example, answer: Answer) -> float:
            seen.add(answer.stop)
            return super().reward(example, answer)

    self_check(Watching(), "mine")
    assert seen == {StopReason.STOP}
