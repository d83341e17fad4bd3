"""The timeline of a run (log.trace): who did what when, and which step trained what was sampled.

A worker's `Tracer` appends to a file of its own, trace/rollout-0.jsonl; `merge` turns all of them
into trace.json.gz, which ui.perfetto.dev and chrome://tracing open. The controller merges when a
run ends; of one that runs, failed or was killed, `minirl trace RUN` does it from the files.

    ["begin", t, {session, boot, wall}]         a process has taken this place
    ["state", t, name, facts]                   from here on, until the next
    ["step", t, step, version, group ids]       a training step; ends with the next wait
    ["sequence", t, lane, began, first, facts]  a trajectory; t is its end, `first` its first token
    ["running", t, sequences, version]          at once, in an engine

Times are time.monotonic, which all processes of one boot share; `begin` ties it to the wall clock,
so that a run that went on after a reboot has one axis.
"""

import gzip
import heapq
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

FOLDER, MERGED = "trace", "trace.json.gz"
WAITING = "waiting for "
STEP_ENDS_WITH = ("waiting for batch", "saving")
COLOURS = {  # chrome://tracing's own names; Perfetto picks by name
    "generating": "good",
    "reloading": "terrible",
    "training": "rail_response",
    "publishing": "bad",
    "grading": "rail_animation",
}


def boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


class Tracer:
    """One worker's pen. Each line is written at once: what a killed worker did is there."""

    def __init__(self, path: Path, session: str = ""):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._now: tuple[str, dict[str, object]] | None = None
        self._running = (-1, -1)
        self._began: dict[int, tuple[int, float]] = {}  # sequences: (lane, when)
        self._first: dict[int, float] = {}
        self._free: list[int] = []
        about = {"session": session, "boot": boot_id(), "wall": time.time()}
        self._write("begin", time.monotonic(), about)

    def _write(self, *line: object) -> None:
        with suppress(OSError):  # a full disk costs the timeline, not the run
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def state(self, name: str, facts: dict[str, object], anew: bool = False) -> None:
        if anew or self._now != (name, facts):
            self._now = (name, facts)
            self._write("state", time.monotonic(), name, facts)

    def step(self, step: int, version: int, groups: Iterable[int]) -> None:
        self._write("step", time.monotonic(), step, version, list(groups))

    def running(self, num: int, version: int) -> None:
        if self._running != (num, version):
            self._running = (num, version)
            self._write("running", time.monotonic(), num, version)

    def begin_sequence(self, key: int) -> None:
        lane = heapq.heappop(self._free) if self._free else len(self._began)
        self._began[key] = (lane, time.monotonic())

    def first_token(self, key: int) -> None:
        self._first[key] = time.monotonic()

    def end_sequence(self, key: int, facts: dict[str, object]) -> None:
        lane, began = self._began.pop(key)
        heapq.heappush(self._free, lane)
        now = time.monotonic()
        self._write("sequence", now, lane, began, self._first.pop(key, now), facts)


# Reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """A stretch of time of one worker, in seconds since the run began."""

    name: str
    start: float
    end: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sequence(Slice):
    lane: int = 0
    first: float = 0.0
    session: str = ""


@dataclass(frozen=True)
class Step(Slice):
    step: int = 0
    groups: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True)
class Running:
    at: float
    num: int
    version: int


Event = Slice | Running


def workers(run_dir: Path) -> list[str]:
    """Who left a trace: engines, then trainer ranks, then verifiers."""
    order = {"rollout": 0, "train": 1, "verify": 2}
    names = [path.stem for path in (run_dir / FOLDER).glob("*.jsonl")]

    def key(name: str) -> tuple[int, int, str]:
        role, _, rank = name.rpartition("-")
        return order.get(role, 3), int(rank) if rank.isdecimal() else 0, name

    return sorted(names, key=key)


def is_merged(run_dir: Path) -> bool:
    """And nothing was written since."""
    merged, parts = run_dir / MERGED, (run_dir / FOLDER).glob("*.jsonl")
    newest = max((path.stat().st_mtime for path in parts), default=0.0)
    return merged.is_file() and merged.stat().st_mtime >= newest


