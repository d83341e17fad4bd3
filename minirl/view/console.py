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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from minirl.view.dashboard import KEYS, Reporter, Screen, can_draw
from minirl.view.status import Observer, step_text
from minirl.workers import LossyStream

if TYPE_CHECKING:
    from minirl.loop import Loop

NUM_NOTES, NUM_PANEL_NOTES = 1000, 40
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


def _stamped(seconds: float, text: str) -> Text:
    return Text.assemble((f"{seconds:6.1f} s  ", "dim"), text)


class ConsoleView:
    def __init__(self, steps: int, is_plain: bool = False):
        stream = cast(TextIO, LossyStream(sys.stdout))  # a full disk does not end a run
        self.console = Console(file=stream, soft_wrap=True, highlight=False)
        self.steps, self.is_plain, self._began = steps, is_plain, time.monotonic()
        self._notes: deque[tuple[float, str]] = deque(maxlen=NUM_PANEL_NOTES)
        self._unprinted: deque[tuple[float, str]] = deque(maxlen=NUM_NOTES)

    def note(self, text: str) -> None:
        """From any thread, and from a signal's handler: takes no lock."""
        note = (time.monotonic() - self._began, text)
        self._notes.append(note)
        self._unprinted.append(note)
        if not self.console.is_alt_screen:
            self.close()

    def evaluated(self, version: int, accuracy: float) -> None:
        self.note(f"held-out accuracy {accuracy:.1%} at version {version}")

    def step(self, line: dict[str, Any]) -> None:
        if not self.console.is_alt_screen:
            stamped = _stamped(time.monotonic() - self._began, step_text(line, self.steps))
            self.console.print(stamped)

    @contextlib.contextmanager
    def watching(self, loop: "Loop", run_dir: Path) -> Iterator[None]:
        """While the loop runs: status.json, and in a terminal the dashboard."""
        observer = Observer(loop, run_dir.name, self._notes)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            screen = None
            if not self.is_plain and can_draw(self.console):
                screen = stack.enter_context(Screen(self.console, KEYS))
            stack.enter_context(Reporter(observer, run_dir, self.note, screen))
            yield

    def finished(self, summary: dict[str, Any], try_next: str) -> None:
        known = {name: value for name, value in summary.items() if value is not None}
        for name, form in SUMMARY.items():
            with contextlib.suppress(KeyError):
                text = form.format_map({**known, "try_next": try_next})
                self.console.print(Text.assemble((f"{name:<38}", "bold"), text))

    def close(self) -> None:
        """Prints the notes that were only in the panel."""
        while self._unprinted:
            self.console.print(_stamped(*self._unprinted.popleft()))


class Bar:
    """Progress of something that is counted: a live bar in a terminal, else a line per tenth."""

    def __init__(self, what: str):
        self.console = Console(soft_wrap=True, highlight=False, stderr=True)
        self.what, self._began, self._total = what, time.monotonic(), 0
        is_plain = not self.console.is_terminal
        self._progress = Progress(console=self.console, transient=True, disable=is_plain)

    def note(self, text: str) -> None:
        self.console.print(_stamped(time.monotonic() - self._began, text))

    def total(self, count: int) -> None:
        self._total = count
        self._bar = self._progress.add_task(self.what, total=count)
        self._progress.start()

    def at(self, done: int, text: str) -> None:
        line = f"{self.what} {done}/{self._total}  {text}"
        self._progress.update(self._bar, completed=done, description=line)
        is_tenth = done * 10 // self._total != (done - 1) * 10 // self._total
        if is_tenth and self._progress.disable:
            self.note(line)

    def close(self) -> None:
        self._progress.stop()
