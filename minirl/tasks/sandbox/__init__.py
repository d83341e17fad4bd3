"""Where code that a model wrote is run: no network, no files but a scratch folder, bounded in time,
memory, threads and output, and nothing of it is left afterwards. docs/sandbox.md says what is
guaranteed, and how.

Takes code and what goes into it, gives what came out. Which output is right is never handed in.

__init__.py   this side: starts a jail, sends jobs, hears outcomes
jail.py       the other side: a script that builds the walls and runs the code behind them
syscalls.py   the system calls that code may not make
"""

import base64
import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from minirl.tasks.sandbox.syscalls import filter_for

GRACE_S = 5.0  # past the total time, for a jail that should have ended by itself
MAX_FRAME = 2**26
HEAD_BYTES = 32_768  # of an answer, beside the output: status and the tail of stderr, as JSON
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


class SandboxFailed(Exception):
    """The sandbox, not the code in it: never a reward of 0."""


@dataclass(frozen=True)
class Limits:
    cpu_s: int = 2  # of one run
    wall_s: float = 8.0  # of one run; more than cpu_s, since a busy machine is not the code's fault
    total_s: float = 8.0  # of a sandbox, all runs together
    memory_bytes: int = 2**29
    output_bytes: int = 2**20
    scratch_bytes: int = 2**24
    num_files: int = 256
    num_threads: int = 16


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


class Sandbox:
    """One jail, for the runs of one answer: they share the scratch folder and nothing else."""

    def __init__(self, limits: Limits, is_isolated: bool = True, is_filtered: bool = True):
        """`is_isolated=False` is the fallback without namespaces, which a recipe must ask for;
        `is_filtered=False` is for tests: namespaces must hold without the filter too."""
        self.limits = limits
        self._end = time.monotonic() + limits.total_s
        self._cleanup = contextlib.ExitStack()
        scratch = ""
        if not is_isolated:
            scratch = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="minirl-"))
        program = filter_for(os.uname().machine) if is_filtered else b""
        settings = {
            **asdict(limits),
            "parent": os.getpid(),
            "is_isolated": is_isolated,
            "scratch": scratch,
            "libraries": libraries(),
            "filter": base64.b64encode(program).decode(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(Path(__file__).parent / "jail.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_environment(scratch or "/scratch"),
            start_new_session=True,
        )
        try:
            self._send(settings)
            self._hear()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str, stdin: str = "", call: Call | None = None) -> Outcome:
        job: dict[str, Any] = {"code": code, "stdin": stdin}
        if call is not None:
            job |= {"function": call.function, "arguments": call.arguments}
        try:
            self._send(job)
            head, output = self._hear()
        except SandboxFailed:
            if time.monotonic() < self._end:
                raise
            return Outcome("total time", b"")
        return Outcome(head["status"], output, head["stderr"])

    def close(self) -> None:
        """Returns when nothing of it is left."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(max(0.0, self._end - time.monotonic()) + GRACE_S)
        except subprocess.TimeoutExpired:  # its init dies with it, and all the others with that
            process.kill()
            process.wait()
        process.stdout.close()
        self._cleanup.close()

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        if len(body) > MAX_FRAME:
            raise SandboxFailed(f"a test of {len(body):,} bytes is too large")
        left = memoryview(struct.pack(">I", len(body)) + body)
        assert self._process.stdin is not None
        try:
            while left:
                left = left[self._process.stdin.write(left) or 0 :]
        except BrokenPipeError:
            raise SandboxFailed("the jail ended") from None

    def _hear(self) -> tuple[dict[str, Any], bytes]:
        (size,) = struct.unpack(">I", self._read(4))
        if size > self.limits.output_bytes + HEAD_BYTES:
            raise SandboxFailed("the jail says too much")
        head, _, output = self._read(size).partition(b"\n")
        try:
            said = json.loads(head)
            if "error" in said:
                raise SandboxFailed(str(said["error"]))
        except (ValueError, TypeError):
            raise SandboxFailed("the jail says nonsense") from None
        return said, output

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        parts = bytearray()
        while len(parts) < count:
            left = self._end + GRACE_S - time.monotonic()
            if not select.select([self._process.stdout], [], [], max(0.0, left))[0]:
                raise SandboxFailed("the jail does not answer")
            part = self._process.stdout.read(count - len(parts))
            if not part:
                raise SandboxFailed("the jail ended")
            parts += part
        return bytes(parts)


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
    """What Python needs to import its standard library: seen inside, read-only."""
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
print(os.listdir("/scratch"), os.path.exists("/proc"), os.path.exists("/etc/passwd"),
      fails(open, "/x", "w"), fails(socket.socket), fails(os.fork), len(input()))
"""
TRIAL_OUTPUT = b"[] False False True True True 5\n"


@cache
def why_not() -> str:
    """Why there is no sandbox on this machine; "" where it works, which is tried."""
    if sys.platform != "linux":
        return "it needs Linux"
    if not filter_for(machine := os.uname().machine):
        return f"it knows no system calls of {machine}"
    try:
        with Sandbox(Limits()) as box:
            outcome = box.run(TRIAL, "right")
    except (SandboxFailed, OSError) as failure:
        return str(failure)
    if outcome.status or outcome.output != TRIAL_OUTPUT:
        return f"a trial gave {outcome.status or outcome.output!r} {outcome.stderr[-200:]}".strip()
    return ""
