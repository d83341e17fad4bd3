"""From tasks.kind to a task that has proved itself. User code that contradicts itself, cannot be
loaded, hangs, exits, crashes or eats memory: one line with method, file and line."""

from pathlib import Path

import pytest

from minirl import recipe
from minirl.config import TINY_FOLDER, Config, TasksConfig
from minirl.errors import RecipeError
from minirl.messages import Checked
from minirl.tasks.arithmetic import Arithmetic
from minirl.tasks.check import checking
from minirl.tasks.registry import BUILT_IN, make_task, self_check

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


def config_of(kind: str, **options: object) -> Config:
    return Config(seed=7, tasks=TasksConfig(kind=kind, **options))  # type: ignore[arg-type]


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Mine"


def checked(folder: Path, text: str, timeout_s: float = 60.0) -> Checked:
    with checking(config_of(written(folder, text), timeout_s=timeout_s), TINY_FOLDER) as check:
        return check()


@pytest.mark.parametrize("kind", ["arithmetic", "minirl.tasks.arithmetic:Arithmetic"])
def test_a_task_is_found_by_its_name_and_proves_itself(kind: str) -> None:
    task = make_task(config_of(kind))
    assert isinstance(task, Arithmetic)
    assert self_check(task, kind) == "32 references score 1, 30 shuffled ones less"
    assert BUILT_IN.keys() == {*recipe.BUILT_IN["tasks.kind"]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("class Mine(:", "SyntaxError"),
        ("class Other: pass", "(LookupError: there is no Mine in it, but Other)"),
        ("def Mine(*_): raise OSError('no disk')", "(OSError: no disk (mine.py, line 1, in Mine))"),
        *((kind, "cannot be loaded") for kind in ("no.py:Task", "no_module:Task", "nonsense", ":")),
    ],
)
def test_a_task_that_cannot_be_loaded_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    own = written(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        make_task(config_of(text if why == "cannot be loaded" else own))
    assert caught.value.key == "tasks.kind"
    assert why in str(caught.value) and "\n" not in str(caught.value)


SAME = "answer.text == example.reference"
SPELLED = "f'{i // 2}' + '.0' * (i % 2)"  # 7 and 7.0 are two references and one answer
BARE = "class Mine:\n    def __init__(*_): ...\n    reward = 1"
WRONG, OTHER = "a wrong answer scores 1", "its own reference scores 0, not 1"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"range(40)": "range(1)"}, ""),
        ({SAME: "float(answer.text) == float(example.reference)", 'f"{i}"': SPELLED}, ""),
        ({SAME: f"1.0 if {SAME} else 0.3"}, ""),
        ({SAME: "int(answer.text) - int(example.reference) in (0, 1)"}, WRONG),
        ({SAME: "{}[answer.text]"}, r"its self-check failed \(KeyError: '\d+'"),
        ({SAME: f"{SAME} != '31'"}, OTHER),
        ({SAME: f"{SAME} != 'b'", 'f"{i}"': 'f"{i}" if split == "train" else "b"'}, OTHER),
        ({SAME: "float('nan')"}, "ValueError: the reward is nan, not a finite"),
        ({"def reward": "def other"}, "Mine has no reward"),
        ({TASK: BARE}, "it has no num_train, train"),
    ],
)
def test_a_task_that_contradicts_itself(tmp_path: Path, changes: dict[str, str], why: str) -> None:
    text = TASK
    for old, new in changes.items():
        text = text.replace(old, new)
    task = make_task(config_of(written(tmp_path, text)))
    if not why:
        self_check(task, "mine")
        return
    with pytest.raises(RecipeError, match=why) as caught:
        self_check(task, "mine.py:Mine")
    assert 'tasks.kind = "mine.py:Mine"' in str(caught.value)


@pytest.mark.parametrize(
    ("mark", "harm", "what"),
    [
        ("import", SPIN, f"its code {SLOW}"),
        ("import", EXIT, f"its code ended its process {EXITED}"),
        ("load", CRASH, f"its code ended its process {CRASHED}"),
        ("example", HANG, f"its code {SLOW}"),
        ("example", HUGE, NO_MEMORY),
        ("reward", "sys.exit(3)", "its self-check failed (SystemExit: 3"),
        ("reply", "return 3", "its reply is 3"),
        ("solution", EXIT, f"its code ended its process {EXITED}"),
        ("reward", "return", "(ValueError: the reward is None, not a finite number"),
        ("reward", "return 10**400", "(ValueError: the reward is 1000"),
        ("solution", "raise KeyError(7)", "its self-check failed (KeyError: 7"),
    ],
)
def test_it_is_one_line(tmp_path: Path, mark: str, harm: str, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        checked(tmp_path, TASK.replace(f"pass  # {mark}", harm), 1.0 if SLOW in what else 60.0)
    line = str(caught.value)
    assert what in line and "\n" not in line and caught.value.key == "tasks.kind"
    number = next(n for n, text in enumerate(TASK.splitlines(), 1) if f"# {mark}" in text)
    if "return" not in harm:
        assert f"(mine.py, line {number}, in " in line, line


def test_what_is_right_passes_and_a_helper_is_named_with_its_method(tmp_path: Path) -> None:
    right = checked(tmp_path, TASK)
    assert right.shown == "32 references score 1, 32 shuffled ones less"
    assert right.warning == "40 of 40 held-out prompts are trained on"
    with pytest.raises(RecipeError, match=r"line 28, in helped, from solution\)"):
        checked(tmp_path, TASK.replace("  # helper", " + None"))
