"""What a person sees while a run trains: plain lines, or the dashboard in a terminal.

Takes notes, metrics lines and a loop that runs; gives text and, once a second, a Status
(`Reporter`), saved in status.json. It only reads the loop, which takes no lock for it; it never
fails a run and never waits. While the dashboard is on, notes stand in its panel; when it ends they
are printed, so that none is lost. `Bar` is the progress of commands beside train. Leaves out: how a
Status looks (dashboard.py).
"""

import contextlib
import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from minirl.errors import one_line
from minirl.loop import Loop
from minirl.metrics import measured_balance
from minirl.run_dir import Line
from minirl.shm.board import Row, State, Total
from minirl.view import dashboard
from minirl.view.dashboard import CURVES, Lane, Point, Sample, Screen, Status, clock
from minirl.view.runs import prompt_text, summary_rows
from minirl.workers import LossyStream, Worker

STEP = (
    "step {step:.0f}/{steps}  reward {reward/mean:.3f}  "
    "staleness {buffer/staleness_mean:.2f} (max {buffer/staleness_max:.0f})  "
    "gen {rollout/tokens_per_s:,.0f} tok/s  train {train/tokens_per_s:,.0f} tok/s  ETA {eta}"
)
WEIGHTS = (State.RELOADING, State.PUBLISHING, State.SAVING)
TOTALS = (Total.IDLE_S, Total.RELOAD_S)
interval = itemgetter("version", "accuracy", "low", "high")


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
            known = {**line, "steps": self.steps, "eta": dashboard.eta(line, self.steps)}
            text = STEP.format_map(defaultdict(lambda: math.nan, known))
            self.console.print(_stamped(time.monotonic() - self._began, text))

    @contextlib.contextmanager
    def watching(self, loop: Loop) -> Iterator[None]:
        """While the loop runs: status.json, and in a terminal the dashboard."""
        can_show = not self.is_plain and dashboard.can_draw(self.console)
        drawn = Screen(self.console, dashboard.KEYS) if can_show else contextlib.nullcontext()
        try:
            with drawn as screen, Reporter(loop, self._notes, screen):
                yield
        finally:
            self.close()

    def finished(self, summary: Line) -> None:
        for name, text in summary_rows(summary).items():
            self.console.print(Text.assemble((f"{name:<38}", "bold"), text))

    def close(self) -> None:
        """Prints the notes that were only in the panel."""
        with contextlib.suppress(IndexError):  # another thread may print the last
            while True:
                self.console.print(_stamped(*self._unprinted.popleft()))


def lane_state(row: Row) -> str:
    if row.beat_s > 30 and row.state is not State.STARTING:
        return f"{row.state.words}, silent {clock(row.beat_s)}"
    if row.state is State.GENERATING:
        return f"{row.state.words} {row.running} at v{row.version}"
    return row.state.words


def _sample(line: dict[str, Any]) -> Sample:
    """From a line of samples.jsonl; of long texts a part."""
    title = f"of step {line['step']}: reward {line['reward']:g}, wanted {line['reference']!s:.16}"
    title += f", by versions {line['versions'][0]} to {line['versions'][1]}"
    title += ", truncated" if line["stop"] == "length" else ""
    return Sample(title, prompt_text(line["prompt"])[-2000:], line["answer"][:2000])


