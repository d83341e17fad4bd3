"""The timeline of a report: what each worker did during a few steps near the end (log.trace).

Takes RUN/trace.json, which the workers wrote (minirl/shm/tracer.py), gives a figure with one panel
per run and one row per worker. Leaves out sequences: Perfetto shows those.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from minirl.shm.tracer import STATES
from minirl.view.charts import GREY, new_figure

Slice = tuple[str, float, float]  # what, from when, how long: in seconds
Rows = dict[str, list[Slice]]  # by worker

STEP = "training: pack "  # the slice with which a step begins
NUM_STEPS = 5  # shown: the slices of a whole run would be too thin to see
COLOURS = {  # by a word of the slice's name, of which the first counts; waiting is left open
    **{"prefill": "#1c6b50", "generating": "#3aa17e", "reloading": "#d1495b"},
    **{"backward": "#3b78c3", "forward": "#7fa9dc", "optimizer": "#2a5a9f", "training": "#3b78c3"},
    **{"publishing": "#e6a532", "grading": "#8e63b8", "saving": "#7d6b5d", "starting": "#9aa4b2"},
}


def read_rows(run_dir: Path) -> Rows:
    """The last steps before the last one, which an evaluation follows. Empty: no trace."""
    names: dict[int, str] = {}
    found: Rows = defaultdict(list)
    for event in _events(run_dir / "trace.json"):
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


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """States and names; the many lines of sequences are not parsed, torn ones dropped."""
    with suppress(OSError), path.open(errors="replace") as file:
        for text in file:
            if f'"tid":{STATES},' in text:
                with suppress(ValueError):
                    yield json.loads(text.strip().removesuffix(","))


def draw_timeline(runs: dict[str, Rows]) -> Any:
    """By title, all on one time axis."""
    from matplotlib.patches import Patch

    heights = [len(rows) + 1.5 for rows in runs.values()]
    options = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, panels = new_figure(12.0, 0.33 * sum(heights) + 0.7, len(heights), **options)
    for (title, rows), axes in zip(runs.items(), panels, strict=True):
        _draw_panel(axes, rows)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel("seconds")
    patches = [Patch(label=word, facecolor=colour) for word, colour in COLOURS.items()]
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
    found = (colour for word, colour in COLOURS.items() if word in name)
    return "" if name.startswith("waiting") else next(found, "")
