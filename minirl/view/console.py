"""What a person sees while a run trains: plain lines, or the dashboard in a terminal.

Takes notes and metrics lines, gives text. It never fails a run and never waits. While the dashboard
is on, notes stand in its panel; when it ends they are printed, so that none is lost. `Bar` is the
progress of commands beside train.

Leaves out: what the dashboard shows and how (dashboard.py).
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from minirl.view.dashboard import KEYS, Reporter, Screen, can_draw
from minirl.view.status import Observer, step_text
from minirl.workers import LossyStream

if TYPE_CHECKING:
    from minirl.loop import Loop

NUM_NOTES, NUM_PANEL_NOTES = 1000, 40
QUIET_S = 1.0  # between two plain lines of a bar, at least
SUMMARY = {  # rows at the end; one whose value is not known is left out
    "held-out accuracy": "{accuracy_before:.1%} before, {accuracy_after:.1%} after",
    "steps": "{steps} in {seconds:.0f} s",
    "trained tokens": "{trained_tokens:,}",
    "max staleness": "{staleness_max:.0f} (allowed: {max_staleness_allowed})",
    "trajectories over several versions": "{multi_version_trajectories:,}",
    "largest logprob gap, vLLM to trainer": "{logprob_gap_max:.1e}",
    "balance": "{balance}",
    "run directory": "{run_dir}",
    "try next": "{try_next}",
}


class ConsoleView:
    def __init__(self, steps: int, is_plain: bool = False):
        stream = cast(TextIO, LossyStream(sys.stdout))  # a full disk does not end a run
        self.console = Console(file=stream, soft_wrap=True, highlight=False)
        self.steps, self.is_plain = steps, is_plain
        self._began = time.monotonic()
        self._notes: deque[tuple[float, str]] = deque(maxlen=NUM_PANEL_NOTES)
        self._unprinted: deque[tuple[float, str]] = deque(maxlen=NUM_NOTES)
        self._screen: Screen | None = None

    def note(self, text: str) -> None:
        """From any thread, and from a signal's handler: takes no lock."""
        note = (time.monotonic() - self._began, text)
        self._notes.append(note)
        self._unprinted.append(note)
        if not self._is_drawn:
            self._print_notes()

    @property
    def _is_drawn(self) -> bool:
        return self._screen is not None and self._screen.is_on

    def _print_notes(self) -> None:
        while self._unprinted:
            self._print(*self._unprinted.popleft())

    def _print(self, seconds: float, text: str) -> None:
        self.console.print(Text.assemble((f"{seconds:6.1f} s  ", "dim"), text))

    def evaluated(self, version: int, accuracy: float) -> None:
        self.note(f"held-out accuracy {accuracy:.1%} at version {version}")

    def step(self, line: dict[str, Any]) -> None:
        if self._is_drawn:
            return
        done = line["step"]
        left_s = line["seconds"] / done * (self.steps - done)
        text = f"step {done}/{self.steps}  {step_text(line)}  ETA {left_s:.0f} s"
        self._print(time.monotonic() - self._began, text)

    @contextlib.contextmanager
    def watching(
        self, loop: "Loop", run_dir: Path, check: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """While the loop runs: status.json, a `check` a second, and in a terminal the dashboard."""
        observer = Observer(loop, run_dir.name, self._notes)
        with contextlib.ExitStack() as stack:
            if not self.is_plain and can_draw(self.console):
                self._screen = Screen(self.console, KEYS)
                stack.callback(self._print_notes)
                stack.enter_context(self._screen.suspendable())
                # What libraries print would stand across the picture: it becomes notes.
                stack.enter_context(contextlib.redirect_stdout(cast(TextIO, _ToNotes(self))))
                stack.enter_context(contextlib.redirect_stderr(cast(TextIO, _ToNotes(self))))
            stack.enter_context(Reporter(observer, run_dir, self.note, check, self._screen))
            yield

    def finished(self, summary: dict[str, Any], try_next: str) -> None:
        self.close()

        known = {name: value for name, value in summary.items() if value is not None}
        for name, form in SUMMARY.items():
            with contextlib.suppress(KeyError):
                text = form.format_map({**known, "try_next": try_next})
                self.console.print(Text.assemble((f"{name:<38}", "bold"), text))

    def close(self) -> None:
        """However it ends, the terminal is given back."""
        if self._screen is not None:
            self._screen.close()
        self._print_notes()


class _ToNotes(TextIOBase):
    """A stream whose whole lines are notes."""

    def __init__(self, view: ConsoleView):
        self._view, self._rest = view, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._view.note(line.rstrip())
        return len(text)

    def fileno(self) -> int:  # for a subprocess that is given it
        return 1


class Bar:
    """Progress of something that is counted: a live bar in a terminal, a line now and then else."""

    def __init__(self, what: str):
        self.console = Console(soft_wrap=True, highlight=False, stderr=True)
        self.what = what
        self._began = self._last = time.monotonic()
        self._total = 0
        columns = (TextColumn(f"[bold]{what}"), MofNCompleteColumn(), BarColumn(bar_width=30))
        more = (TextColumn("{task.fields[text]}  ETA"), TimeRemainingColumn())
        self._progress = Progress(*columns, *more, console=self.console, transient=True)

    def note(self, text: str) -> None:
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self.console.print(Text.assemble((stamp, "dim"), text))

    def total(self, count: int) -> None:
        """Now it begins."""
        self._total = count
        self._bar = self._progress.add_task(self.what, total=count, text="")
        if self.console.is_terminal:
            self._progress.start()

    def at(self, done: int, text: str) -> None:
        if self._progress.live.is_started:
            self._progress.update(self._bar, completed=done, text=text)
            return
        now = time.monotonic()
        is_tenth = done * 10 // self._total != (done - 1) * 10 // self._total
        if done == self._total or (is_tenth and now - self._last > QUIET_S):
            self._last = now
            self.note(f"{self.what} {done}/{self._total}  {text}")

    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
