"""The files of a run directory: how they are written, and how a run is read again.

The `.jsonl` files are append-only and every line has a step. A resume or a rollback to step n
appends {"rolled_back_to": n}; `read_lines`, the one reader, drops what that cancels.
Leaves out what the lines hold: docs/architecture.md lists every file and what writes it.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

from minirl.errors import RecipeError

Line = dict[str, Any]
RUNS = Path("runs")
LOCK = "lock"
# Stopped: by Ctrl-C. Failed: it ended without a result.
RunState = Literal["running", "finished", "stopped", "failed"]


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[Path]:
    """The one atomic write: a file to write or a folder to make, which then takes the name of
    `path`: that is the whole new one, or the old."""
    aside, before = (path.with_name(f".{path.name}.{end}") for end in ("tmp", "old"))
    remove(aside)
    try:
        yield aside
        for part in [*aside.rglob("*"), aside] if sync else ():  # folders too: they hold the names
            flush(part)
        if path.is_dir():
            os.rename(path, before)
        os.replace(aside, path)
        if sync:
            flush(path.parent)
        remove(before)
    finally:
        remove(aside)


def remove(path: Path) -> None:
    """A file or a folder, if there is one."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_file():
        path.unlink()


def flush(path: Path) -> None:
    """To the disk, also a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as aside:
        aside.write_text(text)


class JsonLines:
    """Appends lines. Those that a full disk does not take wait in memory and are retried with the
    next: this is noted once, and `error` says why."""

    def __init__(self, path: Path, note: Callable[[str], object] = bool):
        self.path, self.error, self._note = path, "", note
        self._is_damaged = False  # a sync failed: the kernel may have given lines up
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._waiting = b"\n" if is_torn else b""

    def write(self, line: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(line).encode() + b"\n"
        self.flush()

    def flush(self, sync: bool = False) -> None:
        try:
            while self._waiting:  # a disk that fills up takes a part of what it is given
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
            self.error = self.error if self._is_damaged else ""
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            self._is_damaged |= not self._waiting
            if not self.error:
                what = "its lines wait in memory" if self._waiting else "some lines may be lost"
                why = f"({error.strerror}): {what}"
                self._note(f"{self.path.name} cannot be written {why}")
            self.error = str(error.strerror)

    @property
    def problem(self) -> str:
        """Why not all lines are on the disk, or ""."""
        return f"{self.path.name} is not whole ({self.error})" if self.error else ""

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


def read_lines(path: Path, key: str = "step") -> list[Line]:
    """Whole JSON objects with a number under `key`, without those that a later rollback cancels."""
    kept: list[Line] = []
    with suppress(OSError), path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                continue  # torn by a crash
            found = line if isinstance(line, dict) else {}
            if type(step := found.get("rolled_back_to")) is int:
                kept = [earlier for earlier in kept if earlier["step"] <= step]
            elif type(found.get(key)) is int:
                kept.append(found)
    return kept


def hold(run_dir: Path) -> IO[str]:
    """Locks a run directory: one run at a time, and readers see that it runs. The kernel releases
    the lock however the controller ends."""
    try:
        file = (run_dir / LOCK).open("a")
    except OSError as error:
        raise not_writable(run_dir, error) from None
    if _is_locked(file, LOCK_EX):
        remedy = "wait for it, stop it, or name another directory"
        raise RecipeError("--run-dir", str(run_dir), "a run is using it", remedy)
    return file


def not_writable(run_dir: Path, error: OSError) -> RecipeError:
    rule = f"cannot be written to ({error.strerror})"
    return RecipeError("--run-dir", str(run_dir), rule, "name another, or make room")


def _is_locked(file: IO[str], how: int) -> bool:
    try:
        flock(file, how | LOCK_NB)
    except OSError as error:  # of another kind where a file system has no locks
        return isinstance(error, BlockingIOError)
    return False


def _lines(name: str) -> "cached_property[list[Line]]":
    return cached_property(lambda run: read_lines(run.path / name))


def _object(name: str, loads: Callable[[str], Any] = json.loads) -> "cached_property[Line]":
    def read(run: "RunDir") -> Line:
        with suppress(OSError, ValueError):
            found = loads((run.path / name).read_text(errors="replace"))
            return found if isinstance(found, dict) else {}
        return {}

    return cached_property(read)


def _recipe(text: str) -> Line:
    """By dotted key."""
    sections = {n: v if isinstance(v, dict) else {"": v} for n, v in tomllib.loads(text).items()}
    return {f"{s}.{n}".rstrip("."): v for s, table in sections.items() for n, v in table.items()}


@dataclass(frozen=True)
class RunDir:
    """A run directory, read. What is missing, torn or of another release is left out."""

    path: Path

    metrics = _lines("metrics.jsonl")
    evals = _lines("evals.jsonl")
    samples = _lines("samples.jsonl")
    batches = _lines("batches.jsonl")
    summary = _object("summary.json")
    machine = _object("machine.json")
    recipe = _object("recipe.toml", _recipe)

    @property
    def changed(self) -> float:
        files = [self.path / name for name in ("recipe.toml", "metrics.jsonl", "summary.json")]
        return max(file.stat().st_mtime for file in files if file.is_file())

    @property
    def state(self) -> RunState:
        with suppress(OSError), (self.path / LOCK).open() as file:
            if _is_locked(file, LOCK_SH):
                return "running"
        if not self.summary:
            return "failed"
        return "finished" if self.summary.get("finished") else "stopped"


def holds_run(path: Path) -> bool:
    """Its recipe is the first thing that a run writes."""
    return (path / "recipe.toml").is_file()


def open_run(path: Path, key: str = "RUN") -> RunDir:
    if not holds_run(path):
        remedy = "name another directory, such as those that minirl runs lists"
        raise RecipeError(key, str(path), "holds no run: there is no recipe.toml in it", remedy)
    return RunDir(path)


def new_run_dir(name: str) -> Path:
    return RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def make_results_dir(path: Path, key: str, recipe: str) -> None:
    """For the results of `minirl eval` and `minirl sft`, with the recipe and a folder for logs."""
    if path.exists() and any(path.iterdir()):
        raise RecipeError(key, str(path), "is not empty", "name a new directory")
    (path / "logs").mkdir(parents=True, exist_ok=True)
    (path / "recipe.toml").write_text(recipe)


def choose_run_dir(recipe: Path, run_dir: Path | None, resume: bool) -> Path:
    """Where `minirl train` writes: a new directory, or the one of the run to resume."""
    if run_dir is not None:
        there = {path.name for path in run_dir.glob("*")}
        is_new = not resume and there <= {"logs", LOCK}  # a full disk may leave no more
        return run_dir if is_new else open_run(run_dir, "--run-dir").path
    if not resume:
        return new_run_dir(recipe.stem)
    named = sorted(RUNS.glob(f"{recipe.stem}-????????-??????"))  # the form of new_run_dir
    found = [path for path in named if holds_run(path)]
    if not found:
        remedy = "leave --resume out to start one, or name it with --run-dir"
        raise RecipeError("--resume", f"{RUNS}/{recipe.stem}-*", "no run of this recipe", remedy)
    return found[-1]
