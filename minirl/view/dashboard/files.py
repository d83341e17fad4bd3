"""A snapshot from a run directory alone, for a run that left no status.json that can be read:
one of an older minirl, or one whose disk was full. Takes what metrics.jsonl, samples.jsonl,
recipe.toml and summary.json say, and leaves out what only a living run knows.
"""

import json
import time
from pathlib import Path
from typing import Any

from minirl.errors import MinirlError
from minirl.recipe import load
from minirl.run_dir import read_lines
from minirl.view.dashboard.lines import RECENT_STEPS, curves_of, mean_step_s, sample_of, verdict
from minirl.view.dashboard.snapshot import (
    FINISHED,
    RUNNING,
    STARTING,
    STATUS,
    STOPPED,
    Curve,
    Sample,
    Snapshot,
)

TAIL_BYTES = 256 * 1024
NUM_SAMPLES = 6


def snapshot_from_files(run_dir: Path) -> Snapshot:
    try:
        config = load(run_dir / "recipe.toml").config
    except MinirlError:
        config = None
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if _is_step(line)]
    summary = _read_summary(run_dir)
    state = RUNNING if lines else STARTING
    if summary is not None:
        state = FINISHED if summary.get("finished") else STOPPED
    evals = read_lines(run_dir / "evals.jsonl")
    evaluated = [line for line in evals if isinstance(line.get("accuracy"), float)]
    recent = lines[-RECENT_STEPS:]
    last = lines[-1] if lines else {}
    steps = config.train.steps if config else 0
    step_s = mean_step_s(recent)
    found = ""
    if config:
        devices = config.devices
        found = verdict(recent, devices.rollout, devices.train, "device", config.is_synchronous)
    return Snapshot(
        name=run_dir.name,
        time=_touched(run_dir),
        state=state,
        step=int(last.get("step", 0)),
        steps=steps,
        version=int(last.get("version", 0)),
        seconds=float(last.get("seconds", 0.0)),
        eta_s=step_s * (steps - last["step"]) if step_s and state == RUNNING else None,
        verdict=found,
        max_staleness=config.buffer.max_staleness if config else 0,
        max_new_tokens=config.rollout.max_new_tokens if config else 0,
        tokens_per_s=float(last.get("rollout/tokens_per_s", 0.0)),
        curves=curves_of(lines),
        last={name: float(value) for name, value in last.items()},
        accuracies=Curve(
            [float(line["version"]) for line in evaluated],
            [float(line["accuracy"]) for line in evaluated],
        ),
        samples=read_samples(run_dir / "samples.jsonl"),
    )


def _is_step(line: Any) -> bool:
    """Whole, and numbers only: whatever else stands in the file is passed over."""
    return (
        isinstance(line, dict)
        and {"step", "seconds"} <= line.keys()
        and all(isinstance(value, (int, float)) for value in line.values())
    )


def read_samples(path: Path) -> list[Sample]:
    """The last ones; lines that are not whole are passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    samples: list[Sample] = []
    for line in reversed(lines):
        try:
            samples.insert(0, sample_of(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if len(samples) == NUM_SAMPLES:
            break
    return samples


def _read_summary(run_dir: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def _touched(run_dir: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json", STATUS):
        try:
            times.append((run_dir / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=time.time())
