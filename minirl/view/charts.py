"""Which curves a report has. Takes runs, gives charts: points, bands and words.

Runs whose recipes differ only in what cannot change what is learned except by chance (the seed) are
one family: one curve with a band. Leaves out how a chart is drawn (report.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from minirl.run_dir import RunDir
from minirl.view.runs import Line

NOT_COMPARED = ("seed", "log.", "checkpoint.", "tasks.verifiers")
MAX_KEYS = 3  # in a label
NUM_COLOURS = 6


# -- runs that belong together


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
        for point in (point for run in self.runs for point in of(run)):
            at[point.x].append(point.y)
        return tuple(Point(x, fmean(ys), min(ys), max(ys)) for x, ys in sorted(at.items()))


def families(runs: Sequence[RunDir]) -> list[Family]:
    found: dict[str, list[RunDir]] = defaultdict(list)
    for run in runs:
        kept = sorted((k, shown(v)) for k, v in run.recipe.items() if not _is_ignored(k))
        found[str(kept or run.path)].append(run)  # without a recipe: a family of its own
    firsts = [group[0] for group in found.values()]
    keys = [key for key in differing(firsts) if not _is_ignored(key)]
    labels = [_label(group, keys if len(firsts) > 1 else []) for group in found.values()]
    return [
        Family(label if labels.count(label) == 1 else f"{label} ({group[0].name})", tuple(group))
        for label, group in zip(labels, found.values(), strict=True)
    ]


def _is_ignored(key: str) -> bool:
    return key.startswith(NOT_COMPARED)


def _label(group: list[RunDir], keys: list[str]) -> str:
    recipe = group[0].recipe
    parts = [f"{key} = {shown(recipe[key])}" for key in keys[:MAX_KEYS] if key in recipe]
    more = ", …" if len(keys) > MAX_KEYS else ""
    seeds = f", {len(group)} seeds" if len(group) > 1 else ""
    return (", ".join(parts) + more if parts else group[0].name) + seeds


def differing(runs: Sequence[RunDir]) -> list[str]:
    """Recipe keys that do not have one value in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    return [key for key in keys if len({shown(run.recipe.get(key)) for run in runs}) > 1]


def shown(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- which curves there are


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _points(lines: Iterable[Line], x: str, y: str, band: Callable[..., Any]) -> Points:
    """`band` gives (low, high) of a line and its y."""
    pairs = ((line, number(line, x), number(line, y)) for line in lines)
    return tuple(Point(a, b, *band(line, b)) for line, a, b in pairs if None not in (a, b))  # type: ignore[arg-type]


def metric_points(run: RunDir, name: str) -> Points:
    return _points(run.metrics, "step", name, lambda line, y: (y, y))


def reward_points(run: RunDir) -> Points:
    """The band: two standard errors, counted by prompts, whose answers are not independent."""
    num_prompts = number(run.recipe, "train.batch_size") or 1

    def band(line: Line, mean: float) -> tuple[float, float]:
        error = 2 * (number(line, "reward/std") or 0.0) / math.sqrt(num_prompts)
        return mean - error, mean + error

    return _points(run.metrics, "step", "reward/mean", band)


def accuracy_points(run: RunDir, x: str = "version") -> Points:
    def band(line: Line, mean: float) -> tuple[float, float]:
        low, high = number(line, "low"), number(line, "high")
        return mean if low is None else low, mean if high is None else high

    return _points(run.evals, x, "accuracy", band)


def length_points(run: RunDir) -> Points:
    """The band: the middle 80 % of a step's answers."""
    written = {
        line["step"]: sorted(
            n for group in line.get("groups", []) for n in group.get("lengths", [])
        )
        for line in run.batches
    }

    def band(line: Line, mean: float) -> tuple[float, float]:
        lengths = written.get(line["step"]) or [mean]
        return lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]

    return _points(run.metrics, "step", "rollout/length_mean", band)


@dataclass(frozen=True)
class Kind:
    """One chart. `series`: word in the legend to a metric, or to the values of a run."""

    name: str  # of its file
    title: str
    about: str
    series: dict[str, str | Values]
    is_share: bool = False  # from 0 to 1, shown in %
    is_log: bool = False
    x_label: str = "step"


