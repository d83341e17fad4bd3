"""The terminal: taken over for the dashboard, read for keys, and given back whatever happens.

Takes frames, gives keys. It uses the alternate screen, so that what stood on the terminal before is
there again afterwards, and turns wrapping off, so that a letter wider than rich thinks cannot break
the picture. Ctrl-C and Ctrl-Z mean what they always mean.

A process in the background never touches the terminal: it would be stopped for it.
"""

import atexit
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType

from rich.console import Console

from minirl.view.dashboard.frame import MIN_HEIGHT, MIN_WIDTH, Frame

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # other screen, no cursor, no wrapping, empty
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, CLEAR = "\x1b[H", "\x1b[2J"
PATIENCE_S = 1.0  # with a drawing that a stopped terminal (Ctrl-S) holds up


def is_possible(console: Console) -> bool:
    """A terminal that can show it, and ours to use. NO_COLOR only takes the colours away."""
    try:
        fd = sys.stdout.fileno()
        is_ours = os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
    can_braille = (console.encoding or "").lower().startswith("utf")
    return is_ours and can_braille and not console.is_dumb_terminal


class Screen:
    """`is_on` says whether the dashboard is what the terminal shows."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_on = False
        self._out = sys.stdout.fileno()
        self._in = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._before: list[object] | None = None
        self._lock = threading.RLock()
        self._size = (0, 0)
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)

    @property
    def size(self) -> tuple[int, int]:
        try:
            return os.get_terminal_size(self._out)
        except OSError:
            return 0, 0

    @property
    def is_roomy(self) -> bool:
        width, height = self.size
        return width >= MIN_WIDTH and height >= MIN_HEIGHT

    @property
    def is_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._out) == os.getpgrp()
        except OSError:
            return False

    def enter(self) -> None:
        with self._lock:
            if self.is_on or not self.is_foreground:
                return
            atexit.register(self.leave)
            if self._in is not None:
                with contextlib.suppress(termios.error):
                    self._before = termios.tcgetattr(self._in)
                    tty.setcbreak(self._in, termios.TCSANOW)
            self._write(ENTER)
            self.is_on, self._size = True, (0, 0)

    def leave(self) -> None:
        """As often as one likes. Does not wait long for a drawing that cannot end."""
        has_lock = self._lock.acquire(timeout=PATIENCE_S)
        try:
            if not self.is_on:
                return
            self.is_on = False
            if self._in is not None and self._before is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._in, termios.TCSANOW, self._before)  # type: ignore[arg-type]
                    termios.tcflush(self._in, termios.TCIFLUSH)  # keys meant for us
            with contextlib.suppress(OSError):
                self._write(LEAVE)
            atexit.unregister(self.leave)
        finally:
            if has_lock:
                self._lock.release()

    def draw(self, frame: Frame, width: int, height: int) -> None:
        with self._lock:
            if not self.is_on or not self.is_foreground:
                return
            with self.console.capture() as captured:
                self.console.print(frame, end="", soft_wrap=True)
            clear = CLEAR if (width, height) != self._size else ""
            self._size = (width, height)
            self._write(clear + HOME + captured.get().replace("\n", "\r\n"))

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out, data) :]

    def keys(self, timeout_s: float) -> str:
        """Keys that were pressed, waiting at most so long; `wake` ends the wait."""
        waited_for = [self._wake_r]
        if self.is_on and self._in is not None and self.is_foreground:
            waited_for.append(self._in)
        ready, _, _ = select.select(waited_for, [], [], timeout_s)
        if self._wake_r in ready:
            os.read(self._wake_r, 1024)
        if self._in in ready and self.is_on and self.is_foreground:
            assert self._in is not None
            pressed = os.read(self._in, 64)
            if not pressed:  # the terminal is gone
                self._in = None
            return pressed.decode(errors="ignore")
        return ""

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b".")

    def close(self) -> None:
        self.leave()
        os.close(self._wake_r)
        os.close(self._wake_w)

    @contextlib.contextmanager
    def suspendable(self) -> Iterator[None]:
        """Ctrl-Z gives the terminal back and `fg` takes it again. Main thread only."""

        def handle(number: int, frame: FrameType | None) -> None:
            was_on = self.is_on
            self.leave()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # sleeps here
            signal.signal(signal.SIGTSTP, handle)
            if was_on:
                self.enter()

        before = signal.signal(signal.SIGTSTP, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)
