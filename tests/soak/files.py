"""Files as a crash leaves them: the last line half written. Takes a run directory whose controller
is dead, gives the names of the files that were torn.

What a checkpoint vouches for was on the disk before it (the controller flushes it first), so a
crash does not touch it: a last line after the checkpoint's step is cut in half, and after any other
the first half of one is added.
"""

import random
from pathlib import Path

from minirl.run_dir import read_lines
from minirl.train.intact import newest_whole

LOGS = ("metrics.jsonl", "samples.jsonl", "batches.jsonl", "evals.jsonl")
STATUS = "status.json"


def tear(run_dir: Path, dice: random.Random) -> list[str]:
    """At least one, if there is any."""
    there = [name for name in (*LOGS, STATUS) if _size(run_dir / name)]
    count = dice.randint(1, len(there)) if there else 0
    chosen = sorted(dice.sample(there, count))
    saved = newest_whole(run_dir)[1] if (run_dir / "checkpoints").is_dir() else None
    saved_step = saved["step"] if saved else 0
    for name in chosen:
        _tear(run_dir / name, saved_step, dice)
    return chosen


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _tear(path: Path, saved_step: int, dice: random.Random) -> None:
    data = path.read_bytes()
    end = data.rstrip(b"\n").rfind(b"\n") + 1
    last = data[end:].rstrip(b"\n")
    part = last[: dice.randint(1, max(1, len(last) - 1))]
    if path.name == STATUS or _is_after(path, saved_step):
        path.write_bytes(data[:end] + part)
    else:
        with path.open("ab") as file:
            file.write(part)


def _is_after(path: Path, saved_step: int) -> bool:
    lines = read_lines(path)
    return bool(lines) and lines[-1].get("step", 0) > saved_step
