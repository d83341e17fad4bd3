"""The reporter: a thread of the controller that looks, writes status.json, draws, and hears keys.

    consumes      an Observer's samples and snapshots, keys
    waits for     a key, for a fifth of a second; nothing else
    gives         status.json once a second, a frame when something changed, the loop's two wishes

It never fails a run: whatever goes wrong here is noted once, and the plain lines go on. The loop
never waits for it, so a terminal that is stopped (Ctrl-S) or slow stops nobody.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from minirl.errors import one_line
from minirl.view.dashboard import snapshot as status
from minirl.view.dashboard.frame import Options, render
from minirl.view.dashboard.observer import Observer
from minirl.view.dashboard.screen import Screen
from minirl.view.dashboard.snapshot import Snapshot

TICK_S, LOOK_S = 0.2, 1.0
KEYS = (("q", "finish and save"), ("p", "another sample"), ("s", "save a checkpoint now"))
JOIN_S = 3.0


class Reporter:
    """`screen` is None without a terminal: then only status.json is written."""

    def __init__(
        self,
        observer: Observer,
        run_dir: Path,
        note: Callable[[str], None],
        screen: Screen | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self.observer, self.run_dir, self.note, self.screen = observer, run_dir, note, screen
        self.check = check  # called once a second: others that must be looked after
        self.snapshot: Snapshot | None = None
        self.which = 0
        self.cpu_s = self.wall_s = 0.0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    @property
    def cost(self) -> float:
        """CPU seconds a second."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def start(self) -> None:
        if self.screen is not None and self.screen.is_roomy:
            self.screen.enter()
        self._thread.start()

    def stop(self) -> None:
        """Gives the terminal back; the thread ends by itself should it be held up."""
        self._is_ending.set()
        if self.screen is not None:
            self.screen.wake()
        try:
            self._thread.join(JOIN_S)
        finally:  # a second Ctrl-C may come just now
            if self.screen is not None:
                self.screen.leave()

    def ended(self, state: str, reason: str) -> None:
        """After `stop`: the last word of status.json."""
        with contextlib.suppress(Exception):  # the run has ended, and its result is elsewhere
            last = self.observer.look(self.cost)
            last = replace(last, state=state, reason=one_line(reason), doing="", eta_s=None)
            status.write(last, self.run_dir)

    # -- the thread

    def _run(self) -> None:
        began, before = time.monotonic(), time.thread_time()
        next_look = began
        while not self._is_ending.is_set():
            try:
                next_look = self._turn(next_look)
            except Exception as error:  # a broken picture must not cost a run
                self._give_up(error)
                return
            self.cpu_s = time.thread_time() - before
            self.wall_s = time.monotonic() - began

    def _give_up(self, error: Exception) -> None:
        if self.screen is not None:
            self.screen.leave()
        what = f"{type(error).__name__}: {error}"
        self.note(f"the dashboard is off, training goes on: {one_line(what)}")

    def _turn(self, next_look: float) -> float:
        self.observer.sample()
        is_due = time.monotonic() >= next_look
        if is_due:
            self.snapshot = self.observer.look(self.cost)
            self._write(self.snapshot)
            self.check()
            next_look = max(next_look + LOOK_S, time.monotonic())
        if self.screen is None:
            self._is_ending.wait(TICK_S)
            return next_look
        self._follow_size()
        if is_due or self.screen.size != self._drawn_size:
            self.draw()
        for key in self.screen.keys(TICK_S):
            self.press(key)
        return next_look

    _drawn_size = (0, 0)
    _can_write = True

    def _write(self, snapshot: Snapshot) -> None:
        """A full disk costs `minirl watch`, nothing else."""
        try:
            status.write(snapshot, self.run_dir)
            self._can_write = True
        except OSError as error:
            if self._can_write:
                self.note(f"status.json cannot be written: {error.strerror}")
            self._can_write = False

    def _follow_size(self) -> None:
        """A terminal made too small goes back to plain lines, and forth again."""
        assert self.screen is not None
        if self.screen.is_on and not self.screen.is_roomy:
            self.screen.leave()
            self.note("the terminal is too small for the dashboard: plain lines")
        elif not self.screen.is_on and self.screen.is_roomy:
            self.screen.enter()

    def draw(self) -> None:
        if self.screen is None or not self.screen.is_on or self.snapshot is None:
            return
        self._drawn_size = width, height = self.screen.size
        options = Options(self.which, KEYS)
        frame = render(self.snapshot, width, height, time.time(), options)
        self.screen.draw(frame, width, height)

    def press(self, key: str) -> None:
        loop = self.observer.loop
        if key in "qQ":
            if loop.is_interrupted:
                self.note("finishing already; Ctrl-C ends it now")
            else:
                loop.is_interrupted = True
                self.note("q: finishing the step and saving; Ctrl-C ends it now")
        elif key in "pP":
            self.which += 1
            self.draw()
        elif key in "sS":
            if loop.step == 0:
                self.note("s: nothing is trained yet")
            else:
                loop.wants_save = True
                self.note("s: a checkpoint is saved when the running step is done")
