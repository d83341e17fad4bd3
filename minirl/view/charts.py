"""The figures of a report: curves, and the timeline of a run with log.trace.

Takes runs, gives matplotlib figures. Runs whose recipes differ in their seed alone are one family:
its curve is their mean, with a band from the lowest to the highest. A single run's accuracy has its
95 % interval as a band. The timeline shows what each worker did during a few steps near the end,
from RUN/trace.json, which the workers wrote (shm/tracer.py). Text and grid have one grey that can
be read on white and on black. Leaves out the page (report.py), and sequences: Perfetto shows those.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.run_dir import Line, RunDir
from minirl.view.runs import short_names

Families = dict[str, list[RunDir]]  # by the name of the first run
Point = tuple[float, float, float, float]  # x, y, lowest, highest
Slice = tuple[str, float, float]  # what, from when, how long: in seconds
Rows = dict[str, list[Slice]]  # by worker

GREY = "#7b8494"
CURVES = ("#2f7fc4", "#d2622f", "#329a66", "#9a5fc0", "#b8920c", "#d0458c")


def families(runs: Sequence[RunDir]) -> Families:
    """Runs without a recipe are families of their own."""
    found: dict[str, list[tuple[str, RunDir]]] = defaultdict(list)
    for name, run in zip(short_names(runs), runs, strict=True):
        recipe = sorted((key, str(v)) for key, v in run.recipe.items() if key != "seed")
        found[str(recipe or run.path)].append((name, run))
    return {named[0][0]: [run for _, run in named] for named in found.values()}


@dataclass(frozen=True)
class Chart:
    """`series`: word in the legend to the name of a value."""

    name: str  # of its file
    title: str
    about: str
    series: dict[str, str]
    is_share: bool = False
    x: str = "step"  # else it shows evaluations

    def curve(self, runs: Sequence[RunDir], name: str) -> list[Point]:
        """One point per step: an evaluation's time differs from run to run."""
        found: dict[int, list[Point]] = defaultdict(list)
        for run in runs:
            for line in run.metrics if self.x == "step" else run.evals:
                x, y = number(line, self.x), number(line, name)
                if x is not None and y is not None:
                    low, high = number(line, "low"), number(line, "high")
                    found[line["step"]].append((x, y, y if low is None else low, high or y))
        if len(runs) == 1:
            return [point for points in found.values() for point in points]
        columns = [[*zip(*found[step], strict=True)] for step in sorted(found)]
        return [(fmean(xs), fmean(ys), min(ys), max(ys)) for xs, ys, *_ in columns]


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


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
    Chart("gap", "Logprob gap", "engine to trainer: should stay flat", {"": "train/logprob_gap"}),
    Chart("grad_norm", "Gradient norm", "before clipping", {"": "train/grad_norm"}),
    Chart("throughput", "Throughput", "tokens per second", SPEEDS),
    Chart("idle", "Idle", "share of each step", IDLE, is_share=True),
)


def draw_charts(found: Families) -> Iterator[tuple[Chart, Any, str]]:
    """A figure for each chart that has a point, and the value of one that never changes. Wall time
    only where runs are compared."""
    several = len(found) > 1  # then colour distinguishes families
    for chart in CHARTS if several else [chart for chart in CHARTS if chart.x != "seconds"]:
        figure, (axes,) = new_figure(3.9, 2.6)  # in a column of the page its text has 12 px
        for n, (name, runs) in enumerate(found.items()):
            label = name + (f", {len(runs)} seeds" if len(runs) > 1 else "")
            for place, (word, value) in enumerate(chart.series.items()):
                if points := chart.curve(runs, value):
                    xs, ys, lows, highs = zip(*points, strict=True)
                    colour = CURVES[(n if several else place) % len(CURVES)]
                    style = ("--" if several and place else "-") + "o" * (len(xs) < 12)
                    words = ("_" if place else label) if several else word or "_"
                    axes.plot(xs, ys, style, color=colour, markersize=4, label=words)
                    if lows != highs:
                        axes.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)
        for place, word in enumerate(chart.series if several and axes.lines else ()):
            axes.plot([], [], "--" if place else "-", color=GREY, label=word or "_")
        if axes.lines:
            _finish(axes, chart, found)
            shown = {float(y) for line in axes.lines for y in line.get_ydata()}
            value = format(min(shown), ".1%" if chart.is_share else ".3g")
            yield chart, figure, "" if len(shown) > 1 else f"{chart.title.lower()} {value}"


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


