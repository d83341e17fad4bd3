"""Every trained batch on disk, so that training can be done again without any engine.

    record/step-000012.safetensors   tokens, mask, logprobs and versions of all trajectories, end to
                                     end; in its header, as JSON: step, version, metrics, and the
                                     groups with their rewards

Takes a batch's descriptors while its cells are still its own, copies them, and writes on a thread
of its own: training does not wait for the disk. Written aside and renamed; nothing is pickled.
Gives them back as a Batch in another ring. A disk that is full costs records, never the run.
"""

import json
import math
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.config import BYTES_PER_TOKEN, Config
from minirl.errors import MinirlError
from minirl.lines import BROKEN
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.ring import TrajectoryRing, TrajectoryView

FOLDER = "record"
COLUMNS = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
MAX_WAITING = 8  # batches in memory that the disk has not taken yet; then training waits


@dataclass(frozen=True)
class Recorded:
    """A batch apart from any ring. Cells are counted anew, in the order of its trajectories."""

    batch: Batch
    values: dict[str, float | None]  # its step's metrics; None: not finite, or not there
    made_by: dict[str, int]  # ranks, and threads to a rank: what a bit may depend on
    columns: dict[str, NDArray]

    @property
    def lengths(self) -> list[int]:
        return [t.length for group in self.batch.groups for t in group.trajectories]


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:06d}.safetensors"


def most_bytes(config: Config) -> int:
    """What a step takes at most: every trajectory as long as it may get."""
    num_trajectories = config.train.batch_size * config.rollout.group_size
    return num_trajectories * config.max_tokens_per_trajectory * BYTES_PER_TOKEN


def take(
    batch: Batch,
    ring: TrajectoryRing,
    values: dict[str, float | None],
    made_by: dict[str, int] | None = None,
) -> Recorded:
    """A copy of all that the batch's cells hold."""
    views = [ring.read(t.cell, g.id) for g in batch.groups for t in g.trajectories]
    columns = {name: np.concatenate([getattr(view, name) for view in views]) for name in COLUMNS}
    shown = {name: finite(value) for name, value in values.items()}
    return Recorded(batch, shown, made_by or {}, columns)


def finite(value: float | None) -> float | None:
    """JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None


# Writing --------------------------------------------------------------------------------------


def write(path: Path, recorded: Recorded) -> None:
    from safetensors.numpy import save_file

    header = {
        "step": recorded.batch.step,
        "version": recorded.batch.version,
        "values": recorded.values,
        "made_by": recorded.made_by,
        "groups": [group.as_json() for group in recorded.batch.groups],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    try:
        save_file(recorded.columns, aside, {"batch": json.dumps(header)})
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


class Recorder:
    """Its thread writes; the controller only copies."""

    def __init__(
        self, run_dir: Path, ring: TrajectoryRing, made_by: dict[str, int], last_step: int
    ):
        self._run_dir, self._ring, self._made_by = run_dir, ring, made_by
        self._queue: queue.Queue[Recorded | None] = queue.Queue(MAX_WAITING)
        self._missing: list[str] = []
        self.num_missing = 0
        for path in (run_dir / FOLDER).glob("step-*"):  # of steps that will be trained again
            if path.stem > path_of(run_dir, last_step).stem:
                path.unlink()
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="recorder")
        self._thread.start()

    def keep(self, batch: Batch, values: dict[str, float | None]) -> None:
        """Before the batch's cells are handed on."""
        self._queue.put(take(batch, self._ring, values, self._made_by))

    def _write_all(self) -> None:
        while (recorded := self._queue.get()) is not None:
            try:
                write(path_of(self._run_dir, recorded.batch.step), recorded)
            except Exception as error:  # safetensors has its own kind for a full disk
                self._missing.append(f"step {recorded.batch.step} was not recorded: {error}")

    def problems(self) -> list[str]:
        """What could not be written since the last look."""
        found, self._missing = self._missing, []
        self.num_missing += len(found)
        return found

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


# Reading --------------------------------------------------------------------------------------


def steps_of(run_dir: Path) -> list[int]:
    names = [
        path.stem.removeprefix("step-") for path in (run_dir / FOLDER).glob("step-*.safetens*")
    ]
    return sorted(int(name) for name in names if name.isdecimal())


def read(path: Path) -> Recorded:
    """Whatever is wrong with the file is one MinirlError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {})["batch"])
            columns = {name: file.get_tensor(name) for name in COLUMNS}
        return _checked(header, columns)
    except OSError as error:
        raise MinirlError(f"{path} cannot be read ({error.strerror or error})") from None
    except (SafetensorError, *BROKEN) as why:
        raise MinirlError(f"{path} is no recorded batch: {type(why).__name__}: {why}") from None


def _checked(header: dict[str, Any], columns: dict[str, NDArray]) -> Recorded:
    groups, cell = [], 0
    for group in header["groups"]:
        trajectories = []
        for fields in group["trajectories"]:
            numbers: dict[str, Any] = {**_ints(fields), "stop": StopReason(fields["stop"])}
            trajectories.append(Trajectory(**{**numbers, "cell": cell}))
            cell += 1
        rewards = tuple(float(reward) for reward in group["rewards"])
        if not trajectories or len(rewards) != len(trajectories):
            raise ValueError(f"group {group['id']} has not one reward to a trajectory")
        masked = frozenset(_int(place) for place in group["masked"])
        ids = (_int(group["id"]), _int(group["prompt_index"]))
        groups.append(Group(*ids, tuple(trajectories), rewards, masked))
    batch = Batch(_int(header["step"]), _int(header["version"]), tuple(groups))
    values = {str(k): None if v is None else float(v) for k, v in header["values"].items()}
    recorded = Recorded(batch, values, _ints(header["made_by"]), columns)
    _check_columns(recorded)
    return recorded


def _check_columns(recorded: Recorded) -> None:
    if not recorded.lengths or min(recorded.lengths) < 1:
        raise ValueError("it has no trajectory, or an empty one")
    total = sum(recorded.lengths)
    for name, dtype in COLUMNS.items():
        column = recorded.columns[name]
        if column.dtype != dtype or column.shape != (total,):
            raise ValueError(f"{name} is not {total} times {np.dtype(dtype).name}")
    if recorded.columns["tokens"].min() < 0 or recorded.columns["mask"].max() > 1:
        raise ValueError("it has tokens below 0, or a mask that is not 0 or 1")


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no whole number")
    return value


def _ints(fields: dict[str, Any]) -> dict[str, int]:
    return {name: _int(value) for name, value in fields.items()}


def ring_for(records: Sequence[Recorded]) -> TrajectoryRing:
    """A ring that holds any one of them."""
    most = max(len(recorded.lengths) for recorded in records)
    return TrajectoryRing(most, max(max(recorded.lengths) for recorded in records))


def put(recorded: Recorded, ring: TrajectoryRing) -> Batch:
    """Into the first cells of a ring, whatever these held."""
    start, cell = 0, 0
    for group in recorded.batch.groups:
        for trajectory in group.trajectories:
            at = slice(start, start + trajectory.length)
            view = TrajectoryView(**{name: recorded.columns[name][at] for name in COLUMNS})
            ring.restore(cell, group.id, view)
            start, cell = at.stop, cell + 1
    return _with_cells(recorded.batch)


def _with_cells(batch: Batch) -> Batch:
    cells = count()
    groups = (
        g._replace(trajectories=tuple(t._replace(cell=next(cells)) for t in g.trajectories))
        for g in batch.groups
    )
    return replace(batch, groups=tuple(groups))
