"""The code task: which answers pass, by which rule, and that the tests stay out of the sandbox."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import python

from minirl.config import Config, TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, StopReason
from minirl.tasks.code import Code, equal
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.sandbox import SandboxFailed, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no sandbox here: {why_not()}")
ADD = {
    "prompt": "Print the sum.",
    "tests": [{"stdin": f"{a} {b}\n", "stdout": f"{a + b}\n"} for a, b in ((1, 2), (3, 4), (0, 0))],
    "solution": "print(sum(map(int, input().split())))",
}
PAIR = {
    "prompt": "pair(x) gives x twice.",
    "tests": [{"call": "pair", "args": [x], "returns": [x, x]} for x in (1, "a", None, 0.1)],
    "solution": "def pair(x):\n    return x, x",
}


def task_of(folder: Path, **changes: Any) -> Code:
    return Code(TasksConfig(**{"kind": "code", "data": str(folder), "timeout_s": 60.0, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(ADD)}\n{json.dumps(PAIR)}\n")
    return folder


def score(task: Code, index: int, program: str, stop: StopReason = StopReason.STOP) -> float:
    text = f"Let me think.\n```python\n{program}\n```\n"
    return task.reward(task.train(index), Answer(text, stop, 10))


def test_the_built_in_problems_check_themselves() -> None:
    task = make_task(Config(tasks=TasksConfig(kind="code", timeout_s=60.0)))
    self_check(task, "code")
    assert task.num_train == 16 and len(task.heldout(99)) == 4


PROGRAMS = [
    (0, "a, b = map(int, input().split())\nprint(a + b, end='  \\n\\n')", 1.0),
    (0, "print(sum(map(int, input().split())))\nraise SystemExit(0)", 1.0),
    (0, "print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
    (0, "print(sum(map(int, input().split())))\nopen('/etc/passwd')", 0.0),
    (0, "print('the sum is', sum(map(int, input().split())))", 0.0),
    (0, "if __name__ == '__main__':\n    print(sum(map(int, input().split())))", 1.0),
    (0, "print(3)", 0.0),  # one test of three
    (0, f"s = '```'\n{ADD['solution']}", 1.0),
    (0, f"{ADD['solution']}\n```\nor\n```py\r\nprint(3)", 0.0),  # the last block counts
    (0, f"print(3)\n```\nor\n```python\n{ADD['solution']}\n```\nor\n```\nx = 1", 1.0),
    (1, "def pair(x):\n    return [x, x]", 1.0),
    (1, "def pair(x):\n    print(x)\n    return x, x", 1.0),
    (1, "class Solution:\n    def pair(self, x):\n        return [x] * 2", 1.0),
    (1, "pair = lambda x: [x, x + 1e-9] if x == 0.1 else [x, x]", 1.0),
    (1, "def pair(x):\n    return {x}", 0.0),
    (1, "def pair(x):\n    return str([x, x])", 0.0),
    (1, "def pears(x):\n    return x, x", 0.0),
]


def test_programs_and_functions(folder: Path) -> None:
    task = task_of(folder)
    for index, program, reward in PROGRAMS:
        assert score(task, index, program) == reward, program
    assert score(task, 0, ADD["solution"], StopReason.LENGTH) == 0.0
    for text in ("no code", f"```\n{ADD['solution']}\n```", f"```python\n{ADD['solution']}"):
        assert task.reward(task.train(0), Answer(text, StopReason.STOP, 10)) == 0.0, text
    slow = task_of(folder, timeout_s=1.0)
    assert score(slow, 0, "import time\ntime.sleep(60)") == 0.0, "wrong, and no failure"
    task.limits = replace(task.limits, memory_bytes=2**80)
    with pytest.raises(SandboxFailed):  # a sandbox that fails is no reward
        score(task, 0, ADD["solution"])


EQUAL = [(3, 3), (3.0, 3), (0.30000000000000004, 0.3), (3, 3.0), ([1, [2.0, 3]], [1, [2, 3]])]
EQUAL += [({"a": [0.1]}, {"a": [0.1000000001]}), (None, None)]
DIFFERENT = [(0.3001, 0.3), (10**400, 1.0), (float("nan"), 1.0), ("3", 3), ([1, 2], [1, 2, 3])]
DIFFERENT += [([1, 2], [2, 1]), ({"a": 1}, {"a": 1, "b": 2}), (0, None), ([], {})]


def test_equality() -> None:
    assert all(equal(*pair) for pair in EQUAL) and not any(equal(*pair) for pair in DIFFERENT)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "x", "tests": []}', "tests of one form are needed"),
        ('{"prompt": "x", "tests": [{"stdin": "1"}]}', "KeyError: 'stdout'"),
        ('{"prompt": "x", "tests": [{"call": "a b", "args": []}]}', "must be a name"),
        ('{"prompt": "x", "tests": [{"stdin": "1", "stdout": "2"}]}', '"solution"'),
    ],
)
def test_a_bad_row_is_one_line(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ADD) + f"\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        task_of(tmp_path)
    assert caught.value.key == "tasks.data" and why in str(caught.value)
    assert "train.jsonl, row 2" in str(caught.value) and "\n" not in str(caught.value)


def test_where_there_is_no_landlock_code_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "code.toml"
    recipe.write_text('[tasks]\nkind = "code"\n[devices]\nkind = "cpu"\n')
    program = "import attacks\nattacks.enter_container(444)\nfrom minirl.cli import main\nmain()"
    arguments = ("train", str(recipe), "--run-dir", str(tmp_path / "run"))
    done = python("-c", program, *arguments, cwd=Path(__file__).parent)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert 'tasks.kind = "code": code cannot be sandboxed here (Landlock: Func' in done.stderr
