"""What a finished run came to, and several of them: means, 95 % intervals, curves.

Takes run directories as `minirl train` leaves them, gives numbers; `minirl sweep` makes tables of
them. Leaves out: what is run (sweep.py) and how it looks (report/, results.py).
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from minirl.run_dir import read_lines

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal's.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL95 = 1.96

Curve = Sequence[tuple[int, float]]  # (version, held-out accuracy)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its 95 % interval; None: one seed says nothing."""

    mean: float
    half: float | None
    count: int

    def shown(self, form: Callable[[float], str]) -> str:
        half = "" if self.half is None else f" ± {form(self.half).removeprefix('+')}"
        return form(self.mean) + half


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    return f"{value:.2f}"


def tenth(value: float) -> str:
    return f"{value:.1f}"


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


TARGET = 0.8
COLUMNS: dict[str, Callable[[float], str]] = {
    "accuracy_before": percent,
    "accuracy_after": percent,
    "accuracy_mean": percent,  # over all steps: the area under the curve
    "steps_to_80": tenth,  # steps until held-out accuracy reaches TARGET, of runs that do
    "reward_last": decimal,
    "tokens_per_s": count,
    "speed": decimal,  # tokens_per_s over the first row's, seed by seed: a slow hour cancels out
    "gain_after": points,  # accuracy_after minus the first row's, seed by seed
    "gain_mean": points,  # accuracy_mean minus the first row's
    "seconds": count,
    "staleness_mean": decimal,
    "staleness_max": decimal,
    "rollout_idle": percent,
    "train_idle": percent,
}


def is_finished(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def result(run_dir: Path) -> dict[str, Any]:
    """What a finished run came to. The first step is left out of rates: it waits for all."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = read_lines(run_dir / "metrics.jsonl")
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    last = lines[-max(1, len(lines) // 10) :]
    spans = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(lines)]

    def mean(name: str) -> float | None:
        pairs = [(x[name], s) for x, s in zip(lines[1:], spans, strict=True) if name in x]
        total = sum(s for _, s in pairs)
        return sum(value * s for value, s in pairs) / total if total else None

    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "accuracies": summary.get("accuracies", []),
        "accuracy_mean": area(summary.get("accuracies", [])),
        "steps_to_80": first_at(summary.get("accuracies", []), TARGET),
        "reward_last": fmean(line["reward/mean"] for line in last),
        "tokens_per_s": sum(x["train/tokens"] for x in lines[1:]) / seconds if seconds else None,
        "seconds": lines[-1]["seconds"],
        "staleness_mean": fmean(line["buffer/staleness_mean"] for line in lines),
        "staleness_max": summary["staleness_max"],
        "rollout_idle": mean("rollout/idle_frac"),
        "train_idle": mean("train/idle_frac"),
    }


def beside(found: dict[str, Any], first: dict[str, Any] | None) -> dict[str, Any]:
    """A run's result with what it is beside another of the same seed."""
    own: dict[str, float | None] = dict.fromkeys(("speed", "gain_after", "gain_mean"))
    if first is not None:
        if found["tokens_per_s"] and first["tokens_per_s"]:
            own["speed"] = found["tokens_per_s"] / first["tokens_per_s"]
        for name in ("after", "mean"):
            a, b = found[f"accuracy_{name}"], first[f"accuracy_{name}"]
            own[f"gain_{name}"] = None if a is None or b is None else a - b
    return {**found, **own}


def area(curve: Curve) -> float | None:
    """Mean accuracy over versions, straight lines between evaluations."""
    if len(curve) < 2 or curve[-1][0] <= curve[0][0]:
        return None
    parts = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(curve)]
    return sum(parts) / (curve[-1][0] - curve[0][0])


def first_at(curve: Curve, target: float) -> float | None:
    """The version at which the curve first reaches the target; None: it never does."""
    if curve and curve[0][1] >= target:
        return float(curve[0][0])
    for (v0, a0), (v1, a1) in itertools.pairwise(curve):
        if a1 >= target:
            return v0 + (v1 - v0) * (target - a0) / (a1 - a0)
    return None


def mean_curve(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Where all runs were evaluated: a run that was disturbed may have missed one."""
    by_version = [{version: accuracy for version, accuracy in curve} for curve in curves]
    shared = sorted(set.intersection(*(set(found) for found in by_version)))
    return [{"version": v, **vars(estimate([c[v] for c in by_version]))} for v in shared]


def cell_text(value: Estimate | None, form: Callable[[float], str], num_runs: int) -> str:
    if value is None:
        return ""
    partly = f" ({value.count} of {num_runs} runs)" if value.count < num_runs else ""
    return value.shown(form) + partly


def estimate(values: Sequence[float]) -> Estimate:
    num = len(values)
    if num < 2:
        return Estimate(values[0], None, num)
    quantile = T95[num - 2] if num - 2 < len(T95) else NORMAL95
    return Estimate(fmean(values), quantile * stdev(values) / math.sqrt(num), num)
