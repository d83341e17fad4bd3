"""Runs as curves. Runs whose recipes differ only in what cannot change what is learned but by
chance (the seed) are one family: their mean, and a band from the lowest to the highest of them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from minirl.run_dir import Line, RunDir

NOT_COMPARED = ("seed", "log.", "checkpoint.", "tasks.verifiers")
MAX_KEYS = 3


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float
    high: float


Points = tuple[Point, ...]
Values = Callable[[RunDir], Points]


@dataclass(frozen=True)
class Family:
    label: str
    runs: tuple[RunDir, ...]

    def points(self, of: Values) -> Points:
        """One run: its own points and band. Several: mean, lowest and highest where x is shared."""
        if len(self.runs) == 1:
            return of(self.runs[0])
        at: dict[float, list[float]] = defaultdict(list)
        for run in self.runs:
            for point in of(run):
                at[point.x].append(point.y)
        return tuple(Point(x, fmean(ys), min(ys), max(ys)) for x, ys in sorted(at.items()))


def compared(recipe: Line) -> tuple[tuple[str, str], ...]:
    """What makes a family: all but the seed and what a person is told."""
    kept = {k: v for k, v in recipe.items() if not k.startswith(NOT_COMPARED)}
    return tuple(sorted((key, shown(value)) for key, value in kept.items()))


def families(runs: Sequence[RunDir]) -> list[Family]:
    found: dict[Any, list[RunDir]] = defaultdict(list)
    for run in runs:
        # A run whose recipe is lost is compared with nobody.
        found[compared(run.recipe) or str(run.path)].append(run)
    groups = list(found.values())
    labels = [_label(group, groups) for group in groups]
    return [
        Family(label if labels.count(label) == 1 else f"{label} ({group[0].name})", tuple(group))
        for label, group in zip(labels, groups, strict=True)
    ]


def differing(recipes: Sequence[Line]) -> list[str]:
    """Keys that do not have one value in all of them."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [key for key in keys if len({shown(recipe.get(key)) for recipe in recipes}) > 1]


def shown(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _label(group: list[RunDir], groups: list[list[RunDir]]) -> str:
    seeds = f", {len(group)} seeds" if len(group) > 1 else ""
    if len(groups) == 1:
        return f"{group[0].name}{seeds}"
    keys = [
        key
        for key in differing([g[0].recipe for g in groups])
        if not key.startswith(NOT_COMPARED) and key in group[0].recipe
    ]
    parts = [f"{key} = {shown(group[0].recipe[key])}" for key in keys[:MAX_KEYS]]
    more = ", …" if len(keys) > MAX_KEYS else ""
    return (", ".join(parts) + more or group[0].name) + seeds
