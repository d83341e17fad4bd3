"""The files of a run directory: how they are written, and how a run is read again.

    metrics.jsonl    one line per step: names and formulas in metrics.py       run_log.py
    evals.jsonl      one line per evaluation: accuracy, interval, answers      run_log.py
    samples.jsonl    log.samples readable answers per step, token by token     run_log.py
    batches.jsonl    one line per step: what it trained, by group              run_log.py
    summary.json     the result, when the run has ended                        run_log.py
    stall.txt        which worker waited for what, when nothing moved          run_log.py
    checkpoints/     Hugging Face folders, step-000040                         train/checkpoint.py
    bad_batches/     batches that went bad; record/: all batches               train/bad_batch.py
    recipe.toml, machine.json, lock, logs/                                     launch.py
    status.json      what the dashboard shows, once a second                   view/dashboard

The `.jsonl` files are append-only and every line has a step. A resume or a rollback to step n
appends {"rolled_back_to": n}; `read_lines`, the one reader, drops what that cancels. A line that a
full disk does not take waits in memory and is written with a later one.

Takes lines, gives files; takes a run directory, gives a `RunDir`. Leaves out what the lines hold.
"""

import json
import os
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from minirl.errors import RecipeError

Line = dict[str, Any]
RUNS = Path("runs")
LOCK = "lock"
MARKS = ("recipe.toml", "metrics.jsonl", "summary.json")


class JsonLines:
    """Appends lines to a file. `error` says why the last one is not on the disk yet."""

    def __init__(self, path: Path):
        self.path = path
        self.error = ""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        self.is_empty = size == 0
        is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._waiting = b"\n" if is_torn else b""

    def write(self, line: Line) -> None:
        self.is_empty = False
        self._waiting += json.dumps(line).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:  # a disk that fills up takes a part of what it is given
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
            self.error = ""
        except OSError as error:
            self.error = error.strerror or type(error).__name__

    def sync(self) -> None:
        self._flush()
        with suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        self._flush()
        os.close(self._fd)


def read_lines(path: Path, key: str = "step") -> list[Line]:
    """Whole JSON objects with a number under `key`, without those that a later rollback cancels. No
    file: no lines."""
    kept: list[Line] = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                continue  # torn by a crash
            if not isinstance(line, dict):
                continue
            if type(step := line.get("rolled_back_to")) is int:
                kept = [earlier for earlier in kept if earlier["step"] <= step]
            elif type(line.get(key)) is int:
                kept.append(line)
    return kept


def write_text(path: Path, text: str) -> None:
    """Atomic: the whole new file, or the one that was there."""
    aside = path.with_suffix(".tmp")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def hold(run_dir: Path) -> IO[str]:
    """The lock of a run directory: one run at a time, and readers see that it runs. The kernel
    releases it however the controller ends."""
    file = (run_dir / LOCK).open("a")
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        file.close()
        remedy = "wait for it, stop it, or name another directory"
        raise RecipeError("--run-dir", str(run_dir), "a run is using it", remedy) from None
    except OSError:
        pass  # a file system without locks: `minirl runs` cannot tell that it runs
    os.utime(run_dir / LOCK)
    return file


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # by Ctrl-C, and saved
    STALLED = "stalled"  # nothing moved for log.stall_s
    FAILED = "failed"  # it ended without a result


def _log(name: str) -> "cached_property[list[Line]]":
    def read(run: "RunDir") -> list[Line]:
        try:
            return read_lines(run.path / f"{name}.jsonl")
        except OSError:
            return []

    return cached_property(read)


@dataclass(frozen=True)
class RunDir:
    """A run directory, read. What is missing, torn or of another release is left out."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def recipe(self) -> Line:
        """Its values by dotted key, as they are: a recipe of another release is shown too."""
        try:
            return _flatten(tomllib.loads((self.path / "recipe.toml").read_text()))
        except (OSError, ValueError):
            return {}

    metrics = _log("metrics")
    evals = _log("evals")
    samples = _log("samples")
    batches = _log("batches")

    @cached_property
    def summary(self) -> Line:
        return self._object("summary.json")

    @cached_property
    def machine(self) -> Line:
        return self._object("machine.json")

    def _object(self, name: str) -> Line:
        try:
            found = json.loads((self.path / name).read_text(errors="replace"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _modified(self, name: str) -> float:
        try:
            return (self.path / name).stat().st_mtime
        except OSError:
            return 0.0

    @property
    def changed(self) -> float:
        """When it last wrote anything that counts."""
        return max(map(self._modified, (*MARKS, "stall.txt", LOCK)))

    @property
    def state(self) -> RunState:
        if self._is_held():
            return RunState.RUNNING
        trained = self._modified("metrics.jsonl")
        if self.summary and self._modified("summary.json") >= trained:
            return RunState.FINISHED if self.summary.get("finished") else RunState.STOPPED
        is_stalled = self._modified("stall.txt") >= trained > 0
        return RunState.STALLED if is_stalled else RunState.FAILED

    def _is_held(self) -> bool:
        try:
            with (self.path / LOCK).open() as file:
                flock(file, LOCK_SH | LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False


def open_run(path: Path) -> RunDir:
    """The one error: a path at which there is no run."""
    if not is_run(path):
        rule = f"holds none of {', '.join(MARKS)}" if path.is_dir() else "no such directory"
        remedy = "name a run directory, such as those that minirl runs lists"
        raise RecipeError("RUN", str(path), rule, remedy)
    return RunDir(path)


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def holds_run(path: Path) -> bool:
    """A run to resume: its recipe is the first thing that it writes."""
    return (path / "recipe.toml").is_file()


def new_run_dir(name: str) -> Path:
    return RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def choose_run_dir(recipe: Path, run_dir: Path | None, resume: bool) -> Path:
    """Where `minirl train` writes: a new directory, or the one of the run to resume."""
    if run_dir is None:
        return _newest_of(recipe.stem) if resume else new_run_dir(recipe.stem)
    if run_dir.is_file():
        raise RecipeError("--run-dir", str(run_dir), "is a file", "name a new directory")
    if resume and not run_dir.is_dir():
        remedy = "name a run directory, or leave --resume out to start one"
        raise RecipeError("--run-dir", str(run_dir), "no such directory to resume", remedy)
    if (resume or any(run_dir.glob("*"))) and not holds_run(run_dir):
        rule = "is not empty and holds no run (there is no recipe.toml in it)"
        raise RecipeError("--run-dir", str(run_dir), rule, "name another directory")
    return run_dir


def _newest_of(name: str) -> Path:
    # Not by glob: runs/gsm8k-* would also match the runs of gsm8k-2gpu.
    form = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}")
    found = sorted(path for path in RUNS.glob("*") if form.fullmatch(path.name) and path.is_dir())
    if not found:
        remedy = "leave --resume out to start one, or name it with --run-dir"
        raise RecipeError("--resume", f"{RUNS}/{name}-*", "no run of this recipe", remedy)
    return found[-1]


def _flatten(tree: Line, prefix: str = "") -> Line:
    flat: Line = {}
    for name, value in tree.items():
        is_table = isinstance(value, dict)
        flat |= _flatten(value, f"{prefix}{name}.") if is_table else {f"{prefix}{name}": value}
    return flat
