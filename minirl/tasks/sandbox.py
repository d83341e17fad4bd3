"""Where code that a model wrote is run: no network, no files but a scratch folder, bounded in time,
memory, threads and output, and nothing of it is left afterwards (docs/sandbox.md).

Takes code and its input, gives what came out. Each run is one process, which confines itself
(jail.py) before it sees the code and can start no other. Its output goes to files that its rlimits
bound; this side watches what no rlimit bounds, and kills it.

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
LIBRARIES = (  # what Python needs to import its standard library: readable inside
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *(f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"),
    *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
)
JAIL = Path(__file__).with_name("jail.py")


class SandboxFailed(Exception):
    """The sandbox, not the code in it: never a reward of 0."""


@dataclass(frozen=True)
class Limits:
    """Of one run."""

    cpu_s: int = 2
    wall_s: float = 8.0  # more than cpu_s, since a busy machine is not the code's fault
    memory_bytes: int = 2**29
    file_bytes: int = 2**20  # of the output, and of one file in the scratch folder
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
    job = {**asdict(limits), **asdict(call or Call("", ())), "code": code, "stdin": stdin}
    ready, ready_end = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="minirl-") as scratch,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        open(ready, "rb", buffering=0) as ready_pipe,
    ):
        job |= {"scratch": scratch, "libraries": LIBRARIES, "ready_fd": ready_end}
        with open(ready_end, "wb"):
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", str(JAIL), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=scratch,
                env=_environment(scratch),
                pass_fds=(ready_end,),
                start_new_session=True,
            )
        with process:
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(json.dumps(job).encode())  # if it ended, its stderr says why
                is_confined = select.select([ready], [], [], START_S)[0] and ready_pipe.read(1)
                status = _watch(process, scratch, limits) if is_confined else ""
            finally:
                process.kill()
        out.seek(0)
        err.seek(0)
        stderr = err.read(STDERR_BYTES).decode(errors="replace")
        if not is_confined:
            raise SandboxFailed(stderr.strip() or "it did not start")
        return Outcome(status, out.read(limits.file_bytes), stderr)


def _watch(process: subprocess.Popen[bytes], scratch: str, limits: Limits) -> str:
    """Waits until the process ends, takes too long or takes too much; "" where it ended well."""
    deadline = time.monotonic() + limits.wall_s
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TICK_S)
        if excess := _excess(process.pid, scratch, limits):
            return excess
        if (code := process.returncode) is not None:
            is_late = code in (-SIGXCPU, -SIGKILL)
            return "CPU time" if is_late else f"exit code {code}" if code else ""
    return "wall time"


def _excess(pid: int, scratch: str, limits: Limits) -> str:
    """What it has too much of, among the things that no rlimit bounds."""
    with contextlib.suppress(OSError):  # the process ends meanwhile, or removes a file
        sizes = [entry.stat().st_size for entry in os.scandir(scratch)]
        if len(sizes) > limits.num_files or sum(sizes) > limits.scratch_bytes:
            return "scratch folder"
        if len(os.listdir(f"/proc/{pid}/task")) > limits.num_threads:
            return "threads"
    return ""


def _environment(home: str) -> dict[str, str]:
    """None of ours. Hashes are fixed, so that the same answer gives the same reward."""
    python = {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    kept = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}  # Python may not start else
    return {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **python, **kept}


TRIAL = """
import os
for name, *arguments in (["listdir", "/"], ["open", "../x", 1], ["chmod", ".", 0o777], ["fork"]):
    try:
        print("not held:", name, getattr(os, name)(*arguments))
    except OSError:
        print(len(input()))
"""


@cache
def why_not() -> str:
    """Why there is no sandbox on this machine; "" where a trial shows that it works."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        outcome = run(TRIAL, "a\na\na\na\n")
    except (SandboxFailed, OSError) as failure:
        return str(failure)
    return "" if outcome == Outcome("", b"1\n" * 4) else f"a trial gave {outcome}"
