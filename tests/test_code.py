"""The code task: which answers pass, by which rule, and that the tests stay out of the sandbox."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import crew
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import minirl
from minirl.config import Config, TasksConfig
from minirl.devices import Placement
from minirl.errors import RecipeError
from minirl.records import Answer, StopReason, Trajectory
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.code import Code, equal, extract
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.sandbox import SandboxFailed, why_not
from minirl.tasks.verifier import Grade, Graded, VerifierSetup
from minirl.workers import Role

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


def config_of(**changes: Any) -> TasksConfig:
    return TasksConfig(**{"kind": "code", "timeout_s": 60.0, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    for name in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in (ADD, PAIR))
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def score(task: Code, index: int, program: str, stop: StopReason = StopReason.STOP) -> float:
    text = f"Let me think.\n```python\n{program}\n```\n"
    return task.reward(task.train(index), Answer(text, stop, 10))


def test_the_built_in_problems_check_themselves() -> None:
    task = make_task(replace(Config(), tasks=config_of()))
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
    (1, "def pair(x):\n    return [x, x]", 1.0),
    (1, "def pair(x):\n    print(x)\n    return x, x", 1.0),
    (1, "class Solution:\n    def pair(self, x):\n        return [x] * 2", 1.0),
    (1, "pair = lambda x: [x, x + 1e-9] if x == 0.1 else [x, x]", 1.0),
    (1, "def pair(x):\n    return {x}", 0.0),
    (1, "def pair(x):\n    return str([x, x])", 0.0),
    (1, "def pears(x):\n    return x, x", 0.0),
]


def test_programs_and_functions(folder: Path) -> None:
    task = Code(config_of(data=str(folder)))
    for index, program, reward in PROGRAMS:
        assert score(task, index, program) == reward, program
    assert score(task, 0, ADD["solution"], StopReason.LENGTH) == 0.0
    slow = Code(config_of(data=str(folder), timeout_s=1.0))
    assert score(slow, 0, "import time\ntime.sleep(60)") == 0.0, "wrong, and no failure"
    task.limits = replace(task.limits, memory_bytes=2**80)
    with pytest.raises(SandboxFailed):  # a sandbox that fails is no reward
        score(task, 0, ADD["solution"])


def test_the_last_closed_python_block_counts() -> None:
    assert extract("no code") is None and extract("```\nx = 1\n```") is None
    assert extract("```python\nx = 1\n```\nor\n```python\nx = 2\n```\nand ```x```") == "x = 2\n"
    assert extract("```python\nx = 1\n```\n```python\nx = 2") == "x = 1\n"
    assert extract("```py\r\nx = 1\n```") == "x = 1\n"
    assert extract('```python\ns = "```"\n```') == 's = "```"\n'


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
        Code(config_of(data=str(tmp_path)))
    assert caught.value.key == "tasks.data" and why in str(caught.value)
    assert "train.jsonl, row 2" in str(caught.value) and "\n" not in str(caught.value)


def test_a_real_verifier_grades_code(folder: Path, tmp_path: Path) -> None:
    programs = [ADD["solution"], "print(3)", "x = [0] * 10**12", "while True: pass", "1 / 0"]
    texts = [f"```python\n{program}\n```" for program in programs]
    words = {text: i for i, text in enumerate(texts)}
    Tokenizer(WordLevel(words, unk_token=texts[0])).save(str(tmp_path / "tokenizer.json"))
    ring = TrajectoryRing(num_cells=len(texts), cell_tokens=4)
    tasks = config_of(data=str(folder), options={"test_s": 0.2}, memory_gib=1.0)
    setup = VerifierSetup(replace(Config(), tasks=tasks), str(tmp_path), ring)
    with crew(tmp_path / "logs", 1) as inbox:
        body = "minirl.tasks.verifier:run"
        verifier = inbox.workers.spawn(Role.VERIFY, 0, body, setup, Placement("cpu"))
        for cell in range(len(texts)):
            ring.write(cell, 7, [0], [cell], [-1.0], [0])
        answers = [Trajectory(i, 2, 1, StopReason.STOP, 0, 0) for i in range(len(texts))]
        verifier.send(Grade(7, Code(tasks).train(0), tuple(answers)))
        graded = inbox.take(verifier, Graded)
    assert graded == Graded(7, (1.0, 0.0, 0.0, 0.0, 0.0), tuple(texts))


def without_landlock(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    start = "import sys, attacks\nattacks.enter_container(444)\n"
    return subprocess.run(
        [sys.executable, "-c", start + program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{Path(minirl.__file__).parent.parent}:{here}"},
    )


def test_where_there_is_no_landlock_code_is_refused_unless_the_recipe_says_so(
    folder: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "code.toml"
    recipe.write_text('[tasks]\nkind = "code"\n[devices]\nkind = "cpu"\n')
    train = ("train", str(recipe), "--run-dir", str(tmp_path / "run"))
    done = without_landlock("from minirl.cli import main\nmain()", *train)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "tasks.options.unsafe = false: code cannot be sandboxed here" in done.stderr
    assert "Landlock: Function not implemented" in done.stderr
    program = (
        "from test_code import ADD, Code, config_of, score\n"
        "task = Code(config_of(data=sys.argv[1], options={'unsafe': True}))\n"
        "print(*(score(task, 0, code) for code in (ADD['solution'], 'print(3)', '1 / 0')))"
    )
    done = without_landlock(program, str(folder))
    assert done.stdout == "1.0 0.0 0.0\n", done.stderr
