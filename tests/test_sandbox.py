"""The sandbox under attack: nothing gets out, nothing is left, and no attack passes a test."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import ESCAPES, FUNCTIONS, NOBODY, PROGRAMS, SHORT, World, world
from cases import cases, refused
from processes import wait_until
from test_cli import python

from minirl.config import Config, TasksConfig
from minirl.records import Answer, StopReason
from minirl.tasks import code, sandbox
from minirl.tasks.code import Code, equal
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.sandbox import Limits, SandboxFailed, run, why_not
from tests.soak.controller_process import children

pytestmark = pytest.mark.skipif("Landlock" in why_not(), reason="this kernel has no Landlock")
LONG = Limits(cpu_s=30, wall_s=60.0)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as attacked:
        yield attacked
    for folder in ("/dev/shm", "/tmp"):
        assert not (Path(folder) / "was-here").exists()


@pytest.mark.parametrize("name", [*PROGRAMS, *FUNCTIONS])
def test_an_attack_is_contained_and_scores_nothing(attacked: World, name: str) -> None:
    assert why_not() == "" and attacked.got_away(name) == ""


def test_the_same_holds_where_landlock_is_old(
    attacked: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ABI 1 knows no truncation, no TCP, no ioctl, no signals, no abstract sockets."""
    jail = Path(sandbox.JAIL).read_text()
    assert jail.count("abi = ") == 1
    (tmp_path / "jail.py").write_text(jail.replace("abi = ", "abi = 1 or "))
    monkeypatch.setattr(sandbox, "JAIL", str(tmp_path / "jail.py"))
    assert [wrong for name in ESCAPES if (wrong := attacked.got_away(name))] == []


@pytest.mark.parametrize("uid", [os.getuid(), NOBODY])
def test_the_same_holds_in_a_container_and_for_another_user(tmp_path: Path, uid: int) -> None:
    """Both first give up namespaces and mounts."""
    if uid != os.getuid() != 0:
        pytest.skip("the tests run unprivileged as it is")
    some = ("--nobody", *list(ESCAPES)[::3], "fork bomb", "full disk")
    names = (str(tmp_path),) if uid == os.getuid() else some
    done = python(str(Path(__file__).parent / "attacks.py"), *names)
    assert (done.stdout, done.returncode) == (f"done {uid}\n", 0), done.stderr


def test_the_attacks_are_real(attacked: World) -> None:
    """Outside of the sandbox the same code does get what it is after."""
    for name in (
        *("ssh key", "internet socket", "abstract unix socket", "path socket", "chmod a file"),
        *("its own environment", "half of a pair of sockets", "signal to the parent"),
    ):
        code = attacked.code(name).replace("0o777", "0o644")  # as it was
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "ESCAPED" in done.stdout, name


def test_an_outcome_says_why(attacked: World) -> None:
    for name, status in (case.values() for case in cases("outcomes")):
        assert attacked.attempt(name)[0].status == status, name
    # A late watcher meets the memory limit.
    assert attacked.attempt("thread bomb")[0].status in ("threads", "exit code 1")
    limits = Limits(cpu_s=1, wall_s=300.0)
    assert run(PROGRAMS["deaf to signals"], limits=limits).status == "CPU time"
    assert run("import os\nos.kill(os.getpid(), 9)").status == "exit code 1"


def test_a_kill_from_outside_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = sandbox._watch
    monkeypatch.setattr(sandbox, "_watch", lambda p, *rest: p.kill() or watch(p, *rest))
    with pytest.raises(SandboxFailed, match="from outside"):
        run("import time\ntime.sleep(600)", limits=LONG)


def test_it_dies_with_the_process_that_started_it() -> None:
    code = "run('import time\\ntime.sleep(600)', limits=Limits(wall_s=600.0))"
    program = f"from minirl.tasks.sandbox import *\n{code}"
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        wait_until(lambda: len(children(parent.pid)) == 1)
        child = children(parent.pid)[0]
        wait_until(lambda: "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text())
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fds, before = len(os.listdir("/proc/self/fd")), children(os.getpid())
    outcome = run("open('x', 'w').write('x')\nwhile True: pass", limits=SHORT)
    assert outcome.status == "wall time" and children(os.getpid()) == before
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == fds


def test_ordinary_programs_run() -> None:
    for program, stdin, output in (case.values() for case in cases("ordinary_programs")):
        assert run(program, stdin, limits=LONG).output.decode() == output
    assert run("print(len(input()))", "x" * 3_000_000, limits=LONG).output == b"3000000\n"
    hashes = "print(list({'a', 'b', 'c', 'd', 'e'}))"
    assert run(hashes).output == run(hashes).output


# The code task: which answers pass, and that the tests stay out of the sandbox --------------------

ADD, PAIR = cases("code_problems")


def task_of(problems: Path, timeout_s: float = 60.0) -> Code:
    return Code(TasksConfig(kind="code", data=str(problems), timeout_s=timeout_s))


def score(task: Code, index: int, program: str, stop: StopReason = StopReason.STOP) -> float:
    text = f"Let me think.\n```python\n{program}\n```\n"
    return task.reward(task.train(index), Answer(text, stop, 10))


def test_the_built_in_problems_check_themselves() -> None:
    task = make_task(Config(tasks=TasksConfig(kind="code", timeout_s=60.0)))
    self_check(task, "code")
    assert task.num_train == 16 and len(task.heldout(99)) == 4


def test_programs_and_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(ADD)}\n{json.dumps(PAIR)}\n")
    task = task_of(tmp_path)
    for case in cases("code_cases"):
        assert score(task, case["problem"], case["program"]) == case["reward"], case
    assert score(task, 0, ADD["solution"], StopReason.LENGTH) == 0.0
    for text in ("no code", f"```\n{ADD['solution']}\n```", f"```python\n{ADD['solution']}"):
        assert task.reward(task.train(0), Answer(text, StopReason.STOP, 10)) == 0.0, text
    slow = task_of(tmp_path, timeout_s=1.0)
    assert score(slow, 0, "import time\ntime.sleep(60)") == 0.0, "wrong, and no failure"
    task.limits = task.limits._replace(memory_bytes=2**80)
    with pytest.raises(SandboxFailed):  # a sandbox that fails is no reward
        score(task, 0, ADD["solution"])
    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=count(0, 99).__next__))
    with pytest.raises(TimeoutError, match="all tests together"):  # it may be right
        score(task_of(tmp_path), 0, ADD["solution"])


def test_equality() -> None:
    for one, other, is_equal in (case.values() for case in cases("equality")):
        assert equal(one, other) == is_equal, (one, other)


def test_a_bad_row_is_one_line(tmp_path: Path) -> None:
    for tests, why in (case.values() for case in cases("bad_tests")):
        row = f'{{"prompt": "x", "tests": {tests}}}'
        (tmp_path / "train.jsonl").write_text(f"{json.dumps(ADD)}\n{row}\n")
        with refused("tasks.data", why) as caught:
            task_of(tmp_path)
        assert "train.jsonl, row 2" in str(caught.value)


def test_where_there_is_no_landlock_code_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "code.toml"
    recipe.write_text('[tasks]\nkind = "code"\n[devices]\nkind = "cpu"\n')
    program = "import attacks\nattacks.enter_container(444)\nfrom minirl.cli import main\nmain()"
    arguments = ("train", str(recipe), "--run-dir", str(tmp_path / "run"))
    done = python("-c", program, *arguments, cwd=Path(__file__).parent)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert 'tasks.kind = "code": code cannot be sandboxed here (Landlock: Func' in done.stderr
