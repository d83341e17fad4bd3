"""The timeline of a run (log.trace), read for the report.

Takes RUN/trace.json, which the workers wrote (minirl/shm/tracer.py), gives what each worker did
during a few steps near the end. Leaves out sequences, counters and arrows: Perfetto shows those.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.shm.tracer import STATES, STEPS

TRACE = "trace.json"
WAITING = "waiting for "
NUM_STEPS = 5  # shown: the slices of a whole run would be too thin to see


@dataclass(frozen=True)
class Slice:
    """A stretch of time of one worker, in seconds."""

    name: str
    start: float
    end: float

    @property
    def is_wait(self) -> bool:
        return self.name.startswith(WAITING)


@dataclass(frozen=True)
class Window:
    """A stretch of one run. Times are seconds since its start."""

    seconds: float
    steps: tuple[tuple[str, float], ...]  # name, begin
    rows: tuple[tuple[str, tuple[Slice, ...]], ...]  # worker, what it did


def read_window(run_dir: Path) -> Window | None:
    """The last steps before the last one, which an evaluation follows. None: no trace."""
    names: dict[int, str] = {}
    tracks: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for event in _events(run_dir / TRACE):
        try:
            key = (event["pid"], event["tid"])
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                start = event["ts"] / 1e6
                tracks[key].append(Slice(event["name"], start, start + event["dur"] / 1e6))
        except (KeyError, TypeError):
            continue
    rank = next((pid for pid, name in names.items() if name == "train-0"), -1)
    steps = tracks.get((rank, STEPS), [])
    if not steps:
        return None
    # After a resume or a rollback, steps on both sides of it would stand far apart.
    restart = max((s.end for s in tracks[rank, STATES] if s.name == "starting"), default=0.0)
    steps = [step for step in steps if step.start >= restart] or steps
    begin = steps[max(0, len(steps) - 1 - NUM_STEPS)].start
    end = steps[-1].start if len(steps) > 1 else steps[-1].end
    rows = [
        (names[pid], tuple(_cut(tracks[pid, STATES], begin, end)))
        for pid in sorted(names)
        if (pid, STATES) in tracks
    ]
    inside = [(s.name, s.start - begin) for s in steps if begin <= s.start < end]
    return Window(max(end - begin, 1e-6), tuple(inside), tuple(rows))


def _cut(slices: list[Slice], begin: float, end: float) -> Iterator[Slice]:
    for slice in slices:
        if slice.end > begin and slice.start < end:
            yield Slice(slice.name, max(slice.start, begin) - begin, min(slice.end, end) - begin)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """States, steps and names; a torn line is dropped. The file may be long, so other lines are
    not parsed."""
    wanted = (f'"tid":{STATES},', f'"tid":{STEPS},')
    try:
        file = path.open(errors="replace")
    except OSError:
        return
    with file:
        for text in file:
            if not any(mark in text for mark in wanted):
                continue
            try:
                event = json.loads(text.strip().removesuffix(","))
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