class Reader:
    """All workers' files on one clock, that begins with the first of them."""

    def __init__(self, run_dir: Path):
        self._folder = run_dir / FOLDER
        self.workers = workers(run_dir)
        self._offsets: dict[str, float] = {}  # of a boot: wall clock - monotonic
        self._zero = float("inf")
        for name in self.workers:
            for line in self._lines(name):
                if line[0] == "begin":
                    about = line[2]
                    self._offsets.setdefault(about["boot"], about["wall"] - line[1])
                    self._zero = min(self._zero, line[1] + self._offsets[about["boot"]])

    def _lines(self, worker: str) -> Iterator[list[Any]]:
        with (self._folder / f"{worker}.jsonl").open(errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:  # cut by a crash
                    continue
                if isinstance(line, list) and len(line) >= 3:
                    yield line

    def events(self, worker: str) -> Iterator[Event]:
        """In the order in which they end. What was going on when a process was killed ends when it
        is replaced, or else with the last that is known of it."""
        shift, session, last = 0.0, "", 0.0
        state: tuple[str, float, dict[str, Any]] | None = None
        step: list[Any] | None = None
        for line in self._lines(worker):
            kind = line[0]
            if kind == "begin":
                shift = self._offsets[line[2]["boot"]] - self._zero
                is_replaced = line[2].get("session", "") == session
                end = line[1] + shift if is_replaced else last
                yield from _close(state, step, end, session, is_cut=True)
                state, step, session = None, None, line[2].get("session", "")
            at = line[1] + shift
            last = max(last, at)
            if kind == "state":
                if step is not None and line[2] in STEP_ENDS_WITH:
                    yield from _close(state, step, at, session)
                    state = step = None
                yield from _close(state, None, at, session)
                state = (line[2], at, line[3])
            elif kind == "step":
                yield from _close(state, None, at, session)
                state = None
                step = [at, *line[2:]]
            elif kind == "sequence":
                _, _, lane, began, first, facts = line
                name = f"group {facts.get('group')}"
                yield Sequence(name, began + shift, at, facts, lane, first + shift, session)
            elif kind == "running":
                yield Running(at, line[2], line[3])
        yield from _close(state, step, last, session, is_cut=True)

    def states(self, worker: str) -> Iterator[Slice]:
        return (e for e in self.events(worker) if type(e) is Slice)

    def steps(self) -> list[Step]:
        """As rank 0 trained them."""
        if "train-0" not in self.workers:
            return []
        return [event for event in self.events("train-0") if isinstance(event, Step)]


def _close(
    state: tuple[str, float, dict[str, Any]] | None,
    step: list[Any] | None,
    at: float,
    session: str,
    is_cut: bool = False,
) -> Iterator[Slice]:
    cut = {"cut": True} if is_cut else {}
    if state is not None:
        yield Slice(state[0], state[1], at, {**state[2], **cut})
    if step is not None:
        began, number, version, groups = step
        facts = {"version": version, "groups": len(groups), **cut}
        yield Step(f"step {number}", began, at, facts, number, tuple(groups), session)


# Writing trace.json.gz -------------------------------------------------------------------------


def merge(run_dir: Path) -> Path | None:
    """None where the run was not traced. Written aside and renamed."""
    reader = Reader(run_dir)
    if not reader.workers:
        return None
    path = run_dir / MERGED
    aside = path.with_suffix(".tmp")
    with gzip.open(aside, "wt", compresslevel=5) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        _write_events(file, reader)
        file.write("\n]}\n")
    os.replace(aside, path)
    return path


def _write_events(file: IO[str], reader: Reader) -> None:
    trained = {(s.session, group): s for s in reader.steps() for group in s.groups}
    to = reader.workers.index("train-0") + 1 if "train-0" in reader.workers else 0
    before = ""
    num_flows = 0
    for pid, worker in enumerate(reader.workers, start=1):
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": worker}},
            {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        ]
        lanes = {0}
        events += _thread(pid, 0, worker)
        for event in reader.events(worker):
            if isinstance(event, Sequence):
                if event.lane + 1 not in lanes:
                    lanes.add(event.lane + 1)
                    events += _thread(pid, event.lane + 1, f"sequence {event.lane}")
                events += _sequence(pid, event)
                step = trained.get((event.session, event.facts.get("group", -1)))
                if step is not None:
                    num_flows += 1
                    events += _flow(num_flows, pid, event, to, step)
            elif isinstance(event, Running):
                args = {"sequences": event.num}
                events.append(_event("C", pid, 0, "running sequences", event.at, args=args))
                args = {"version": event.version}
                events.append(_event("C", pid, 0, "version", event.at, args=args))
            else:
                events.append(_complete(pid, 0, event))
            if len(events) > 1000:
                before = _flush(file, events, before)
        before = _flush(file, events, before)


def _flush(file: IO[str], events: list[dict[str, Any]], before: str) -> str:
    for event in events:
        file.write(before + json.dumps(event, separators=(",", ":")))
        before = ",\n"
    events.clear()
    return before


def _thread(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": tid})):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": f"thread_{what}", "args": args}


def _event(kind: str, pid: int, tid: int, name: str, at: float, **more: object) -> dict[str, Any]:
    return {"ph": kind, "pid": pid, "tid": tid, "name": name, "ts": round(at * 1e6, 1), **more}


def _complete(pid: int, tid: int, slice: Slice, name: str = "") -> dict[str, Any]:
    facts = dict(slice.facts)
    phase = facts.pop("phase", "")
    shown = name or (f"{slice.name}: {phase}" if phase else slice.name)
    event = _event("X", pid, tid, shown, slice.start, args=facts)
    event["dur"] = round(max(0.0, slice.end - slice.start) * 1e6, 1)
    event["cat"] = "wait" if slice.name.startswith(WAITING) else slice.name.split()[0]
    if slice.name in COLOURS:
        event["cname"] = COLOURS[slice.name]
    return event


def _sequence(pid: int, sequence: Sequence) -> Iterator[dict[str, Any]]:
    yield _complete(pid, sequence.lane + 1, sequence)
    prefill = Slice("prefill", sequence.start, min(sequence.first, sequence.end))
    yield _complete(pid, sequence.lane + 1, prefill)


def _flow(
    number: int, pid: int, sequence: Sequence, to: int, step: Step
) -> Iterator[dict[str, Any]]:
    """An arrow binds to the slice around its time stamp."""
    start = max(sequence.start, sequence.end - 1e-6)
    more = {"cat": "trained", "id": number}
    yield _event("s", pid, sequence.lane + 1, "trained in", start, **more)
    yield _event("f", to, 0, "trained in", step.start + 1e-6, bp="e", **more)
