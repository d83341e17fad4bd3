"""The timeline of a run (log.trace), read for the report.

Takes RUN/trace.json, which the workers wrote (minirl/shm/tracer.py), gives what each worker did
during a few steps near the end. Leaves out sequences: Perfetto shows those.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from minirl.shm.tracer import STATES

STEP = "training: pack "  # the slice with which a step begins
NUM_STEPS = 5  # shown: the slices of a whole run would be too thin to see


class Slice(NamedTuple):
    name: str
    start: float  # seconds
    end: float


class Window(NamedTuple):
    """A stretch of one run. Times are seconds since its start."""

    seconds: float
    steps: dict[str, float]  # when each began
    rows: dict[str, tuple[Slice, ...]]  # by worker


def read_window(run_dir: Path) -> Window | None:
    """The last steps before the last one, which an evaluation follows. None: no trace."""
    names: dict[int, str] = {}
    tracks: dict[str, list[Slice]] = defaultdict(list)
    for event in _events(run_dir / "trace.json"):
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            start, worker = event["ts"] / 1e6, names.get(event["pid"], "")
            tracks[worker].append(Slice(event["name"], start, start + event["dur"] / 1e6))
    steps = [slice for slice in tracks["train-0"] if slice.name.startswith(STEP)]
    if len(steps) < 2:
        return None
    begin, end = steps[max(0, len(steps) - 1 - NUM_STEPS)].start, steps[-1].start
    workers = [names[pid] for pid in sorted(names)]
    rows = {worker: tuple(_cut(tracks[worker], begin, end)) for worker in workers}
    starts = {s.name.removeprefix(STEP): s.start for s in _cut(steps, begin, end)}
    return Window(max(end - begin, 1e-6), starts, rows)


def _cut(slices: list[Slice], begin: float, end: float) -> Iterator[Slice]:
    for slice in slices:
        if slice.end > begin and slice.start < end:
            yield Slice(slice.name, max(slice.start, begin) - begin, min(slice.end, end) - begin)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """States and names; the many lines of sequences are not parsed, torn ones dropped."""
    with suppress(OSError), path.open(errors="replace") as file:
        for text in file:
            if f'"tid":{STATES},' in text:
                with suppress(ValueError):
                    yield json.loads(text.strip().removesuffix(","))
