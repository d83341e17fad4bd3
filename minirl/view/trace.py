"""The timeline of a report: what each worker did during a few steps near the end (log.trace).

Takes RUN/trace.json, which the workers wrote (minirl/shm/tracer.py), gives a figure with one panel
per run and one row per worker. Leaves out sequences: Perfetto shows those.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from minirl.shm.tracer import STATES
from minirl.view.charts import GREY, new_figure

STEP = "training: pack "  # the slice with which a step begins
NUM_STEPS = 5  # shown: the slices of a whole run would be too thin to see
COLOURS = {  # of a state or its phase
    **{"generating": "#3aa17e", "prefill": "#1c6b50", "reloading": "#d1495b"},
    **{"training": "#3b78c3", "forward": "#7fa9dc", "optimizer": "#2a5a9f"},
    **{"publishing": "#e6a532", "grading": "#8e63b8", "saving": "#7d6b5d", "starting": "#9aa4b2"},
}


class Slice(NamedTuple):
    name: str
    start: float  # seconds
    end: float


class Window(NamedTuple):
    """A stretch of one run. Times are seconds since its start."""

    seconds: float
    steps: list[Slice]
    rows: dict[str, list[Slice]]  # by worker


def read_window(run_dir: Path) -> Window | None:
    """The last steps before the last one, which an evaluation follows. None: no trace."""
    names: dict[int, str] = {}
    tracks: dict[str, list[Slice]] = defaultdict(list)
    for event in _events(run_dir / "trace.json"):
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            start, worker = event["ts"] / 1e6, names.get(event["pid"], "")
            tracks[worker].append(Slice(event["name"], start, start + event["dur"] / 1e6))
    steps = [slice for slice in tracks["train-0"] if slice.name.startswith(STEP)]
    if len(steps) < 2:
        return None
    begin, end = steps[max(0, len(steps) - 1 - NUM_STEPS)].start, steps[-1].start
    rows = {names[pid]: _cut(tracks[names[pid]], begin, end) for pid in sorted(names)}
    return Window(max(end - begin, 1e-6), _cut(steps, begin, end), rows)


def _cut(slices: list[Slice], begin: float, end: float) -> list[Slice]:
    inside = [slice for slice in slices if slice.end > begin and slice.start < end]
    return [Slice(s.name, max(s.start, begin) - begin, min(s.end, end) - begin) for s in inside]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """States and names; the many lines of sequences are not parsed, torn ones dropped."""
    with suppress(OSError), path.open(errors="replace") as file:
        for text in file:
            if f'"tid":{STATES},' in text:
                with suppress(ValueError):
                    yield json.loads(text.strip().removesuffix(","))


def draw_timeline(windows: dict[str, Window]) -> Any:
    """By title, all on one time axis. Waiting is left open."""
    from matplotlib.patches import Patch

    heights = [len(window.rows) + 1.5 for window in windows.values()]
    options = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, panels = new_figure(12.0, 0.33 * sum(heights) + 0.7, len(heights), **options)
    for (title, window), axes in zip(windows.items(), panels, strict=True):
        _draw_panel(axes, window)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    panels[-1].set_xlim(0, max(window.seconds for window in windows.values()))
    panels[-1].set_xlabel("seconds")
    patches = [Patch(label=kind, facecolor=colour) for kind, colour in COLOURS.items()]
    place = {"loc": "outside lower left", "ncols": 10, "columnspacing": 1.0, "handlelength": 1.0}
    figure.legend(handles=patches, frameon=False, labelcolor=GREY, **place)
    return figure


def _draw_panel(axes: Any, window: Window) -> None:
    axes.grid(visible=False)
    for y, slices in enumerate(window.rows.values()):
        busy = [(s.start, s.end - s.start) for s in slices if kind_of(s.name)]
        colours = [COLOURS[kind] for s in slices if (kind := kind_of(s.name))]
        axes.broken_barh(busy, (y - 0.4, 0.8), facecolors=colours)
        waiting = 1 - sum(length for _, length in busy) / window.seconds
        axes.text(window.seconds, y, f" {waiting:.0%} waiting", color=GREY, va="center")
    for step in window.steps:
        axes.axvline(step.start, color=GREY, linewidth=0.6)
        words = f" {step.name.removeprefix(STEP)}"
        axes.text(step.start, len(window.rows) - 0.2, words, color=GREY)
    axes.set_yticks(range(len(window.rows)), list(window.rows))
    axes.set_ylim(len(window.rows), -0.5)


def kind_of(name: str) -> str:
    """Of a state with its phase: the name of a colour; "" where it waits."""
    marks = {"prefill": "prefill after", "optimizer": "optimizer step", "forward": " forward"}
    state, _, phase = name.partition(": ")
    other = "" if state.startswith("waiting") else state
    return next((kind for kind, mark in marks.items() if mark in phase), other)
