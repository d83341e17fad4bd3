"""What a worker writes to RUN/trace.json (log.trace): Chrome trace events, one per line.

Takes what the worker says on its board, gives one slice per state, on a track per worker. All
workers append to one file with O_APPEND, one write per event, so lines do not mix; ui.perfetto.dev
opens an array that is not closed. Times are in microseconds. A slice is written when it ends, so
the last state of a killed worker is missing. Leaves out single sequences (batches.jsonl has them).
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

TRACKS = {"rollout": 1000, "train": 2000, "verify": 3000}
Facts = dict[str, object]


def open_trace(path: Path) -> Path:
    """By the controller, before it starts a worker. A resumed run continues the array."""
    with suppress(OSError), path.open("x") as file:
        file.write("[\n")
    return path


class Tracer:
    """A worker's track. `name` is the worker's: "rollout-0"."""

    def __init__(self, path: Path, name: str):
        role, _, rank = name.partition("-")
        self.pid = TRACKS.get(role, 9000) + int(rank or 0)
        self._clock_ns = time.time_ns() - time.monotonic_ns()  # of the day, without its jumps
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._state: tuple[str, Facts, int] = ("", {}, 0)
        self._write(ph="M", name="process_name", args={"name": name})
        self._write(ph="M", name="process_labels", args={"labels": os.uname().nodename})

    def state(self, name: str, facts: Facts, anew: bool = False) -> None:
        last, about, began = self._state
        if (last, about) != (name, facts) or anew:
            words = f"{last}: {about['phase']}" if "phase" in about else last
            now = (time.monotonic_ns() + self._clock_ns) // 1000
            if last:
                self._write(ph="X", name=words, ts=began, dur=now - began, args=about)
            self._state = (name, facts, now)

    def close(self) -> None:
        self.state("over", {})  # ends the last one
        os.close(self._file)

    def _write(self, **event: object) -> None:
        line = json.dumps({"pid": self.pid, "tid": 0, **event}, separators=(",", ":")) + ",\n"
        with suppress(OSError):  # a full disk costs the trace, not the run
            os.write(self._file, line.encode())
