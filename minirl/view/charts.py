"""Which curves a report has, and how they are drawn. Takes runs, gives matplotlib figures.

Runs whose recipes differ in their seed alone are one family: its curve is their mean, with a band
from the lowest to the highest. A single run's accuracy has its 95 % interval as a band. Text and
grid have one grey that can be read on white and on black. Leaves out the page (report.py).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from minirl.run_dir import Line, RunDir
from minirl.view.runs import short_names

GREY = "#7b8494"
COLOURS = ("#2f7fc4", "#d2622f", "#329a66", "#9a5fc0", "#b8920c", "#d0458c")


class Family(NamedTuple):
    name: str  # of its first run
    runs: list[RunDir]

    @property
    def label(self) -> str:
        return self.name + (f", {len(self.runs)} seeds" if len(self.runs) > 1 else "")


def families(runs: Sequence[RunDir]) -> list[Family]:
    """Runs without a recipe are families of their own."""
    found: dict[str, Family] = {}
    for name, run in zip(short_names(runs), runs, strict=True):
        recipe = sorted((key, str(v)) for key, v in run.recipe.items() if key != "seed")
        found.setdefault(str(recipe or run.path), Family(name, [])).runs.append(run)
    return list(found.values())


class Point(NamedTuple):
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Chart:
    """`series`: word in the legend to the name of a value."""

    name: str  # of its file
    title: str
    about: str
    series: dict[str, str]
    is_share: bool = False
    x: str = "step"  # else it shows evaluations

    def curve(self, family: Family, name: str) -> list[Point]:
        """One point per step: an evaluation's time differs from run to run."""
        found: dict[int, list[Point]] = defaultdict(list)
        for run in family.runs:
            for line in run.metrics if self.x == "step" else run.evals:
                x, y = number(line, self.x), number(line, name)
                if x is not None and y is not None:
                    low, high = number(line, "low"), number(line, "high")
                    found[line["step"]].append(Point(x, y, y if low is None else low, high or y))
        if len(family.runs) == 1:
            return [point for points in found.values() for point in points]
        columns = [[*zip(*found[step], strict=True)] for step in sorted(found)]
        return [Point(fmean(xs), fmean(ys), min(ys), max(ys)) for xs, ys, *_ in columns]


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


GAPS = {"all": "train/logprob_gap", "after tokens of an older version": "train/spliced_gap"}
STALENESS = {"mean": "buffer/staleness_mean", "max": "buffer/staleness_max"}
CLIPPED = {"clipped": "train/clip_frac", "capped": "train/capped_frac"}
SPEEDS = {"sampled": "rollout/tokens_per_s", "trained": "train/tokens_per_s"}
IDLE = {"engines": "rollout/idle_frac", "trainers": "train/idle_frac"}
ACCURACY = {"": "accuracy"}
CHARTS = (
    Chart("accuracy", "Held-out accuracy", "by version", ACCURACY, True, "version"),
    Chart("accuracy_time", "Held-out accuracy", "by wall time", ACCURACY, True, "seconds"),
    Chart("reward", "Reward", "mean of each step's answers", {"": "reward/mean"}),
    Chart("staleness", "Staleness", "of trained tokens; never above the bound η", STALENESS),
    Chart("lengths", "Length of answers", "mean tokens written", {"": "rollout/length_mean"}),
    Chart("truncated", "Cut", "at max_new_tokens", {"": "rollout/truncated_frac"}, is_share=True),
    Chart("entropy", "Entropy", "in nats; at 0 exploration has ended", {"": "train/entropy"}),
    Chart("kl", "KL to the first model", "in nats", {"": "train/kl"}),
    Chart("clip", "Clipped and capped", "share of trained tokens", CLIPPED, is_share=True),
    Chart("gap", "Logprob gap", "engine to trainer: should stay flat", GAPS),
    Chart("grad_norm", "Gradient norm", "before clipping", {"": "train/grad_norm"}),
    Chart("throughput", "Throughput", "tokens per second", SPEEDS),
    Chart("idle", "Idle", "share of each step", IDLE, is_share=True),
)


def draw_charts(found: Sequence[Family]) -> Iterator[tuple[Chart, Any]]:
    """A figure for each chart that has a point."""
    several = len(found) > 1  # then colour distinguishes families
    for chart in CHARTS:
        figure, (axes,) = new_figure(4.8, 3.0)
        for n, family in enumerate(found):
            for place, (word, name) in enumerate(chart.series.items()):
                if points := chart.curve(family, name):
                    colour = COLOURS[(n if several else place) % len(COLOURS)]
                    label = " · ".join([family.label] * several + [word] * bool(word))
                    _plot(axes, points, colour, "--" if several and place else "-", label)
        if axes.lines:
            _finish(axes, chart, found)
            yield chart, figure


def new_figure(width: float, height: float, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for axes in panels:
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", colors=GREY, length=0)
        axes.xaxis.label.set_color(GREY)
        axes.grid(axis="y", color=GREY, alpha=0.25)
    return figure, panels


def _plot(axes: Any, points: Sequence[Point], colour: str, style: str, label: str) -> None:
    xs, ys, lows, highs = zip(*points, strict=True)
    marker = "o" if len(xs) < 12 else None
    axes.plot(xs, ys, style, color=colour, marker=marker, markersize=4, label=label or "_")
    if lows != highs:
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)


def _finish(axes: Any, chart: Chart, found: Sequence[Family]) -> None:
    if chart.name == "staleness":
        for eta in {number(run.recipe, "buffer.max_staleness") for f in found for run in f.runs}:
            axes.axhline(eta or 0, color=GREY, linestyle=":", label=f"η = {eta or 0:g}")
    if axes.get_ylim()[0] < 0.5 * axes.get_ylim()[1]:
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
    if chart.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.set_xlabel(chart.x)
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    if axes.get_legend_handles_labels()[1]:
        place = {"loc": "outside lower left", "ncols": 2, "fontsize": 9}
        axes.figure.legend(frameon=False, labelcolor=GREY, **place)
