"""What a worker writes to RUN/trace.json (log.trace): Chrome trace events, one per line.

Takes what the worker says on its board, gives slices: thread 0 holds its states, the others hold
running sequences. All workers append to one file with O_APPEND, one write per event, so lines do
not mix; ui.perfetto.dev opens an array that is not closed. Times are microseconds of one clock. A
slice is written when it ends, so the last state of a killed worker is missing.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

STATES, LANES = 0, 1
TRACKS = {"rollout": 1000, "train": 2000, "verify": 3000}
Facts = dict[str, object]


@dataclass(frozen=True)
class TraceFile:
    """Made by the controller before it starts a worker; pickled to each."""

    path: Path
    clock_us: int = field(default_factory=lambda: (time.time_ns() - time.monotonic_ns()) // 1000)

    def __post_init__(self) -> None:
        """Open the array; a resumed run continues the one that is there."""
        with suppress(OSError), self.path.open("x") as file:
            file.write("[\n")

    def now(self) -> int:
        return time.monotonic_ns() // 1000 + self.clock_us


class Tracer:
    """A worker's track. `name` is the worker's: "rollout-0"."""

    def __init__(self, file: TraceFile, name: str):
        role, _, rank = name.partition("-")
        self.pid = TRACKS.get(role, 9000) + int(rank or 0)
        self._clock = file
        self._file = os.open(file.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._state: tuple[str, Facts, int] | None = None
        self._running: dict[int, tuple[int, int]] = {}  # sequence: lane, begin
        self._write("M", STATES, "process_name", 0, args={"name": name})

    def state(self, name: str, facts: Facts, anew: bool = False) -> None:
        if self._state is not None and self._state[:2] == (name, facts) and not anew:
            return
        now = self._clock.now()
        if self._state is not None:
            last, about, began = self._state
            words = f"{last}: {about['phase']}" if "phase" in about else last
            self._slice(STATES, words, began, now, about)
        self._state = (name, facts, now)

    def begin_sequence(self, key: int) -> None:
        used = {lane for lane, _ in self._running.values()}
        lane = next(lane for lane in count(LANES) if lane not in used)
        self._running[key] = (lane, self._clock.now())

    def end_sequence(self, key: int, group: int, facts: Facts) -> None:
        lane, began = self._running.pop(key)
        self._slice(lane, f"group {group}", began, self._clock.now(), facts)

    def close(self) -> None:
        self.state("over", {})  # ends the last one
        os.close(self._file)

    def _slice(self, tid: int, name: str, began: int, end: int, facts: Facts) -> None:
        self._write("X", tid, name, began, dur=end - began, args=facts)

    def _write(self, kind: str, tid: int, name: str, at: int, **more: object) -> None:
        event = {"ph": kind, "pid": self.pid, "tid": tid, "name": name, "ts": at, **more}
        line = json.dumps(event, separators=(",", ":")) + ",\n"
        with suppress(OSError):  # a full disk costs the timeline, not the run
            os.write(self._file, line.encode())
