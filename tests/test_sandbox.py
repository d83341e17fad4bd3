"""The sandbox under attack: nothing gets out, nothing is left, and no attack passes a test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import ESCAPES, FUNCTIONS, NOBODY, PROGRAMS, SHORT, World, world
from crew import wait_until
from test_cli import python

from minirl.tasks.sandbox import Limits, SandboxFailed, run, why_not

pytestmark = pytest.mark.skipif("Landlock" in why_not(), reason="this kernel has no Landlock")
LONG = Limits(cpu_s=30, wall_s=60.0)
STATUS = {
    **dict.fromkeys(("endless output", "memory bomb", "full disk", "syntax error"), "exit code 1"),
    **dict.fromkeys(("full disk by many", "many files"), "scratch folder"),
    **{"segmentation fault": "exit code -11", "32-bit calls": "exit code -31", "exit early": ""},
    "asleep for ever": "wall time",
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as attacked:
        yield attacked
    for folder in ("/dev/shm", "/tmp"):
        assert not (Path(folder) / "was-here").exists()


@pytest.mark.parametrize("name", [*PROGRAMS, *FUNCTIONS])
def test_an_attack_is_contained_and_scores_nothing(attacked: World, name: str) -> None:
    assert why_not() == "" and attacked.got_away(name) == ""


def test_the_same_holds_where_landlock_is_old(attacked: World) -> None:
    """ABI 1 knows no truncation, no TCP, no ioctl, no signals, no abstract sockets."""
    assert [wrong for name in ESCAPES if (wrong := attacked.got_away(name, max_abi=1))] == []


@pytest.mark.parametrize("uid", [os.getuid(), NOBODY])
def test_the_same_holds_in_a_container_and_for_an_unprivileged_user(
    tmp_path: Path, uid: int
) -> None:
    """Both first give up namespaces and mounts."""
    if uid != os.getuid() != 0:
        pytest.skip("the tests run unprivileged as it is")
    some = ("--nobody", *list(ESCAPES)[::3], "fork bomb", "full disk")
    names = (str(tmp_path),) if uid == os.getuid() else some
    done = python(str(Path(__file__).parent / "attacks.py"), *names)
    assert (done.stdout, done.returncode) == (f"done {uid}\n", 0), done.stderr


def test_the_attacks_are_real(attacked: World) -> None:
    """Outside of the sandbox the same code does get what it is after."""
    names = ("ssh key", "internet socket", "abstract unix socket", "path socket", "chmod a file")
    names += ("its own environment", "half of a pair of sockets", "signal to the parent")
    for name in names:
        code = attacked.code(name).replace("0o777", "0o644")  # as it was
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "ESCAPED" in done.stdout, name


def test_an_outcome_says_why(attacked: World) -> None:
    assert {name: attacked.attempt(name)[0].status for name in STATUS} == STATUS
    # A late watcher meets the memory limit.
    assert attacked.attempt("thread bomb")[0].status in ("threads", "exit code 1")
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
    fds, before = len(os.listdir("/proc/self/fd")), children(os.getpid())
    outcome = run("open('x', 'w').write('x')\nwhile True: pass", limits=SHORT)
    assert outcome.status == "wall time" and children(os.getpid()) == before
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(SandboxFailed):  # it cannot be built: a failure, and no outcome
        run("print(1)", limits=Limits(memory_bytes=2**80))


ORDINARY = [
    ("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n", "3\n"),
    ("print(open(0).read())", "ü", "ü\n"),
    ("import sys, threading\nthreading.stack_size(2**26)\nsys.setrecursionlimit(10**5)\n"
     "threading.Thread(target=lambda: print(input())).start()", "in a thread", "in a thread\n"),
    ("import os\nopen('x', 'w').write('kept')\nos.rename('x', 'y')\nprint(open('y').read())\n"
     "os.remove('y')\nprint(os.listdir())", "", "kept\n[]\n"),
    ("import tempfile\nwith tempfile.TemporaryFile() as f:\n    print(f.write(b'x'))", "", "1\n"),
    ("import numbers, decimal, fractions, heapq, re, random, datetime, zlib, ssl\nprint(__name__)",
     "", "__main__\n"),
    ("print(len(input()))", "x" * 3_000_000, "3000000\n"),
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n"
     "@dataclass\nclass P:\n    x: int\nprint(P(1))", "", "P(x=1)\n"),
    ("import asyncio\nasync def f(): return await asyncio.to_thread(int, 1)\n"
     "print(asyncio.run(f()))", "", "1\n"),
    ("import signal\nsignal.signal(14, lambda *_: print('rung'))\nsignal.raise_signal(14)\n"
     "signal.alarm(1)\nsignal.pause()", "", "rung\nrung\n"),
]  # fmt: skip


def test_ordinary_programs_run() -> None:
    for code, stdin, output in ORDINARY:
        assert run(code, stdin, limits=LONG).output.decode() == output
    hashes = "print(list({'a', 'b', 'c', 'd', 'e'}))"
    assert run(hashes).output == run(hashes).output


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
