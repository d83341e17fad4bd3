"""Where code that a model wrote is run: no network, no files but a scratch folder, bounded in time,
memory, threads and output, and nothing of it is left afterwards. docs/sandbox.md says what is
guaranteed, and how.

Takes code and its input, gives what came out. Each run is one process, which confines itself
(jail.py) before it sees the code and can start no other; this side reads its output, watches what
no rlimit bounds, and kills it.

Leaves out: which output is right. That is never handed in.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from signal import SIGKILL, SIGXCPU
from typing import Any

START_S = 60.0  # until the limits are in force; a machine may be busy
TICK_S = 0.02  # between two looks at threads and scratch folder
STDERR_BYTES = 2000
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
JAIL = Path(__file__).with_name("jail.py")


class SandboxFailed(Exception):
    """The sandbox, not the code in it: never a reward of 0."""


@dataclass(frozen=True)
class Limits:
    """Of one run."""

    cpu_s: int = 2
    wall_s: float = 8.0  # more than cpu_s, since a busy machine is not the code's fault
    memory_bytes: int = 2**29
    output_bytes: int = 2**20
    file_bytes: int = 2**20  # of one file in the scratch folder
    scratch_bytes: int = 2**24
    num_files: int = 256
    num_threads: int = 16
    max_abi: int = 99  # of Landlock: 0 runs without it (unsafe), an older one is for tests


@dataclass(frozen=True)
class Call:
    """Of a function of the code (or a method of its class Solution) with JSON arguments; what it
    returns comes out as JSON. Without a call, the code is a program that reads stdin."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    status: str  # "" if it ended well, else why not: "wall time", "CPU time", "exit code 1", …
    output: bytes
    stderr: str = ""  # the first of it, for a person


def run(code: str, stdin: str = "", call: Call | None = None, limits: Limits = Limits()) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="minirl-") as scratch:
        job = {
            **asdict(limits),
            **asdict(call or Call("", ())),
            "code": code,
            "stdin": stdin,
            "scratch": scratch,
            "libraries": libraries(),
            "parent": os.getpid(),
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(JAIL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=scratch,
            env=_environment(scratch),
            start_new_session=True,
        )
        with process:
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(json.dumps(job).encode())  # if it ended, its stderr says why
                return _watch(process, scratch, limits)
            finally:
                process.kill()


def _watch(process: subprocess.Popen[bytes], scratch: str, limits: Limits) -> Outcome:
    """Until the process ends, prints too much, takes too long or takes too much."""
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    heard = {out: bytearray(), err: bytearray()}
    room = {out: 1 + limits.output_bytes + 1, err: STDERR_BYTES}
    still_open, reason, deadline = [out, err], "", time.monotonic() + START_S
    is_confined = False
    is_over = False
    while not reason and not is_over:
        is_over = not still_open and process.poll() is not None  # a last look at its files
        left_s = max(0.0, deadline - time.monotonic())
        for fd in _ready(process, still_open, min(left_s, TICK_S)):
            if not (data := os.read(fd, 65536)):
                still_open.remove(fd)
            heard[fd] += data[: room[fd] - len(heard[fd])]
        if heard[out] and not is_confined:  # jail.READY comes before the code runs
            is_confined, deadline = True, time.monotonic() + limits.wall_s
        elif left_s == 0:
            reason = "wall time"
        elif len(heard[out]) == room[out]:
            reason = "output"
        else:
            reason = _excess(process.pid, scratch, limits)
    stderr = heard[err].decode(errors="replace")
    if not is_confined:
        raise SandboxFailed(stderr.strip() or "it did not start")
    output = bytes(heard[out][1 : 1 + limits.output_bytes])
    return Outcome(reason or _ending(process.wait()), output, stderr)


def _ready(process: subprocess.Popen[bytes], fds: list[int], limit_s: float) -> list[int]:
    """Those that can be read. Without any: waits for the process to end."""
    if fds:
        return select.select(fds, [], [], limit_s)[0]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    return []


def _excess(pid: int, scratch: str, limits: Limits) -> str:
    """What it has too much of, among the things that no rlimit bounds."""
    with contextlib.suppress(OSError):  # the process ends meanwhile, or removes a file
        sizes = [entry.stat().st_size for entry in os.scandir(scratch)]
        if len(sizes) > limits.num_files or sum(sizes) > limits.scratch_bytes:
            return "scratch folder"
        if len(os.listdir(f"/proc/{pid}/task")) > limits.num_threads:
            return "threads"
    return ""


def _ending(code: int) -> str:
    if code in (-SIGXCPU, -SIGKILL):
        return "CPU time"
    return f"signal {-code}" if code < 0 else f"exit code {code}" if code else ""


def _environment(home: str) -> dict[str, str]:
    """None of ours. Hashes are fixed, so that the same answer gives the same reward."""
    environment = {
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
    }
    if "LD_LIBRARY_PATH" in os.environ:  # this Python may not start without it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


@cache
def libraries() -> list[str]:
    """What Python needs to import its standard library: readable inside."""
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    own = [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib")]
    return sorted({*SYSTEM_LIBRARIES, *python, *own, "/etc/ld.so.cache"})


TRIAL = """
import os, socket
def fails(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return True
print(fails(os.listdir, "/"), fails(open, "/etc/passwd"), fails(open, "../x", "w"),
      fails(os.chmod, ".", 0o777), fails(socket.socket), fails(os.fork), len(input()))
"""
TRIAL_OUTPUT = b"True True True True True True 5\n"


@cache
def why_not() -> str:
    """Why there is no sandbox on this machine; "" where it works, which is tried."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        outcome = run(TRIAL, "right")
    except (SandboxFailed, OSError) as failure:
        return str(failure)
    if outcome.status or outcome.output != TRIAL_OUTPUT:
        return f"a trial gave {outcome.status or outcome.output!r} {outcome.stderr[-200:]}".strip()
    return ""
