"""The sandbox under attack: nothing gets out, nothing is left, and no attack passes a test."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attacks import ESCAPES, FUNCTIONS, PROGRAMS, SHORT, SMALL, World, world

import minirl
from minirl.tasks.sandbox import Call, Limits, SandboxFailed, run, why_not

HERE, ROOT = Path(__file__).parent, Path(minirl.__file__).parent.parent
pytestmark = pytest.mark.skipif("Landlock" in why_not(), reason="this kernel has no Landlock")
LONG = Limits(cpu_s=30, wall_s=60.0)


def test_it_works_here() -> None:
    assert why_not() == ""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as attacked:
        yield attacked
    for folder in ("/dev/shm", "/tmp"):
        assert not (Path(folder) / "was-here").exists()


@pytest.mark.parametrize("name", [*PROGRAMS, *FUNCTIONS])
def test_an_attack_is_contained_and_scores_nothing(attacked: World, name: str) -> None:
    assert attacked.got_away(name) == ""


def test_the_same_holds_where_landlock_is_old(attacked: World) -> None:
    """ABI 1 knows no truncation, no TCP, no ioctl, no signals, no abstract sockets."""
    assert [wrong for name in ESCAPES if (wrong := attacked.got_away(name, max_abi=1))] == []
    assert attacked.got_away("truncate a file", max_abi=2) == ""


def test_the_same_holds_in_a_container_that_allows_no_namespaces(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": f"{ROOT}:{HERE}"}
    done = subprocess.run(
        [sys.executable, str(HERE / "attacks.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **paths},
    )
    assert (done.stdout, done.returncode) == (f"done {os.getuid()}\n", 0), done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="the tests run unprivileged as it is")
def test_the_same_holds_for_an_unprivileged_user(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "as_nobody.py"), *list(ESCAPES)[::3], "fork bomb", "full disk"],
        capture_output=True,
        text=True,
        env={**os.environ, "MINIRL_ROOT": str(ROOT)},
    )
    assert (done.stdout, done.returncode) == ("done 65534\n", 0), done.stderr


def test_the_attacks_are_real(attacked: World) -> None:
    """Outside of the sandbox the same code does get what it is after."""
    names = ("ssh key", "internet socket", "abstract unix socket", "path socket", "chmod a file")
    names += ("its own environment", "half of a pair of sockets", "signal to the parent")
    for name in names:
        code = attacked.code(name).replace("0o777", "0o644")  # as it was
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "ESCAPED" in done.stdout, name


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("endless output", "output"),
        ("asleep for ever", "wall time"),
        ("segmentation fault", "signal 11"),
        ("32-bit calls", "signal 31"),
        ("memory bomb", "exit code 1"),
        ("full disk", "exit code 1"),
        ("full disk by many", "scratch folder"),
        ("many files", "scratch folder"),
        ("syntax error", "exit code 1"),
        ("exit early", ""),
    ],
)
def test_an_outcome_says_why(attacked: World, name: str, status: str) -> None:
    outcome, is_passed = attacked.attempt(name)
    assert outcome.status == status and not is_passed


def test_threads_are_counted(attacked: World) -> None:
    """A watcher that is late meets the memory limit."""
    assert attacked.attempt("thread bomb")[0].status in ("threads", "exit code 1")


def test_cpu_time_is_limited_however_long_the_wall_time() -> None:
    limits = Limits(cpu_s=1, wall_s=300.0)
    assert run(PROGRAMS["deaf to signals"], limits=limits).status == "CPU time"


def test_it_dies_with_the_process_that_started_it() -> None:
    program = (
        "from minirl.tasks.sandbox import *\n"
        "run('import time\\ntime.sleep(600)', limits=Limits(wall_s=600.0))"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        wait_until(lambda: len(children(parent.pid)) == 1)
        child = children(parent.pid)[0]
        wait_until(lambda: "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text())
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run("open('x', 'w').write('x')\nwhile True: pass", limits=SHORT)
    assert outcome.status == "wall time" and children(os.getpid()) == []
    assert list(tmp_path.iterdir()) == []


def test_ordinary_programs_run() -> None:
    def gives(code: str, stdin: str = "", call: Call | None = None) -> bytes:
        return run(code, stdin, call, LONG).output

    assert gives("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n") == b"3\n"
    assert gives("print(open(0).read())", "ü").decode() == "ü\n"
    threads = (
        "import sys, threading\nthreading.stack_size(2**26)\nsys.setrecursionlimit(10**5)\n"
        "def main():\n    print(input())\nthreading.Thread(target=main).start()"
    )
    assert gives(threads, "in a thread") == b"in a thread\n"
    files = "open('x', 'w').write('kept')\nos.rename('x', 'y')\nprint(open('y').read())"
    assert gives(f"import os\n{files}\nos.remove('y')\nprint(os.listdir())") == b"kept\n[]\n"
    temporary = "import tempfile\nwith tempfile.NamedTemporaryFile() as f:\n    f.write(b'x')\n"
    assert gives(f"{temporary}print(1)") == b"1\n"
    imports = "import numbers, decimal, fractions, heapq, re, random, datetime, zlib, ssl\n"
    assert gives(imports + "print(__name__)") == b"__main__\n"
    assert gives("print(len(input()))", "x" * 3_000_000) == b"3000000\n"
    dataclass = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\nprint(P(1))"
    )
    assert gives(dataclass) == b"P(x=1)\n"
    loop = "import asyncio\nasync def f(): return await asyncio.to_thread(int, 1)\n"
    assert gives(f"{loop}print(asyncio.run(f()))") == b"1\n"
    alarm = "import signal\nsignal.signal(14, lambda *_: print('rung'))\n"
    assert gives(f"{alarm}signal.raise_signal(14)\nsignal.alarm(1)\nsignal.pause()") == (
        b"rung\nrung\n"
    )
    method = "class Solution:\n    def add(self, a, b):\n        return (a, {'sum': a + b})"
    assert gives(method, call=Call("add", (1, 2))) == b'[1, {"sum": 3}]'
    assert gives("def f():\n    print('noise')\n    return 1", call=Call("f", ())) == b"1"
    hashes = "print(list({'a', 'b', 'c', 'd', 'e'}))"
    assert gives(hashes) == gives(hashes)


def test_a_sandbox_that_cannot_be_built_is_a_failure_and_no_outcome() -> None:
    with pytest.raises(SandboxFailed):
        run("print(1)", limits=Limits(memory_bytes=2**80))


def test_without_landlock_all_but_files_still_holds(attacked: World) -> None:
    names = [name for name in ESCAPES if name.startswith(("signal", "chmod", "truncate"))]
    names += ["internet socket", "path socket", "a shell", "daemon", "process_vm_readv", "keyctl"]
    assert [wrong for name in names if (wrong := attacked.got_away(name, max_abi=0))] == []
    assert run(PROGRAMS["fork bomb"], limits=SMALL).status == "exit code 1"


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
