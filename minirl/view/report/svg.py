"""A chart as SVG, drawn without a library. Colours are CSS variables, so that one drawing is read
on light and on dark; `standalone` puts their values in, for a file of its own.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from minirl.view.report.charts import Chart, Curve
from minirl.view.report.families import Points

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34
NUM_COLOURS = 6
MAX_MARKS = 80  # points with a tooltip, a curve

LIGHT = {
    **{"ink": "#1d2433", "dim": "#667085", "grid": "#e4e7ec", "paper": "#ffffff"},
    **{"c0": "#1f6fb4", "c1": "#c8572b", "c2": "#2b8a5b"},
    **{"c3": "#8a4fb0", "c4": "#b08a00", "c5": "#c2347c"},
}
DARK = {
    **{"ink": "#e8ebf1", "dim": "#98a2b3", "grid": "#313a4a", "paper": "#141922"},
    **{"c0": "#6cb2f0", "c1": "#f0956b", "c2": "#6fd0a0"},
    **{"c3": "#c79bea", "c4": "#e5c558", "c5": "#f07fb4"},
}


def variables(*colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for table in colours for name, value in table.items())


def standalone(svg: str, light: dict[str, str], dark: dict[str, str]) -> str:
    """As a file that is looked at alone, or as an image in a page."""
    style = (
        f"<style>svg{{{variables(LIGHT, light)}background:var(--paper)}}"
        f"@media (prefers-color-scheme:dark){{svg{{{variables(DARK, dark)}}}}}</style>"
    )
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


class Axes:
    """From values to places."""

    def __init__(self, chart: Chart):
        points = [point for curve in chart.curves for point in curve.points]
        xs = [point.x for point in points]
        ys = [y for p in points for y in (p.low, p.high)] + [y for _, y in chart.bounds]
        self.is_log = chart.is_log and all(point.y > 0 for point in points)
        if self.is_log:
            ys = [point.y for point in points]
        self.x0, self.x1 = min(xs), max(xs)
        self.y0, self.y1 = _range(ys, self.is_log, chart.is_share)

    def x(self, value: float) -> float:
        span = self.x1 - self.x0 or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x0) / span

    def y(self, value: float) -> float:
        low, high = self.y0, self.y1
        if self.is_log:
            value, low, high = (math.log10(max(v, low)) for v in (value, low, high))
        share = (value - low) / (high - low or 1.0)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, share))

    def y_ticks(self) -> list[float]:
        if self.is_log:
            first, last = round(math.log10(self.y0)), round(math.log10(self.y1))
            every = max(1, (last - first) // 5)
            return [10.0**k for k in range(first, last + 1, every)]
        return nice_ticks(self.y0, self.y1, 5)


def draw(chart: Chart) -> str:
    axes = Axes(chart)
    parts = [*_frame(chart, axes)]
    for name, value in chart.bounds:
        y = axes.y(value)
        line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="bound"/>'
        words = text(WIDTH - RIGHT - 2, y + (12 if y < TOP + 14 else -4), name, "end")
        parts += [line, words]
    for curve in chart.curves:
        parts += _band(curve, axes)
    for curve in chart.curves:
        parts += _line(curve, axes, chart)
    label = escape(f"{chart.title}: {chart.about}")
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {box} role="img" aria-label="{label}">{STYLE}{"".join(parts)}</svg>'


STYLE = (
    "<style>.t{font:11px system-ui,sans-serif;fill:var(--dim)}"
    ".bound{stroke:var(--ink);stroke-dasharray:6 3;fill:none}"
    ".grid{stroke:var(--grid);fill:none}</style>"
)


def _frame(chart: Chart, axes: Axes) -> Iterable[str]:
    for value in axes.y_ticks():
        y = axes.y(value)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="grid"/>'
        yield text(LEFT - 6, y + 4, shown(value, chart.is_share), "end")
    for value in nice_ticks(axes.x0, axes.x1, 6):
        yield text(axes.x(value), HEIGHT - BOTTOM + 15, shown(value), "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, chart.x_label, "middle")


def _band(curve: Curve, axes: Axes) -> Iterable[str]:
    if not any(point.low < point.high for point in curve.points) or len(curve.points) < 2:
        return
    upper = [(p.x, p.high) for p in curve.points]
    lower = [(p.x, p.low) for p in reversed(curve.points)]
    path = _path([*upper, *lower], axes)
    yield f'<path d="{path}Z" fill="var(--c{curve.colour % NUM_COLOURS})" opacity=".16"/>'


def _line(curve: Curve, axes: Axes, chart: Chart) -> Iterable[str]:
    if not curve.points:
        return
    colour = f"var(--c{curve.colour % NUM_COLOURS})"
    dash = ' stroke-dasharray="5 3"' if curve.is_dashed else ""
    path = _path([(p.x, p.y) for p in curve.points], axes)
    yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
    radius = 3.2 if curve.is_marked or len(curve.points) == 1 else 1.6
    for point in thinned(curve.points):
        tip = f"{chart.x_label} {shown(point.x)}: {shown(point.y, chart.is_share)}"
        if point.low < point.high:
            low, high = shown(point.low, chart.is_share), shown(point.high, chart.is_share)
            tip += f" ({low} to {high})"
        place = f'cx="{axes.x(point.x):.1f}" cy="{axes.y(point.y):.1f}"'
        tip = escape(f"{curve.label}\n{tip}" if curve.label else tip)
        yield f'<circle {place} r="{radius}" fill="{colour}"><title>{tip}</title></circle>'


def thinned(points: Points) -> Points:
    every = max(1, math.ceil(len(points) / MAX_MARKS))
    return points[::every]


def _path(pairs: Sequence[tuple[float, float]], axes: Axes) -> str:
    return "M" + "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in pairs)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "t") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(words)}</text>'


def _range(ys: list[float], is_log: bool, is_share: bool) -> tuple[float, float]:
    low, high = min(ys), max(ys)
    if is_log:
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    if is_share:
        low, high = 0.0, max(high, 0.01)
    if high == low:
        high, low = high + (abs(high) * 0.1 or 1.0), low - (abs(low) * 0.1 if low else 0.0)
    return low, high + (high - low) * 0.04


def nice_ticks(low: float, high: float, num: int) -> list[float]:
    if high <= low:
        return [low]
    raw = (high - low) / num
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next((m * scale for m in (1, 2, 2.5, 5) if m * scale >= raw), 10 * scale)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def shown(value: float, is_share: bool = False) -> str:
    if is_share:
        return f"{100 * value:.3g} %"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
