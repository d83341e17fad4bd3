"""The sandbox under attack: nothing gets out, nothing is left, and no attack passes a test."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import FUNCTIONS, PROGRAMS, SHORT, SMALL, WITHOUT_FILTER, World, world

import minirl
from minirl.tasks.sandbox import Call, Limits, Sandbox, SandboxFailed, why_not

pytestmark = pytest.mark.skipif(
    bool(why_not()) and "Operation not permitted" in why_not(),
    reason="this kernel gives no namespaces to this user",
)
SHARED = ("/dev/shm", "/tmp")


def test_it_works_here() -> None:
    assert why_not() == ""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as attacked:
        yield attacked
    for folder in SHARED:
        assert not (Path(folder) / "was-here").exists()


def test_there_are_many_attacks() -> None:
    assert len(PROGRAMS) + len(FUNCTIONS) >= 90


@pytest.mark.parametrize("name", [*PROGRAMS, *FUNCTIONS])
def test_an_attack_is_contained_and_scores_nothing(attacked: World, name: str) -> None:
    assert attacked.got_away(name) == ""


@pytest.mark.parametrize("name", WITHOUT_FILTER)
def test_namespaces_hold_without_the_filter(attacked: World, name: str) -> None:
    assert attacked.got_away(name, is_filtered=False) == ""


def test_the_attacks_are_real(attacked: World, tmp_path: Path) -> None:
    """Outside of the sandbox the same code does get what it is after."""
    for name in ("ssh key", "internet socket", "abstract unix socket", "its own environment"):
        code = PROGRAMS[name]
        for word, value in attacked.words.items():
            code = code.replace(f"@{word}@", value)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "ESCAPED" in done.stdout, name


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("endless output", "output"),
        ("asleep for ever", "wall time"),
        ("segmentation fault", "signal 11"),
        ("memory bomb", "exit code 1"),
        ("full disk", "exit code 1"),
        ("many files", "exit code 1"),
        ("syntax error", "exit code 1"),
        ("exit early", ""),
    ],
)
def test_an_outcome_says_why(attacked: World, name: str, status: str) -> None:
    outcome, is_passed = attacked.attempt(name)
    assert outcome.status == status and not is_passed


def test_cpu_time_is_limited_however_long_the_wall_time() -> None:
    limits = Limits(cpu_s=1, wall_s=300.0, total_s=300.0)
    with Sandbox(limits) as box:
        outcome = box.run(PROGRAMS["deaf to signals"])
    assert outcome.status == "CPU time"


def test_what_ends_ends_at_once_and_whole() -> None:
    """Without the filter, so that there is something to end: a daemon that closed everything."""
    code = PROGRAMS["daemon"] + "\nimport time\ntime.sleep(0.3)"
    with Sandbox(SMALL, is_filtered=False) as box:
        supervisor = box._process.pid
        init = children(supervisor)[0]
        before = namespace(init)
        box.run(code)
        assert children(init) == []
        assert box.run("print(input())", "next").output == b"next\n"
    assert not Path(f"/proc/{supervisor}").exists() and not Path(f"/proc/{init}").exists()
    assert before not in namespaces()


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, threading\nfrom minirl.tasks.sandbox import *\n"
        "box = Sandbox(Limits(wall_s=60, total_s=60))\nprint(box._process.pid, flush=True)\n"
        "box.run('import time\\ntime.sleep(60)')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        supervisor = int(parent.stdout.readline())
        wait_until(lambda: bool(children(children(supervisor)[0])))  # a worker is at it
        space = namespace(children(supervisor)[0])
        parent.kill()
    wait_until(lambda: space not in namespaces() and not Path(f"/proc/{supervisor}").exists())


def test_total_time_ends_a_sandbox_with_many_tests() -> None:
    started = time.monotonic()
    with Sandbox(Limits(wall_s=60.0, total_s=1.0)) as box:
        statuses = [box.run("import time\ntime.sleep(60)").status for _ in range(3)]
    assert statuses == ["total time"] * 3
    assert time.monotonic() - started < 10


def test_ordinary_programs_run() -> None:
    with Sandbox(Limits(wall_s=60.0, total_s=120.0)) as box:
        run = box.run
        assert run("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n").output == b"3\n"
        assert run("print(open(0).read())", "ü").output.decode() == "ü\n"
        threads = (
            "import sys, threading\nthreading.stack_size(2**26)\nsys.setrecursionlimit(10**5)\n"
            "def main():\n    print(input())\nthreading.Thread(target=main).start()"
        )
        assert run(threads, "in a thread").output == b"in a thread\n"
        assert run("open('x', 'w').write('kept')\nprint(open('x').read())").output == b"kept\n"
        imports = "import numbers, decimal, fractions, heapq, re, random, datetime, zlib, ssl\n"
        assert run(imports + "print(__name__)").output == b"__main__\n"
        large = "x" * 3_000_000
        assert run("print(len(input()))", large).output == b"3000000\n"
        dataclass = (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass P:\n    x: int\nprint(P(1))"
        )
        assert run(dataclass).output == b"P(x=1)\n"
        assert run("import asyncio\nasync def f(): return 1\nprint(asyncio.run(f()))").status == ""
        method = "class Solution:\n    def add(self, a, b):\n        return (a, {'sum': a + b})"
        assert run(method, call=Call("add", (1, 2))).output == b'[1, {"sum": 3}]'
        assert run("def f():\n    print('noise')\n    return 1", call=Call("f", ())).output == b"1"


def test_hashes_are_the_same_each_time() -> None:
    outputs = set()
    for _ in range(2):
        with Sandbox(Limits()) as box:
            outputs.add(box.run("print(list({'a', 'b', 'c', 'd', 'e'}))").output)
    assert len(outputs) == 1


def test_a_sandbox_that_cannot_be_built_is_a_failure_and_no_outcome() -> None:
    with pytest.raises(SandboxFailed, match="mount"):
        Sandbox(Limits(scratch_bytes=-1))
    with Sandbox(Limits(memory_bytes=2**80)) as box, pytest.raises(SandboxFailed, match="Over"):
        box.run("print(1)")


def test_limits_hold_in_the_fallback_too() -> None:
    with Sandbox(SHORT, is_isolated=False) as box:
        assert box.run(PROGRAMS["asleep for ever"]).status == "wall time"
    with Sandbox(SMALL, is_isolated=False) as box:
        scratch = Path(box.run("import os\nprint(os.getcwd())").output.decode().strip())
        assert scratch.is_dir()
        assert box.run(PROGRAMS["fork bomb"]).status == "exit code 1"
        assert box.run("import socket\nsocket.socket()").status == "exit code 1"
        assert box.run(PROGRAMS["its own environment"]).output.startswith(b"no")
    assert not scratch.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="the tests run unprivileged as it is")
def test_the_same_holds_for_an_unprivileged_user(tmp_path: Path) -> None:
    """As nobody, with a Python and a minirl that nobody may read: bound in a namespace of its own,
    since root's may be out of reach."""
    attacks = (
        *("fork bomb", "daemon", "ssh key", "shadow", "internet socket", "abstract unix socket"),
        *("setuid", "ptrace the parent", "kill the parent", "the standard library", "mount"),
        *("memory bomb", "asleep for ever", "full disk", "garbage collector", "equal to all"),
    )
    program = Path(__file__).parent / "as_nobody.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), *attacks],
        capture_output=True,
        text=True,
        env={**os.environ, "MINIRL_ROOT": str(Path(minirl.__file__).parent.parent)},
    )
    assert (done.stdout, done.returncode) == ("done 65534\n", 0), done.stderr


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def namespace(pid: int) -> str:
    """Of PIDs; "-" for a process that one may not look into."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return "-"


def namespaces() -> set[str]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {namespace(pid) for pid in pids} - {"-"}


def wait_until(is_so: object, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if is_so():  # type: ignore[operator]
                return
        except (OSError, IndexError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.02)
