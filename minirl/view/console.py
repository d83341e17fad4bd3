"""What a person sees while a run goes on: the dashboard in a terminal, plain lines elsewhere.

Takes notes and metrics lines, gives text. It never fails a run and never waits. While the dashboard
is on, notes stand in its panel; when it ends they are printed, so that none is lost.

Leaves out: what the dashboard shows and how (dashboard/).
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

from minirl.view.dashboard.lines import step_text
from minirl.workers import LossyStream

if TYPE_CHECKING:
    from minirl.loop import Loop
    from minirl.view.dashboard.live import Reporter

NUM_NOTES, NUM_PANEL_NOTES = 1000, 40
QUIET_S = 1.0  # between two plain lines of a bar, at least


class ConsoleView:
    def __init__(
        self,
        steps: int,
        first_step: int = 0,
        console: Console | None = None,
        is_plain: bool = False,
    ):
        stream = cast(TextIO, LossyStream(sys.stdout))  # a full disk does not end a run
        self.console = console or Console(file=stream, soft_wrap=True, highlight=False)
        self.steps, self.is_plain = steps, is_plain
        self._began = time.monotonic()
        self._notes: deque[tuple[float, str]] = deque(maxlen=NUM_PANEL_NOTES)
        self._unprinted: deque[tuple[float, str]] = deque(maxlen=NUM_NOTES)
        self._reporter: Reporter | None = None

    @property
    def recent(self) -> list[tuple[float, str]]:
        return list(self._notes)

    @property
    def _is_drawn(self) -> bool:
        screen = self._reporter.screen if self._reporter else None
        return screen is not None and screen.is_on

    def note(self, text: str) -> None:
        """From any thread, and from a signal's handler: takes no lock."""
        note = (time.monotonic() - self._began, text)
        self._notes.append(note)
        self._unprinted.append(note)
        if not self._is_drawn:
            self._print_notes()

    def _print_notes(self) -> None:
        while self._unprinted:
            seconds, text = self._unprinted.popleft()
            self.console.print(Text.assemble((f"{seconds:6.1f} s  ", "dim"), text))

    def evaluated(self, version: int, accuracy: float) -> None:
        self.note(f"held-out accuracy {accuracy:.1%} at version {version}")

    def step(self, line: dict[str, Any]) -> None:
        if self._is_drawn:
            return
        done = line["step"]
        left_s = line["seconds"] / done * (self.steps - done)
        seconds = time.monotonic() - self._began
        text = f"step {done}/{self.steps}  {step_text(line)}  ETA {left_s:.0f} s"
        self.console.print(Text.assemble((f"{seconds:6.1f} s  ", "dim"), text))

    @contextlib.contextmanager
    def watching(
        self, loop: "Loop", run_dir: Path, check: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """While the loop runs: status.json, a `check` a second, and in a terminal the dashboard."""
        from minirl.view.dashboard.live import Reporter
        from minirl.view.dashboard.observer import Observer
        from minirl.view.dashboard.screen import Screen, is_possible
        from minirl.view.dashboard.snapshot import FAILED, FINISHED, STOPPED

        can_draw = not self.is_plain and is_possible(self.console)
        screen = Screen(self.console) if can_draw else None
        observer = Observer(loop, self, run_dir.name)
        reporter = self._reporter = Reporter(observer, run_dir, self.note, screen, check)
        state, reason = FAILED, ""
        try:
            with screen.suspendable() if screen else contextlib.nullcontext():
                reporter.start()
                with self._captured() if screen else contextlib.nullcontext():
                    yield
            is_whole = loop.step == loop.config.train.steps
            state = FINISHED if is_whole else STOPPED
            reason = "" if is_whole else "asked to; saved"
        except BaseException as error:
            reason = str(error) or type(error).__name__
            state = STOPPED if isinstance(error, KeyboardInterrupt) else FAILED
            raise
        finally:
            try:
                reporter.stop()
            finally:
                reporter.ended(state, reason)
                self._print_notes()

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        """What libraries print would stand across the picture: it becomes notes."""
        with (
            contextlib.redirect_stdout(_ToNotes(self)),  # type: ignore[type-var]
            contextlib.redirect_stderr(_ToNotes(self)),  # type: ignore[type-var]
        ):
            yield

    def finished(self, summary: dict[str, Any], try_next: str) -> None:
        self.close()

        def row(name: str, value: object) -> None:
            self.console.print(Text.assemble((f"{name:<38}", "bold"), str(value)))

        before, after = summary["accuracy_before"], summary["accuracy_after"]
        if before is not None:
            row("held-out accuracy", f"{before:.1%} before, {after:.1%} after")
        row("steps", f"{summary['steps']} in {summary['seconds']:.0f} s")
        row("trained tokens", f"{summary['trained_tokens']:,}")
        row(
            "max staleness",
            f"{summary['staleness_max']:.0f} (allowed: {summary['max_staleness_allowed']})",
        )
        row("trajectories over several versions", f"{summary['multi_version_trajectories']:,}")
        if summary["logprob_gap_max"] is not None:
            row("largest logprob gap, vLLM to trainer", f"{summary['logprob_gap_max']:.1e}")
        if summary["balance"] is not None:
            row("balance", summary["balance"])
        row("run directory", summary["run_dir"])
        row("try next", try_next)

    def close(self) -> None:
        """However it ends, the terminal is given back."""
        if self._reporter is not None and self._reporter.screen is not None:
            self._reporter.screen.leave()
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

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return sys.__stdout__.fileno() if sys.__stdout__ else 1


class Bar:
    """Progress of something that is counted: a live bar in a terminal, a line now and then else."""

    def __init__(self, what: str, console: Console | None = None):
        self.console = console or Console(soft_wrap=True, highlight=False, stderr=True)
        self.what = what
        self._began = self._last = time.monotonic()
        self._is_live = False
        self._total = 0
        self._progress = Progress(
            TextColumn(f"[bold]{what}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    def note(self, text: str) -> None:
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self.console.print(Text.assemble((stamp, "dim"), text))

    def total(self, count: int) -> None:
        """Now it begins."""
        self._total = count
        self._bar = self._progress.add_task(self.what, total=count, text="")
        if self.console.is_terminal:
            self._is_live = True
            self._progress.start()

    def at(self, done: int, text: str) -> None:
        if self._is_live:
            self._progress.update(self._bar, completed=done, text=text)
            return
        now = time.monotonic()
        is_tenth = done * 10 // self._total != (done - 1) * 10 // self._total
        if done == self._total or (is_tenth and now - self._last > QUIET_S):
            self._last = now
            self.note(f"{self.what} {done}/{self._total}  {text}")

    def close(self) -> None:
        if self._is_live:
            self._progress.stop()
            self._is_live = False
