"""A program in a terminal of its own, as a person would run it: seen, typed at, resized."""

import fcntl
import os
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FIXED_SIZE = ("COLUMNS", "LINES")  # of another terminal: rich would keep to them
LIMIT_S = 180.0  # a hang is a failure, however slow the machine


class Terminal:
    def __init__(
        self, command: Sequence[str], width: int, height: int, env: Mapping[str, str] | None = None
    ):
        self._ours, self._theirs = os.openpty()  # theirs stays open here: its modes can be asked
        self.resize(width, height)
        self.modes = self._modes()
        self.seen = b""
        own = {name: value for name, value in os.environ.items() if name not in FIXED_SIZE}
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**own, "TERM": "xterm-256color", **(env or {})},
        )

    def _modes(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    @property
    def is_as_before(self) -> bool:
        """Echo, line editing and signals."""
        return self._modes() == self.modes

    def resize(self, width: int, height: int) -> None:
        termios.tcsetwinsize(self._ours, (height, width))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read(self, seconds: float) -> bytes:
        """What comes within so long; at once if something is there."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        came = os.read(self._ours, 1 << 16) if ready else b""
        self.seen += came
        return came

    def read_until(self, is_there: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_there():
            self.read(0.05)
            assert time.monotonic() < deadline, self.seen[-2000:].decode(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Reads to the end, so that the program is never held up. Gives its exit code."""
        self.read_until(lambda: self.process.poll() is not None, limit_s)
        while self.read(0.05):
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)
