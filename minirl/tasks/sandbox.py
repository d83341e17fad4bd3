"""Runs code that a model wrote, confined and bounded (docs/sandbox.md): nothing of it is left.

Takes code and its input, gives its output. Each run is one process, which confines itself (jail.py)
before it runs the code; this side watches what no rlimit bounds.
Leaves out: which output is right. That is never handed in.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from signal import SIGKILL, SIGXCPU
from typing import Any, NamedTuple

START_S, TICK_S = 60.0, 0.02  # until the limits are in force; between two looks at its resources
LIBRARIES = (  # what Python needs to import its standard library: readable inside
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *(f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"),
)
# None of ours. Hashes are fixed, so that the same answer gives the same reward.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace", "LANG": "C.UTF-8"}
JAIL = os.path.join(os.path.dirname(__file__), "jail.py")


class SandboxFailed(Exception):
    """The sandbox, not the code in it: never a reward of 0."""


class Limits(NamedTuple):
    cpu_s: int = 2
    wall_s: float = 8.0  # more than cpu_s, since a busy machine is not the code's fault
    memory_bytes: int = 2**29
    file_bytes: int = 2**20  # of the output, and of one file in the scratch folder
    scratch_bytes: int = 2**24
    num_files: int = 256
    num_threads: int = 16


USUAL = Limits()


class Call(NamedTuple):
    function: str  # or a method of the class Solution
    arguments: tuple[Any, ...]  # JSON values


class Outcome(NamedTuple):
    status: str  # "" if it ended well, else why not: "wall time", "CPU time", "exit code 1", …
    output: bytes
    stderr: str = ""  # the first of it, for a person


def run(code: str, stdin: str = "", call: Call | None = None, limits: Limits = USUAL) -> Outcome:
    """Without a call, the code is a program that reads stdin."""
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="minirl-"))
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        control, inside = (stack.enter_context(end) for end in socket.socketpair())
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        job = {**limits._asdict(), **(call or Call("", ()))._asdict(), "code": code}
        options: dict[str, Any] = {"cwd": scratch, "stdin": given, "stdout": out, "stderr": err}
        options |= {"pass_fds": [inside.fileno()], "start_new_session": True}
        program = [sys.executable, "-P", "-s", "-S", "-B", JAIL, str(inside.fileno())]
        kept = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}  # Python may need it
        environment = {"HOME": scratch, "TMPDIR": scratch, **ENVIRONMENT, **kept}
        with subprocess.Popen(program, env=environment, **options) as process:
            try:
                inside.close()
                control.settimeout(START_S)
                is_confined = False
                with contextlib.suppress(OSError):  # it died, and stderr says why
                    job |= {"libraries": LIBRARIES, "scratch": scratch}
                    control.sendall(json.dumps(job).encode())
                    control.shutdown(socket.SHUT_WR)
                    is_confined = control.recv(1) == b"!"
                status = _watch(process, scratch, limits) if is_confined else ""
            finally:
                process.kill()
        stderr = os.pread(err.fileno(), 2000, 0).decode(errors="replace")
        if not is_confined:
            raise SandboxFailed(stderr.strip() or "it did not start")
        return Outcome(status, os.pread(out.fileno(), limits.file_bytes, 0), stderr)


def _watch(process: subprocess.Popen[bytes], scratch: str, limits: Limits) -> str:
    """Waits until the process ends, takes too long or takes too much; "" where it ended well."""
    deadline = time.monotonic() + limits.wall_s
    cpu_before_s = sum(os.times()[2:4])  # of all children that were waited for
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TICK_S)
        with contextlib.suppress(OSError):  # the process ends meanwhile, or removes a file
            sizes = [entry.stat().st_size for entry in os.scandir(scratch)]
            if len(sizes) > limits.num_files or sum(sizes) > limits.scratch_bytes:
                return "scratch folder"
            if len(os.listdir(f"/proc/{process.pid}/task")) > limits.num_threads:
                return "threads"
        if (code := process.returncode) is not None:
            # SIGKILL is the hard limit of one that is deaf to SIGXCPU. It cannot send it itself.
            is_late = code == -SIGXCPU or sum(os.times()[2:4]) - cpu_before_s >= limits.cpu_s
            if code == -SIGKILL and not is_late:
                raise SandboxFailed("it was killed from outside, perhaps by the OOM killer")
            return "CPU time" if code and is_late else f"exit code {code}" if code else ""
    return "wall time"


@cache
def why_not() -> str:
    """Why there is no sandbox on this machine; "" where a trial shows that it works."""
    try:
        outcome = run("import os\nprint(input())\nos.listdir('/')", "1")
    except (SandboxFailed, OSError) as failure:
        return str(failure)
    is_held = outcome.output == b"1\n" and "PermissionError" in outcome.stderr
    return "" if is_held else f"a trial gave {outcome}"
