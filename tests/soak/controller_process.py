"""One controller of a run: a controller process, its workers, and what is left of them.

Takes a command, gives process ids by worker name, and sees whether anything is left. It is all read
from /proc: what the run says of itself is not asked.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_S = 0.05
GONE_S = 15.0  # in which all must be gone after the controller


class ControllerProcess:
    def __init__(self, command: Sequence[str], log: Path):
        self.log = log
        self._memory = set(os.listdir("/dev/shm"))
        self.began = time.monotonic()
        self.began_at = time.time()  # as status.json has it
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            # Through a pipe: what it prints comes here, whatever becomes of its files.
            self._pump = subprocess.Popen(
                ["cat"], stdin=subprocess.PIPE, stdout=file, start_new_session=True
            )
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._pump.stdin,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its id is the controller's: so all of it can be found
            preexec_fn=_die_with_parent,
        )
        assert self._pump.stdin is not None
        self._pump.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """None while the controller runs."""
        return self.process.poll()

    def workers(self) -> dict[str, int]:
        """Process ids by worker name."""
        found = {}
        for pid in children(self.pid):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("rl-"):
                    found[name.removeprefix("rl-")] = pid
        return found

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ends(self, limit_s: float) -> int | None:
        """Its exit code; None: it has not ended in that time."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._pump.wait(1.0)  # it ends with the last of its processes
        return code

    def traces(self) -> list[str]:
        """Living processes of it, and shared memory that no process holds."""
        memory = sorted(orphaned_memory() - self._memory)
        return [f"process {pid}" for pid in living(self.pid)] + [f"/dev/shm/{m}" for m in memory]

    def gone_after(self) -> tuple[float, list[str]]:
        """Seconds until nothing was left of it, and what still is when that took too long."""
        began = time.monotonic()
        while (left := self.traces()) and time.monotonic() < began + GONE_S:
            time.sleep(POLL_S)
        return time.monotonic() - began, left

    def end(self) -> None:
        """Now, all of it."""
        for pid in living(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._pump.wait()

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "no word"

    def count(self, text: str) -> int:
        """In what it printed."""
        return self.log.read_text(errors="replace").count(text)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def living(session: int) -> list[int]:
    """Processes of a session; a zombie is none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def orphaned_memory() -> set[str]:
    """Names in /dev/shm that no living process has mapped."""
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += path.read_text()
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" not in mapped}
