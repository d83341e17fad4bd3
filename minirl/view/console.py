"""What a person sees while a run trains: plain lines, or the dashboard in a terminal.

Takes notes and metrics lines, gives text. It never fails a run and never waits. While the dashboard
is on, notes stand in its panel; when it ends they are printed, so that none is lost. `Bar` is the
progress of commands beside train. Leaves out: what the dashboard shows and how (dashboard.py).
"""

import contextlib
import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from minirl.view.dashboard import KEYS, Reporter, Screen, can_draw, eta
from minirl.view.runs import drops_text
from minirl.workers import LossyStream

if TYPE_CHECKING:
    from minirl.loop import Loop

STEP = (
    "step {step:.0f}/{steps}  reward {reward/mean:.3f}  "
    "staleness {buffer/staleness_mean:.2f} (max {buffer/staleness_max:.0f})  "
    "gen {rollout/tokens_per_s:,.0f} tok/s  train {train/tokens_per_s:,.0f} tok/s  ETA {eta}"
)
SUMMARY = {  # rows at the end; one whose value is not known is left out
    "held-out accuracy": "{measured}",
    "steps": "{steps} in {seconds:.0f} s",
    "trained tokens": "{trained_tokens:,}",
    "max staleness": "{staleness_max:.0f} (allowed: {max_staleness_allowed})",
    "trajectories over several versions": "{multi_version_trajectories:,}",
    "largest logprob gap, vLLM to trainer": "{logprob_gap_max:.1e}",
    "versions with a measured gap": "{versions_measured}",
    "groups dropped": "{dropped}",
    "balance": "{balance}",
    "run directory": "{run_dir}",
    "try next": "{try_next}",
}


def measured(summary: dict[str, Any]) -> str:
    """The first and the last accuracy, each with its version. Empty: nothing was evaluated."""
    known = summary.get("accuracies") or []
    text = ", ".join(f"{y:.1%} at version {version}" for version, y in known[:1] + known[1:][-1:])
    is_old = known and known[-1][0] < summary.get("version", summary.get("steps", 0))
    return f"{text}; not evaluated since" if is_old else text


def _stamped(seconds: float, text: str) -> Text:
    return Text.assemble((f"{seconds:6.1f} s  ", "dim"), text)


class ConsoleView:
    def __init__(self, steps: int, is_plain: bool = False):
        stream = cast(TextIO, LossyStream(sys.stdout))  # a full disk does not end a run
        self.console = Console(file=stream, soft_wrap=True, highlight=False)
        self.steps, self.is_plain, self._began = steps, is_plain, time.monotonic()
        self._notes: deque[tuple[float, str]] = deque(maxlen=40)  # in the panel
        self._unprinted: deque[tuple[float, str]] = deque(maxlen=1000)

    def note(self, text: str) -> None:
        """From any thread, and from a signal's handler: takes no lock."""
        note = (time.monotonic() - self._began, text)
        self._notes.append(note)
        self._unprinted.append(note)
        if not self.console.is_alt_screen:
            self.close()

    def step(self, line: dict[str, float]) -> None:
        if not self.console.is_alt_screen:
            known = {**line, "steps": self.steps, "eta": eta(line, self.steps)}
            text = STEP.format_map(defaultdict(lambda: math.nan, known))
            self.console.print(_stamped(time.monotonic() - self._began, text))

    @contextlib.contextmanager
    def watching(self, loop: "Loop") -> Iterator[None]:
        """While the loop runs: status.json, and in a terminal the dashboard."""
        can_show = not self.is_plain and can_draw(self.console)
        drawn = Screen(self.console, KEYS) if can_show else contextlib.nullcontext()
        try:
            with drawn as screen, Reporter(loop, self._notes, screen):
                yield
        finally:
            self.close()

    def finished(self, summary: dict[str, Any], try_next: str) -> None:
        texts = {"measured": measured(summary), "dropped": drops_text(summary.get("drops") or {})}
        every = {**texts, **summary, "try_next": try_next}
        known = {name: value for name, value in every.items() if value not in (None, "")}
        for name, form in SUMMARY.items():
            with contextlib.suppress(KeyError):
                text = form.format_map(known)
                self.console.print(Text.assemble((f"{name:<38}", "bold"), text))

    def close(self) -> None:
        """Prints the notes that were only in the panel."""
        while self._unprinted:
            self.console.print(_stamped(*self._unprinted.popleft()))


class Bar:
    """Progress of something that is counted: one line per tenth."""

    def __init__(self, what: str):
        self.console = Console(soft_wrap=True, highlight=False, stderr=True)
        self.what, self._began = what, time.monotonic()

    def note(self, text: str) -> None:
        self.console.print(_stamped(time.monotonic() - self._began, text))

    def at(self, done: int, total: int, text: str) -> None:
        if done * 10 // total != (done - 1) * 10 // total:
            self.note(f"{self.what} {done}/{total}  {text}")
