"""The files of a run: the only module of the soak that knows their names and how they are read.

Takes a run directory; gives the lines of its logs, the state in its newest checkpoint, and its last
evaluation. `tear` leaves the logs as a crash does: the last line half written. What a checkpoint
vouches for was on the disk before it (the controller flushes it first), so a crash does not touch
it: a last line after the checkpoint's step is cut in half, and after any other line the first half
of one is added.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minirl.run_dir import read_lines
from minirl.train.checkpoint import newest_whole

Line = dict[str, Any]
Z95 = 1.96  # half a 95 % interval, in standard errors

METRICS, SAMPLES, EVALS = "metrics.jsonl", "samples.jsonl", "evals.jsonl"
TRAINED = "batches.jsonl"  # what each step trained
ALL_STEPS = (METRICS, SAMPLES, TRAINED)  # each has every step
STATUS = "status.json"
TORN = (*ALL_STEPS, EVALS, STATUS)


def lines(run_dir: Path, name: str) -> list[Line]:
    return read_lines(run_dir / name)


def last_step(run_dir: Path) -> int:
    found = lines(run_dir, METRICS)
    return found[-1]["step"] if found else 0


def status(run_dir: Path) -> Line | None:
    """What the run shows of itself: pid, state, time, lanes. None: it cannot be read now."""
    try:
        found = json.loads((run_dir / STATUS).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint; `folder` is None where there is none."""

    folder: Path | None
    state: Line
    broken: list[str]  # newer ones that are not whole

    @property
    def step(self) -> int:
        return self.state.get("step", 0)


def saved(run_dir: Path) -> Saved:
    if not (run_dir / "checkpoints").is_dir():
        return Saved(None, {}, [])
    folder, state, broken = newest_whole(run_dir)
    return Saved(folder, asdict(state) if state else {}, broken)


# -- one line of TRAINED


def group_ids(line: Line) -> list[int]:
    return [group["id"] for group in line.get("groups", [])]


def prompts(line: Line) -> list[int]:
    return [group["prompt"] for group in line["groups"]]


def trained_versions(sample: Line) -> list[int]:
    """Of the trained tokens of an answer in SAMPLES: only these have a gap, by the trainer."""
    pairs = zip(sample.get("token_versions", []), sample.get("token_gaps", []), strict=True)
    return [version for version, gap in pairs if gap is not None]


# -- evaluations


@dataclass(frozen=True)
class Evaluated:
    accuracy: float
    low: float
    high: float
    count: int
    steps: int

    @property
    def error(self) -> float:
        return (self.high - self.low) / (2 * Z95)

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} ({self.low:.1%} to {self.high:.1%})"


def last_evaluation(run_dir: Path) -> Evaluated | None:
    """Of the last step; None where it was not evaluated."""
    evals, last = lines(run_dir, EVALS), last_step(run_dir)
    if not evals or evals[-1]["step"] != last:
        return None
    found = {name: evals[-1][name] for name in ("accuracy", "low", "high", "count")}
    return Evaluated(**found, steps=last)


# -- torn files


def tear(run_dir: Path, dice: random.Random) -> list[str]:
    """Tears some of the files, at least one if there is any, and gives their names."""
    paths = [run_dir / name for name in TORN]
    there = [path.name for path in paths if path.is_file() and path.stat().st_size]
    chosen = sorted(dice.sample(there, dice.randint(1, len(there)))) if there else []
    saved_step = saved(run_dir).step
    for name in chosen:
        _tear(run_dir / name, saved_step, dice)
    return chosen


def _tear(path: Path, saved_step: int, dice: random.Random) -> None:
    data = path.read_bytes()
    end = data.rstrip(b"\n").rfind(b"\n") + 1
    last = data[end:].rstrip(b"\n")
    part = last[: dice.randint(1, max(1, len(last) - 1))]
    found = read_lines(path)
    if path.name == STATUS or (found and found[-1].get("step", 0) > saved_step):
        path.write_bytes(data[:end] + part)
    else:
        with path.open("ab") as file:
            file.write(part)
