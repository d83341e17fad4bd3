"""What a person sees while a run goes on (rich): a live line in a terminal, plain lines elsewhere.

Takes metrics lines, gives pixels. It never fails a run and never waits.
"""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

QUIET_S = 1.0  # between two plain lines of a bar, at least


class ConsoleView:
    def __init__(self, steps: int, first_step: int = 0, console: Console | None = None):
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.steps = steps
        self._is_live = self.console.is_terminal
        self._began = time.monotonic()
        self._accuracy = ""
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._bar = self._progress.add_task(
            "train", total=steps, completed=first_step, text="starting"
        )
        if self._is_live:
            self._progress.start()

    def note(self, text: str) -> None:
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self.console.print(Text.assemble((stamp, "dim"), text))

    def evaluated(self, version: int, accuracy: float) -> None:
        self._accuracy = f"held-out {accuracy:.1%}"
        self.note(f"held-out accuracy {accuracy:.1%} at version {version}")

    def step(self, line: dict[str, Any]) -> None:
        text = (
            f"reward {line['reward/mean']:.3f}  "
            f"staleness {line['buffer/staleness_mean']:.2f} "
            f"(max {line['buffer/staleness_max']:.0f})  "
            f"gen {line['rollout/tokens_per_s']:,.0f} tok/s  "
            f"train {line['train/tokens_per_s']:,.0f} tok/s"
        )
        if self._is_live:
            shown = f"{text}  {self._accuracy}" if self._accuracy else text
            self._progress.update(self._bar, completed=line["step"], text=shown)
        else:
            done = line["step"]
            left_s = line["seconds"] / done * (self.steps - done)
            self.note(f"step {done}/{self.steps}  {text}  ETA {left_s:.0f} s")

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
        if self._is_live:
            self._progress.stop()
            self._is_live = False


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
