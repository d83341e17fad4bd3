"""All that the dashboard shows, as one record, and the file that it travels in.

Takes a Snapshot, gives status.json: written aside and renamed, so that a reader sees a whole one or
none. A reader of another minirl's file takes the fields that it knows; a file that cannot be read
is None, never an exception.
"""

import json
import os
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

STATUS = "status.json"
STRIP_S = 60.0  # what a lane's strip covers
BUCKET_S = 0.5  # of one letter of a strip
NUM_BUCKETS = int(STRIP_S / BUCKET_S)
RARE = "rpc"  # letters of reloads, publications, checkpoints: short, so they are told by counts
MAX_POINTS = 240  # of a curve
STARTING, RUNNING, FINISHED = "starting", "running", "finished"
STOPPED, FAILED = "stopped", "failed"
OVER = (FINISHED, STOPPED, FAILED)


@dataclass(frozen=True)
class Lane:
    """One engine or rank."""

    name: str = ""
    state: str = ""  # "generating", "waiting for a batch", …
    since_s: float = 0.0
    beat_s: float = 0.0
    version: int = -1
    running: int = 0  # sequences
    idle: float = 0.0  # share of the strip's time
    strip: str = ""  # a letter a bucket (observer.py), oldest first
    memory_bytes: int = 0


@dataclass(frozen=True)
class Curve:
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    step: int = 0
    prompt: str = ""
    answer: str = ""
    reference: str = ""
    reward: float = 0.0
    versions: list[int] = field(default_factory=list)  # of the first and the last token
    stop: str = ""


@dataclass(frozen=True)
class Note:
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Snapshot:
    name: str = ""
    host: str = ""
    pid: int = 0
    time: float = 0.0  # when it was made, Unix seconds
    state: str = STARTING
    reason: str = ""  # of the end
    doing: str = ""  # what the controller is at or waits for
    step: int = 0
    steps: int = 0
    version: int = 0
    seconds: float = 0.0  # since training began
    eta_s: float | None = None
    verdict: str = ""
    lanes: list[Lane] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    batch_size: int = 0
    staleness: list[int] = field(default_factory=list)  # trained tokens by staleness, recent steps
    max_staleness: int = 0
    max_new_tokens: int = 0
    tokens_per_s: float = 0.0  # generated in the last seconds
    curves: dict[str, Curve] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # the last step's metrics
    accuracies: Curve = field(default_factory=Curve)  # by version
    free_bytes: int = 0
    samples: list[Sample] = field(default_factory=list)  # newest last
    notes: list[Note] = field(default_factory=list)
    cost: float = 0.0  # CPU seconds a second that the reporter takes

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def write(snapshot: Snapshot, run_dir: Path) -> None:
    aside = run_dir / f".{STATUS}.tmp"
    try:
        aside.write_text(json.dumps(snapshot, default=vars, separators=(",", ":")))
        os.replace(aside, run_dir / STATUS)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read(run_dir: Path) -> Snapshot | None:
    try:
        return _typed(Snapshot, json.loads((run_dir / STATUS).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _typed(wanted: Any, value: Any) -> Any:
    """The JSON value as that type, or a TypeError."""
    if is_dataclass(wanted):
        hints = get_type_hints(wanted)
        known = {f.name: hints[f.name] for f in fields(wanted) if f.name in _dict(value)}
        return wanted(**{name: _typed(hint, value[name]) for name, hint in known.items()})  # type: ignore[operator]
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is list and isinstance(value, list):
        return [_typed(args[0], item) for item in value]
    if origin is dict:
        return {str(key): _typed(args[1], item) for key, item in _dict(value).items()}
    if type(None) in args:
        return None if value is None else _typed(args[0], value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is wanted:
        return value
    raise TypeError(f"{value!r} is no {wanted}")


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no table")
    return value


def thinned(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """At most `limit` points: means of equally many neighbours."""
    num = len(curve.x)
    if num <= limit:
        return curve
    bounds = [round(i * num / limit) for i in range(limit + 1)]

    def means(values: list[float]) -> list[float]:
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]

    return Curve(means(curve.x), means(curve.y))
