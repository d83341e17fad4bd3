"""User code that hangs, exits, crashes or eats memory: one line with method, file and line."""

from pathlib import Path

import pytest

from minirl.config import TINY_FOLDER, Config, TasksConfig
from minirl.errors import RecipeError
from minirl.messages import Checked
from minirl.tasks.check import checking

TASK = """
import ctypes, os, sys, threading
from minirl.tasks import Task
pass  # import

class Mine(Task):
    def load(self, split):
        pass  # load
        for i in range(40):
            yield {"prompt": f"{i}?", "reference": f"{i}"}

    def example(self, row):
        pass  # example
        return super().example(row)

    def reward(self, example, answer):
        pass  # reward
        return answer.text == example.reference

    def reply(self, example, turns):
        pass  # reply

    def solution(self, example):
        pass  # solution
        return helped(example)

def helped(example):
    return example.reference  # helper
"""
HANG, SPIN = "threading.Event().wait()", "while True: pass"
CRASH, EXIT = "ctypes.string_at(0)", "os._exit(3)"
SLOW = "took longer than tasks.timeout_s = 1"
EXITED, CRASHED = "(ended with exit code 3)", "(was killed by SIGSEGV)"
HUGE, NO_MEMORY = "x = [0] * (20 * 2**30 // 8)", "(MemoryError: "


def checked(folder: Path, text: str, **options: object) -> Checked:
    (folder / "mine.py").write_text(text)
    tasks = TasksConfig(kind=f"{folder / 'mine.py'}:Mine", **{"timeout_s": 1.0, **options})  # type: ignore[arg-type]
    with checking(Config(tasks=tasks), TINY_FOLDER) as check:
        return check()


@pytest.mark.parametrize(
    ("mark", "harm", "what"),
    [
        ("import", SPIN, f"its import {SLOW}"),
        ("import", EXIT, f"its import ended its process {EXITED}"),
        ("load", SPIN, f"its load {SLOW}"),
        ("load", CRASH, f"its load ended its process {CRASHED}"),
        ("example", HANG, f"its example {SLOW}"),
        ("example", HUGE, NO_MEMORY),
        ("reward", SPIN, f"its reward {SLOW}"),
        ("reward", EXIT, f"its reward ended its process {EXITED}"),
        ("reward", "sys.exit(3)", f"its reward ended its process {EXITED}"),
        ("reply", CRASH, f"its reply ended its process {CRASHED}"),
        ("reply", "return 3", "its reply is 3"),
        ("solution", EXIT, f"its solution ended its process {EXITED}"),
        ("reward", "return 'right'", "(ValueError: the reward is 'right', not a finite number"),
        ("reward", "return", "(ValueError: the reward is None, not a finite number"),
        ("reward", "return 10**400", "(ValueError: the reward is 1000"),
        ("solution", "raise KeyError(7)", "its self-check failed (KeyError: 7"),
    ],
)
def test_it_is_one_line(tmp_path: Path, mark: str, harm: str, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        checked(tmp_path, TASK.replace(f"pass  # {mark}", harm))
    line = str(caught.value)
    assert what in line and "\n" not in line and caught.value.key == "tasks.kind"
    by_definition = harm in (EXIT, "sys.exit(3)")  # no dump says where it was
    number = next(n for n, text in enumerate(TASK.splitlines(), 1) if f"# {mark}" in text)
    number = 1 if mark == "import" and by_definition else number - by_definition
    if "return" not in harm:
        assert f"(mine.py, line {number}, in " in line, line


def test_what_is_right_passes_and_a_helper_is_named_with_its_method(tmp_path: Path) -> None:
    assert checked(tmp_path, TASK).shown == "32 references score 1, 32 shuffled ones less"
    assert checked(tmp_path, TASK).warning == "40 of 40 held-out prompts are trained on"
    with pytest.raises(RecipeError, match=r"line 28, in helped, from solution\)"):
        checked(tmp_path, TASK.replace("  # helper", " + None"))
