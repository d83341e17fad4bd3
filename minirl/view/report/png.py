"""The same charts as PNG files, by matplotlib (the extra `report`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirl.view.report import svg, timeline
from minirl.view.report.charts import Chart
from minirl.view.report.timeline import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = 'no PNGs: they need matplotlib; pip install "minirl[report]"'


def is_there() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def save_chart(chart: Chart, path: Path) -> None:
    figure, axes = _figure(6.4, 3.8)
    axes.set_title(chart.title, fontsize=11)
    for curve in chart.curves:
        if not curve.points:
            continue
        xs = [point.x for point in curve.points]
        colour = svg.LIGHT[f"c{curve.colour % svg.NUM_COLOURS}"]
        style = "--" if curve.is_dashed else "-"
        marker = "o" if curve.is_marked or len(xs) == 1 else None
        ys = [point.y for point in curve.points]
        axes.plot(
            xs, ys, style, color=colour, marker=marker, markersize=4, label=curve.label or None
        )
        low, high = [p.low for p in curve.points], [p.high for p in curve.points]
        axes.fill_between(xs, low, high, color=colour, alpha=0.16, linewidth=0)
    for name, value in chart.bounds:
        axes.axhline(value, color=svg.LIGHT["ink"], linestyle="--", linewidth=1)
        axes.annotate(name, (0.01, value), xycoords=("axes fraction", "data"), va="bottom")
    if chart.is_log and all(p.y > 0 for c in chart.curves for p in c.points):
        axes.set_yscale("log")
    if chart.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.set_xlabel(chart.x_label, color=svg.LIGHT["dim"])
    axes.grid(color=svg.LIGHT["grid"])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.85, edgecolor="none")
    figure.subplots_adjust(left=0.12, right=0.97, top=0.9, bottom=0.14)
    figure.savefig(path, dpi=130)


def save_timeline(windows: Sequence[Window], path: Path) -> None:
    num_rows = sum(len(window.rows) for window in windows)
    figure, axes = _figure(11, 0.36 * num_rows + 0.5 * len(windows) + 0.9)
    y, ticks = 0.0, []
    used: dict[str, None] = {}
    for window in windows:
        y -= 0.5
        axes.text(0, y, window.title, fontsize=10, fontweight="bold", va="center")
        y -= 0.8
        for worker, slices in window.rows:
            ticks.append((y, f"{worker}  ({window.waiting_share(slices):.0%} waiting)"))
            _row(axes, window, slices, y, used)
            y -= 1
    for kind in [kind for kind in timeline.LIGHT if kind in used]:
        words = timeline.WORDS.get(kind, kind)
        axes.barh(0, 0, color=timeline.LIGHT[kind], label=words)
    axes.set_yticks([at for at, _ in ticks], [words for _, words in ticks], fontsize=8)
    axes.set_ylim(y + 0.3, 0)
    axes.set_xlabel("seconds", color=svg.LIGHT["dim"])
    axes.legend(fontsize=7, frameon=False, ncols=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _row(
    axes: "Axes", window: Window, slices: Sequence[Any], y: float, used: dict[str, None]
) -> None:
    num = timeline.COLUMNS
    kinds = timeline.columns(slices, window.start, window.seconds, num)
    for kind, first, count in timeline.stretches(kinds):
        if kind:
            used.setdefault(kind)
            scale = window.seconds / num
            axes.barh(y, count * scale, 0.8, first * scale, color=timeline.LIGHT[kind])


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
