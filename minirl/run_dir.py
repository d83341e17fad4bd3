"""A run directory, read. Whatever is missing, half-written or of another release is left out, not
an error; only a path that is no run directory is one.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fcntl import LOCK_NB, LOCK_SH, flock
from functools import cached_property
from pathlib import Path
from typing import Any

from minirl.errors import RecipeError
from minirl.journal import LOCK

Line = dict[str, Any]
MARKS = ("recipe.toml", "metrics.jsonl", "summary.json")


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # by Ctrl-C, and saved
    STALLED = "stalled"  # nothing moved for log.stall_s
    FAILED = "failed"  # it ended without a result


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def recipe(self) -> Line:
        """Its values by dotted key, as they are: a recipe of another release is shown too."""
        try:
            tree = tomllib.loads((self.path / "recipe.toml").read_text())
        except (OSError, ValueError):
            return {}
        return dict(_flatten(tree))

    @cached_property
    def metrics(self) -> list[Line]:
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def evals(self) -> list[Line]:
        return read_lines(self.path / "evals.jsonl")

    @cached_property
    def samples(self) -> list[Line]:
        return read_lines(self.path / "samples.jsonl")

    @cached_property
    def batches(self) -> list[Line]:
        return read_lines(self.path / "batches.jsonl")

    @cached_property
    def summary(self) -> Line:
        return _read_object(self.path / "summary.json")

    @cached_property
    def machine(self) -> Line:
        return _read_object(self.path / "machine.json")

    @property
    def changed(self) -> float:
        """When it last wrote anything that counts."""
        names = (*MARKS, "stall.txt", LOCK)
        return max((_modified(self.path / name) for name in names), default=0.0)

    @property
    def state(self) -> RunState:
        if self._is_held():
            return RunState.RUNNING
        ended = _modified(self.path / "summary.json")
        if self.summary and ended >= _modified(self.path / "metrics.jsonl"):
            return RunState.FINISHED if self.summary.get("finished") else RunState.STOPPED
        if _modified(self.path / "stall.txt") >= _modified(self.path / "metrics.jsonl") > 0:
            return RunState.STALLED
        return RunState.FAILED

    def _is_held(self) -> bool:
        try:
            with (self.path / LOCK).open() as file:
                flock(file, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def open_run(path: Path) -> RunDir:
    """The one error: a path at which there is no run."""
    if not path.is_dir():
        rule = "is a file" if path.exists() else "no such directory"
        remedy = "name a run directory, such as those that minirl runs lists"
        raise RecipeError("RUN", str(path), rule, remedy)
    if not is_run(path):
        rule = f"is no run directory: it has none of {', '.join(MARKS)}"
        raise RecipeError("RUN", str(path), rule, "name a run directory, as minirl runs lists them")
    return RunDir(path)


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def read_lines(path: Path) -> list[Line]:
    """Whole JSON objects with a step, without those that a rollback cancels."""
    kept: list[Line] = []
    try:
        texts = path.read_text(errors="replace").splitlines()
    except OSError:
        return kept
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict):
            continue
        if isinstance(last := line.get("rolled_back_to"), int):
            kept = [earlier for earlier in kept if earlier["step"] <= last]
        elif isinstance(line.get("step"), int):
            kept.append(line)
    return kept


def _read_object(path: Path) -> Line:
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _flatten(tree: Line, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
