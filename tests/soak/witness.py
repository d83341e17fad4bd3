"""Follows a run's files while it runs. Takes metrics.jsonl, batches.jsonl and samples.jsonl as they
grow; gives every line that was ever seen in them, once.

So what is said of all trained steps holds for those too that a fault took back. Which tokens of an
answer were trained is the trainer's word: only these have a gap to its own logprob.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAIL = 64  # bytes by which a file is known again: it may have been cut and have grown since
MAX_TOLD = 5  # violations of one kind


class Follower:
    """New whole lines of a file that may be cut or replaced at any moment."""

    def __init__(self, path: Path):
        self._path = path
        self._inode, self._offset = 0, 0
        self._tail = b""  # what was last read before the offset
        self._seen: set[tuple[object, ...]] = set()

    def look(self) -> Iterator[dict[str, Any]]:
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
            if line is not None and (key := key_of(line)) not in self._seen:
                self._seen.add(key)
                yield line


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def key_of(line: dict[str, Any]) -> tuple[object, ...]:
    """Of one training of a step: it has other groups, or another clock, when it is done again."""
    groups = tuple(group.get("id") for group in line.get("groups", []))
    return line["step"], line.get("version"), line.get("seconds"), line.get("group"), groups


@dataclass
class Witness:
    run_dir: Path
    max_staleness: int
    num_steps: int = 0  # trained, those that were taken back too
    last_step: int = 0
    furthest: int = 0  # step that was ever reached
    num_tokens: int = 0  # looked at one by one
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._metrics = Follower(self.run_dir / "metrics.jsonl")
        self._batches = Follower(self.run_dir / "batches.jsonl")
        self._samples = Follower(self.run_dir / "samples.jsonl")
        self._began: dict[int, int] = {}  # the version that a group's step started from

    def look(self) -> int:
        """How many steps have been trained so far, whatever became of them."""
        for line in self._metrics.look():
            self.num_steps += 1
            self.last_step = line["step"]
            self.furthest = max(self.furthest, self.last_step)
            self._told(stale_line(line, self.max_staleness))
            self._told(unbalanced(line))
        for line in self._batches.look():
            self._began |= {group["id"]: line["version"] for group in line["groups"]}
        for sample in self._samples.look():  # a step's are written after its batch
            began = self._began.get(sample["group"])
            if began is not None:
                count, problem = stale_tokens(sample, began, self.max_staleness)
                self.num_tokens += count
                self._told(problem)
        return self.num_steps

    def _told(self, problem: str) -> None:
        if problem and len(self.violations) < MAX_TOLD:
            self.violations.append(problem)


def stale_line(line: dict[str, Any], limit: int) -> str:
    stale = line.get("buffer/staleness_max", 0)
    return f"step {line['step']}: buffer/staleness_max is {stale:g}" if stale > limit else ""


def unbalanced(line: dict[str, Any]) -> str:
    names = ("submitted", "trained", "dropped", "in_flight")
    counts = [line.get(f"buffer/groups_{name}", 0) for name in names]
    if counts[0] == sum(counts[1:]):
        return ""
    said = ", ".join(f"{name} {count:g}" for name, count in zip(names, counts, strict=True))
    return f"step {line['step']}: the groups do not add up ({said})"


def stale_tokens(sample: dict[str, Any], began: int, limit: int) -> tuple[int, str]:
    """How many trained tokens of a line of samples.jsonl were looked at, and what is older than it
    may be: by the version that wrote it and the one that the step began with."""
    pairs = zip(sample.get("token_versions", []), sample.get("token_gaps", []), strict=True)
    versions = [version for version, gap in pairs if gap is not None]
    if not versions or began - min(versions) <= limit:
        return len(versions), ""
    age = began - min(versions)
    return len(versions), f"step {sample['step']}: group {sample['group']} has a token {age} old"
