"""A run directory, read. Whatever is missing, half-written or of another release is left out, not
an error; only a path that is no run directory is one.
"""

import json
import re
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
STEP = re.compile(rb'\{"step": ?(\d+)')
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
        return self._by_step("metrics.jsonl")

    @cached_property
    def samples(self) -> list[Line]:
        return _latest(read_lines(self.path / "samples.jsonl"), ("step", "group"))

    @cached_property
    def trajectory_places(self) -> dict[int, int]:
        """Where each step's line of trajectories.jsonl begins: a long run's are not all read."""
        places: dict[int, int] = {}
        at = 0
        for text in _raw_lines(self.path / "trajectories.jsonl"):
            match = STEP.match(text)
            if match and text.endswith(b"}\n"):
                step = int(match[1])
                if places and step <= next(reversed(places)):  # resumed from before it
                    places = {s: place for s, place in places.items() if s < step}
                places[step] = at
            at += len(text)
        return places

    def trajectories(self, step: int) -> Line:
        """What a step trained; empty where that is not known."""
        if step not in self.trajectory_places:
            return {}
        with (self.path / "trajectories.jsonl").open("rb") as file:
            file.seek(self.trajectory_places[step])
            try:
                return json.loads(file.readline())
            except ValueError:
                return {}

    @cached_property
    def lengths(self) -> list[Line]:
        return self._by_step("lengths.jsonl")

    @cached_property
    def evals(self) -> list[Line]:
        return _latest(read_lines(self.path / "evals.jsonl"), ("version",))

    @cached_property
    def summary(self) -> Line:
        return _read_object(self.path / "summary.json")

    @cached_property
    def machine(self) -> Line:
        """Of older runs: what the summary says."""
        return _read_object(self.path / "machine.json") or self.summary

    def _by_step(self, name: str) -> list[Line]:
        return _latest(read_lines(self.path / name), ("step",))

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

    def last(self, name: str) -> float | None:
        return next((line[name] for line in reversed(self.metrics) if name in line), None)


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


def read_lines(path: Path) -> Iterator[Line]:
    """Lines that are whole JSON objects; others were cut by a crash."""
    try:
        file = path.open(errors="replace")
    except OSError:
        return
    with file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError:
        return


def _latest(lines: Iterator[Line], keys: tuple[str, ...]) -> list[Line]:
    """A run that was resumed goes over some steps again: the later account counts. The first key
    only grows within an account, in which all keys together come once."""
    kept: list[Line] = []
    here: set[tuple[Any, ...]] = set()  # of the last value of the first key
    for line in lines:
        at = line.get(keys[0])
        if not isinstance(at, (int, float)):
            continue
        mark = tuple(str(line.get(key)) for key in keys)
        if kept and (at < kept[-1][keys[0]] or mark in here):
            while kept and kept[-1][keys[0]] >= at:
                kept.pop()
        if not kept or kept[-1][keys[0]] != at:
            here = set()
        here.add(mark)
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
