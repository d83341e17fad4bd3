"""What a worker writes to RUN/trace.json (log.trace): Chrome trace events, one per line.

Takes what the worker says on its board, gives slices, counters and arrows on a track of its own:

    tid 0    states, as slices (generating, training: pack, waiting for batch, …)
    tid 1    training steps
    tid 2 …  running sequences, one lane each

All workers append to one file with O_APPEND, one write per event, so lines do not mix and no merge
is needed: ui.perfetto.dev and chrome://tracing open an array that is not closed. Times are whole
microseconds of one clock: the monotonic clock plus an offset that the controller measures once. A
slice is written when it ends, so the last state of a killed worker is missing.
"""

import heapq
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STATES, STEPS, LANES = 0, 1, 2
LONGEST_LINE = 2**16
TRACKS = {"rollout": 1000, "train": 2000, "verify": 3000}
STEP_ENDS_WITH = ("waiting for batch", "saving")
Facts = dict[str, object]


@dataclass(frozen=True)
class TraceFile:
    """Made by the controller before it starts a worker; pickled to each."""

    path: Path
    clock_us: int = field(default_factory=lambda: (time.time_ns() - time.monotonic_ns()) // 1000)

    def begin(self) -> None:
        """Open the array, or continue that of a resumed run after its last whole line."""
        with suppress(OSError), self.path.open("ab+") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
            file.seek(start)
            end = start + file.read().rfind(b"\n") + 1
            file.truncate(end)
            if not end:
                file.write(b"[\n")

    def now(self) -> int:
        return time.monotonic_ns() // 1000 + self.clock_us

    def arrow(self, group: int, cell: int) -> int:
        """An id for one trajectory; two starts of one run give different ones."""
        start = self.clock_us // 1_000_000 % 2**16
        return (start << 36) + (group % 2**24 << 12) + cell % 2**12


class Tracer:
    """A worker's track. `name` is the worker's: "rollout-0"."""

    def __init__(self, file: TraceFile, name: str):
        role, _, rank = name.partition("-")
        self.pid = TRACKS.get(role, 9000) + int(rank or 0)
        self._clock = file
        self._file = os.open(file.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._state: tuple[str, Facts, int] | None = None
        self._step: tuple[int, int, int] | None = None  # number, version, begin
        self._running = (-1, -1)
        self._began: dict[int, tuple[int, int]] = {}  # sequence: lane, begin
        self._first: dict[int, int] = {}
        self._free: list[int] = []
        self._num_lanes = 0
        self._about("process_name", STATES, name=name)
        self._about("process_sort_index", STATES, sort_index=self.pid)
        self._about("thread_name", STATES, name="states")
        if role == "train":
            self._about("thread_name", STEPS, name="steps")

    def state(self, name: str, facts: Facts, anew: bool = False) -> None:
        if self._state is not None and self._state[:2] == (name, facts) and not anew:
            return
        now = self._clock.now()
        self._end_state(now)
        if self._step is not None and name in STEP_ENDS_WITH:
            step, version, began = self._step
            self._slice(STEPS, f"step {step}", began, now, {"step": step, "version": version})
            self._step = None
        self._state = (name, facts, now)

    def step(self, step: int, version: int, trajectories: Sequence[tuple[int, int]]) -> None:
        """A training step begins. An arrow ends at each of its trajectories (group, ring cell)."""
        now = self._clock.now()
        self._step = (step, version, now)
        for group, cell in trajectories:
            self._arrow("f", STEPS, now + 1, group, cell)

    def running(self, num: int, version: int) -> None:
        if self._running != (num, version):
            self._running = (num, version)
            for name, value in (("running sequences", num), ("version", version)):
                self._write("C", STATES, name, self._clock.now(), args={name: value})

    def begin_sequence(self, key: int) -> None:
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self._num_lanes = self._num_lanes, self._num_lanes + 1
            self._about("thread_name", LANES + lane, name=f"sequence {lane}")
        self._began[key] = (lane, self._clock.now())

    def first_token(self, key: int) -> None:
        self._first[key] = self._clock.now()

    def end_sequence(self, key: int, group: int, cell: int, facts: Facts) -> None:
        """The arrow starts inside the slice: viewers bind it to the slice around its time."""
        lane, began = self._began.pop(key)
        heapq.heappush(self._free, lane)
        now = max(self._clock.now(), began + 2)
        self._slice(LANES + lane, f"group {group}", began, now, {"group": group, **facts})
        self._slice(LANES + lane, "prefill", began, min(self._first.pop(key, now), now), {})
        if not facts.get("evaluation"):
            self._arrow("s", LANES + lane, now - 1, group, cell)

    def close(self) -> None:
        self._end_state(self._clock.now())
        os.close(self._file)

    def _end_state(self, now: int) -> None:
        if self._state is not None:
            name, facts, began = self._state
            rest = dict(facts)
            phase = rest.pop("phase", None)
            self._slice(STATES, f"{name}: {phase}" if phase else name, began, now, rest)
            self._state = None

    def _slice(self, tid: int, name: str, began: int, end: int, facts: Facts) -> None:
        self._write("X", tid, name, began, dur=end - began, args=facts)

    def _arrow(self, kind: str, tid: int, at: int, group: int, cell: int) -> None:
        more = {"bp": "e"} if kind == "f" else {}
        number = self._clock.arrow(group, cell)
        self._write(kind, tid, "trained in", at, cat="trained", id=number, **more)

    def _about(self, what: str, tid: int, **args: object) -> None:
        self._write("M", tid, what, 0, args=args)

    def _write(self, kind: str, tid: int, name: str, at: int, **more: object) -> None:
        event = {"ph": kind, "pid": self.pid, "tid": tid, "name": name, "ts": at, **more}
        line = json.dumps(event, separators=(",", ":")) + ",\n"
        with suppress(OSError):  # a full disk costs the timeline, not the run
            os.write(self._file, line.encode())