def _finish(axes: Any, chart: Chart, found: Families) -> None:
    if chart.name == "staleness":
        for eta in {number(runs[0].recipe, "buffer.max_staleness") for runs in found.values()}:
            axes.axhline(eta or 0, color=GREY, linestyle=":", label=f"η = {eta or 0:g}")
    if axes.get_ylim()[0] < 0.5 * axes.get_ylim()[1]:
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
    if chart.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.set_xlabel(chart.x)
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    if labels := axes.get_legend_handles_labels()[1]:
        num = 1 if max(map(len, labels)) > 18 else 2  # columns in which no name is cut
        place = {"loc": "outside lower left", "ncols": num}
        axes.figure.set_figheight(2.4 + 0.2 * math.ceil(len(labels) / num))
        axes.figure.legend(frameon=False, labelcolor=GREY, **place)


STEP = "training: pack "  # the slice with which a step begins
MAX_TIMELINES = 4
NUM_STEPS = 5  # shown: the slices of a whole run would be too thin to see
STATE_COLOURS = {  # by a word of the slice's name, of which the first counts; waiting is left open
    **{"prefill": "#1c6b50", "generating": "#3aa17e", "reloading": "#d1495b"},
    **{"backward": "#3b78c3", "forward": "#7fa9dc", "optimizer": "#2a5a9f", "training": "#3b78c3"},
    **{"publishing": "#e6a532", "grading": "#8e63b8", "saving": "#7d6b5d", "starting": "#9aa4b2"},
}


def read_rows(run_dir: Path) -> Rows:
    """The last steps before the last one, which an evaluation follows. Empty: no trace. Torn
    lines are dropped."""
    names: dict[int, str] = {}
    found: Rows = defaultdict(list)
    with suppress(OSError), (run_dir / "trace.json").open(errors="replace") as file:
        for text in file:
            with suppress(ValueError):
                event = json.loads(text.strip().removesuffix(","))
                if event["name"] == "process_name":
                    names[event["pid"]] = event["args"]["name"]
                elif event["ph"] == "X":
                    worker, start = names.get(event["pid"], ""), event["ts"] / 1e6
                    found[worker].append((event["name"], start, event["dur"] / 1e6))
    steps = [start for name, start, _ in found["train-0"] if name.startswith(STEP)]
    begin, end = (steps[-1 - NUM_STEPS :][0], steps[-1]) if len(steps) > 1 else (0.0, 0.0)
    rows: Rows = {}
    for worker in (names[pid] for pid in sorted(names) if end > begin):
        cut = [(name, max(a, begin), min(a + length, end)) for name, a, length in found[worker]]
        rows[worker] = [(name, a - begin, b - a) for name, a, b in cut if b > a]
    return rows


def draw_timeline(found: Families) -> Any:
    """The first run of each family, all on one time axis; None where no run has a trace."""
    from matplotlib.patches import Patch

    runs = {}
    for name, (first, *_) in [*found.items()][:MAX_TIMELINES]:
        if rows := read_rows(first.path):
            runs[f"{name} (η = {first.recipe.get('buffer.max_staleness', '?')})"] = rows
    if not runs:
        return None
    heights = [len(rows) + 1.5 for rows in runs.values()]
    options = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, panels = new_figure(12.0, 0.33 * sum(heights) + 0.7, len(heights), **options)
    for (title, rows), axes in zip(runs.items(), panels, strict=True):
        _draw_panel(axes, rows)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel("seconds")
    patches = [Patch(label=word, facecolor=colour) for word, colour in STATE_COLOURS.items()]
    place = {"loc": "outside lower left", "ncols": 11, "columnspacing": 1.0, "handlelength": 1.0}
    figure.legend(handles=patches, frameon=False, labelcolor=GREY, **place)
    return figure


def _draw_panel(axes: Any, rows: Rows) -> None:
    axes.grid(visible=False)
    seconds = max(start + length for row in rows.values() for _, start, length in row)
    for y, row in enumerate(rows.values()):
        busy = [(start, length, c) for name, start, length in row if (c := colour_of(name))]
        spans, colours = [span[:2] for span in busy], [colour for *_, colour in busy]
        axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=colours)
        waiting = 1 - sum(length for _, length in spans) / seconds
        axes.text(seconds, y, f" {waiting:.0%} waiting", color=GREY, va="center")
    for name, start, _ in rows["train-0"]:
        if name.startswith(STEP):
            axes.axvline(start, color=GREY, linewidth=0.6)
            axes.text(start, len(rows) - 0.2, f" {name.removeprefix(STEP)}", color=GREY)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows), -0.5)


def colour_of(name: str) -> str:
    """Of a state with its phase; "" where it waits."""
    return next((colour for word, colour in STATE_COLOURS.items() if word in name), "")