KINDS = (
    Kind("reward", "Reward", "mean of each step's answers", {"": reward_points}),
    Kind(
        "accuracy",
        "Held-out accuracy",
        "mean reward on held-out prompts",
        {"": accuracy_points},
        x_label="version",
    ),
    Kind(
        "accuracy_time",
        "Held-out accuracy by time",
        "mean reward on held-out prompts, by wall time",
        {"": partial(accuracy_points, x="seconds")},
        x_label="seconds",
    ),
    Kind(
        "staleness",
        "Staleness and its bound",
        "of trained tokens; no token is ever above the bound η (buffer.max_staleness)",
        {"mean": "buffer/staleness_mean", "max": "buffer/staleness_max"},
    ),
    Kind("lengths", "Length of answers", "tokens that the model wrote", {"": length_points}),
    Kind(
        "truncated",
        "Cut at the limit",
        "share of answers that ran into rollout.max_new_tokens",
        {"": "rollout/truncated_frac"},
        is_share=True,
    ),
    Kind(
        "entropy",
        "Entropy",
        "of the policy at trained tokens, in nats; a fall to 0 ends exploration",
        {"": "train/entropy"},
    ),
    Kind("kl", "KL to the first model", "in nats", {"": "train/kl"}),
    Kind(
        "clip",
        "Clipped and capped",
        "share of trained tokens whose ratio was clipped, and whose w = prox / behaviour was above "
        "train.behav_cap",
        {"clipped": "train/clip_frac", "capped": "train/capped_frac"},
        is_share=True,
    ),
    Kind(
        "gap",
        "Logprob gap",
        "mean |vLLM's logprob − the trainer's| at tokens of the same version: it should stay flat",
        {"all": "train/logprob_gap", "after tokens of an older version": "train/spliced_gap"},
        is_log=True,
    ),
    Kind("grad_norm", "Gradient norm", "before clipping", {"": "train/grad_norm"}),
    Kind(
        "throughput",
        "Throughput",
        "tokens per second: sampled by all engines, trained by the ranks while they train",
        {"sampled": "rollout/tokens_per_s", "trained": "train/tokens_per_s"},
    ),
    Kind(
        "idle",
        "Idle",
        "share of each step in which engines had nothing to sample, and rank 0 no batch",
        {"engines": "rollout/idle_frac", "trainers": "train/idle_frac"},
        is_share=True,
    ),
)


@dataclass(frozen=True)
class Curve:
    label: str
    points: Points
    colour: str
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    kind: Kind
    curves: tuple[Curve, ...]
    bounds: tuple[float, ...] = ()  # η

    @property
    def legend(self) -> list[Curve]:
        named = [curve for curve in self.curves if curve.label]
        return named if len(named) > 1 else []


def charts(found: Sequence[Family]) -> list[Chart]:
    """Those that have a point."""
    etas = {number(run.recipe, "buffer.max_staleness") for f in found for run in f.runs}
    bounds = tuple(sorted(eta for eta in etas if eta is not None))
    drawn = [
        Chart(kind, tuple(_curves(kind, found)), bounds if kind.name == "staleness" else ())
        for kind in KINDS
    ]
    return [chart for chart in drawn if chart.curves]


def _curves(kind: Kind, found: Sequence[Family]) -> Iterable[Curve]:
    """Colour distinguishes families where there are several, else the series."""
    for n, family in enumerate(found):
        for place, (word, source) in enumerate(kind.series.items()):
            of = partial(metric_points, name=source) if isinstance(source, str) else source
            is_alone = len(found) == 1
            parts = [word] if is_alone and word else [family.label, word]
            label = " · ".join(part for part in parts if part)
            colour = f"c{(place if is_alone else n) % NUM_COLOURS}"
            curve = Curve(label, family.points(of), colour, place > 0 and not is_alone)
            if kind.x_label == "seconds" and len(family.runs) > 1:  # no x is shared
                singles = [tuple(Point(p.x, p.y, p.y, p.y) for p in of(r)) for r in family.runs]
                yield from (Curve("" if i else label, p, colour) for i, p in enumerate(singles))
            elif curve.points:
                yield curve