class Reporter:
    """A thread of the controller: makes a status, saves and draws it, reads keys. The loop never
    waits for it, and whatever fails here is noted and costs the picture, not the run."""

    def __init__(self, loop: Loop, notes: deque[tuple[float, str]], screen: Screen | None):
        self._loop, self._notes, self._screen = loop, notes, screen
        self._workers = sorted(loop.engines + loop.ranks, key=lambda worker: worker.box)
        self._seconds = {w.name: deque[Point](maxlen=dashboard.NUM_SECONDS) for w in self._workers}
        self._totals: dict[str, tuple[float, ...]] = {}
        self._cost, self._reason, self._is_ending = 0.0, "", threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The last status says why the run ended."""
        self._is_ending.set()
        self._thread.join(3.0)  # a stopped terminal (Ctrl-S) may hold it up
        if isinstance(error, Exception):
            self._reason = one_line(str(error) or type(error).__name__)
        with contextlib.suppress(Exception):  # the result of the run is elsewhere
            self.status().save(self._loop.log.run_dir)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            while not self._is_ending.is_set():
                status = self.status()
                with contextlib.suppress(OSError):  # a full disk costs `minirl watch` alone
                    status.save(self._loop.log.run_dir)
                keys = self._screen.show(status) if self._screen else ""
                if "q" in keys:
                    self._loop.is_interrupted = True
                    self._loop.log.note("q: finishing the step and saving; Ctrl-C ends it now")
                if "s" in keys and self._loop.step > 0:
                    self._loop.wants_save = True
                    self._loop.log.note("s: a checkpoint is saved after the running step")
                self._is_ending.wait(0.0 if self._screen else dashboard.LOOK_S)
                self._cost = time.thread_time() / (time.monotonic() - began)
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}")
            self._loop.log.note(f"the dashboard is off, training continues: {what}")
            if self._screen is not None:
                self._screen.close()

    def status(self) -> Status:
        """Copies in one call what the loop could change meanwhile."""
        loop, log, config = self._loop, self._loop.log, self._loop.config
        lines = log.metrics[:]
        shown = lines[:: -max(1, math.ceil(len(lines) / 240))][::-1]  # always with the last step
        word = "GPU" if loop.engines[0].placement.kind == "cuda" else "cores"
        return Status(
            name=log.run_dir.name,
            time=time.time(),
            doing=self._doing(),
            reason=self._reason,
            step=loop.step,
            steps=config.train.steps,
            seconds=log.seconds if loop.is_ready else 0.0,
            verdict=measured_balance(config, lines[-20:], word, loop.buffer.holds_back),
            lanes=[self._lane(worker) for worker in self._workers],
            slots=loop.groups.slots,
            staleness=[sum(n) for n in zip_longest(*list(log.recent_staleness), fillvalue=0)],
            max_staleness=config.buffer.max_staleness,
            curves={n: [(line["step"], line[n]) for line in shown if n in line] for n in CURVES},
            evaluations=[interval(line) for line in log.evals[:] if line.get("low") is not None],
            drops={str(reason): count for reason, count in dict(loop.buffer.drops).items()},
            last=lines[-1] if lines else {},
            samples=[_sample(line) for line in list(log.recent_samples)],
            notes=list(self._notes),
            cost=self._cost,
        )

    def _doing(self) -> str:
        loop, evaluation = self._loop, self._loop.groups.evaluation
        if missing := [worker.name for worker in self._workers if not worker.is_ready]:
            return f"starting {', '.join(missing)}"
        if loop.is_interrupted:
            return "finishing the step, then saving; Ctrl-C ends it now"
        if evaluation:
            return f"evaluating version {evaluation.version}"
        states = [loop.workers.board.row(engine.row).state for engine in loop.engines]
        limit, num_slots = loop.buffer.admission.limit, loop.buffer.num_slots
        is_held_back = loop.buffer.holds_back and loop.buffer.num_in_flight >= limit
        if State.WAITING_FOR_PROMPTS not in states or not is_held_back:
            return ""
        return f"engines wait: admission control holds them back ({limit} of {num_slots} slots)"

    def _lane(self, worker: Worker) -> Lane:
        """A worker that starts is not at work."""
        board, seconds = self._loop.workers.board, self._seconds[worker.name]
        row, totals = board.row(worker.row), map(partial(board.total, worker.row), TOTALS)
        now = (time.monotonic(), *totals)
        before, self._totals[worker.name] = self._totals.get(worker.name, now), now
        passed, idle_s, weights_s = (a - b for a, b in zip(now, before, strict=True))
        if passed and worker.is_ready:
            weights_s += min(passed, row.since_s) * (row.state in WEIGHTS)  # not in its total yet
            weights, idle = (min(1.0, max(0.0, s / passed)) for s in (weights_s, idle_s))
            seconds.append((round(max(0.0, 1 - weights - idle), 2), round(weights, 2)))
        return Lane(worker.name, lane_state(row), list(seconds), worker.box)


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
