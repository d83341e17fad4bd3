"""Follows a run's logs while it runs. Takes the metrics, batches and samples as their files grow;
gives every line that was ever in them, once.

So what is said of all trained steps also holds for those that a rollback took back. Which tokens of
an answer were trained is the trainer's own account.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.run_files import METRICS, SAMPLES, TRAINED, Line, group_ids, trained_versions

TAIL = 64  # bytes by which a file is known again: it may have been cut and have grown since
MAX_NAMED = 5  # violations


class LineFollower:
    """New whole lines of a file that may be cut or replaced at any moment."""

    def __init__(self, path: Path):
        self._path = path
        self._inode, self._offset = 0, 0
        self._tail = b""  # what was last read before the offset
        self._seen: set[tuple[object, ...]] = set()

    def look(self) -> Iterator[Line]:
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset - len(self._tail))
                if inode != self._inode or file.read(len(self._tail)) != self._tail:
                    self._inode, self._offset, self._tail = inode, 0, b""
                    file.seek(0)
                data = file.read()
        except OSError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        self._tail = (self._tail + whole + newline)[-TAIL:]
        for raw in whole.split(b"\n"):
            line = _parsed(raw)
            if line is not None and (key := _key(line)) not in self._seen:
                self._seen.add(key)
                yield line


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _key(line: Line) -> tuple[object, ...]:
    """Of one training of a step: a step that is trained again has other groups or another clock."""
    named = line.get("version"), line.get("seconds"), line.get("group")
    return line["step"], *named, *group_ids(line)


@dataclass
class RunFollower:
    run_dir: Path
    max_staleness: int
    num_steps: int = 0  # trained, including those that were rolled back
    last_step: int = 0
    furthest: int = 0  # step that was ever reached
    num_tokens: int = 0  # checked one by one
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._metrics = LineFollower(self.run_dir / METRICS)
        self._trained = LineFollower(self.run_dir / TRAINED)
        self._samples = LineFollower(self.run_dir / SAMPLES)
        # The version that a step began with, by step and group: a resumed run gives ids again.
        self._began: dict[tuple[int, int], int] = {}

    def look(self) -> int:
        """How many steps have been trained so far, whatever became of them."""
        for line in self._metrics.look():
            self.num_steps += 1
            self.last_step = line["step"]
            self.furthest = max(self.furthest, self.last_step)
            self._note(stale_line(line, self.max_staleness))
            self._note(unbalanced(line))
        for line in self._trained.look():
            began = {(line["step"], group_id): line["version"] for group_id in group_ids(line)}
            self._began |= began
        for sample in self._samples.look():  # a step's are written after its batch
            at = sample["step"], sample["group"]
            version = self._began.get(at, sample["versions"][-1])
            count, problem = stale_tokens(sample, version, self.max_staleness)
            self.num_tokens += count
            self._note(problem)
        return self.num_steps

    def _note(self, problem: str) -> None:
        if problem and len(self.violations) < MAX_NAMED:
            self.violations.append(problem)


def stale_line(line: Line, limit: int) -> str:
    stale = line.get("buffer/staleness_max", 0)
    return f"step {line['step']}: buffer/staleness_max is {stale:g}" if stale > limit else ""


def unbalanced(line: Line) -> str:
    names = ("submitted", "trained", "dropped", "in_flight")
    counts = [line.get(f"buffer/groups_{name}", 0) for name in names]
    if counts[0] == sum(counts[1:]):
        return ""
    said = ", ".join(f"{name} {count:g}" for name, count in zip(names, counts, strict=True))
    return f"step {line['step']}: the groups do not add up ({said})"


def stale_tokens(sample: Line, began: int, limit: int) -> tuple[int, str]:
    """How many trained tokens of a sample were checked, and what is older than allowed: by the
    version that wrote a token and the one that its step began with."""
    versions = trained_versions(sample)
    staleness = began - min(versions, default=began)
    if staleness <= limit:
        return len(versions), ""
    text = f"step {sample['step']}: group {sample['group']} has a token {staleness} old"
    return len(versions), text
