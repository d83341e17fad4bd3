"""What each device did, as a picture: a row a worker, a colour a state, waits left open.

Takes traced runs (log.trace), gives SVG on one time axis, so that what is a bubble in one run and
gone in another is seen at a glance. Each pixel shows what its stretch of time was mostly spent on.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from minirl.view.report import svg
from minirl.view.trace import WAITING, Reader, Slice

NUM_STEPS = 5  # shown: of a whole run nothing would be seen
WIDTH, LEFT, RIGHT = 980, 82, 92
ROW, GAP, HEAD, FOOT, LEGEND = 22, 5, 26, 20, 24
COLUMNS = WIDTH - LEFT - RIGHT

LIGHT = {
    "generating": "#3aa17e",
    "prefill": "#1c6b50",
    "reloading": "#d1495b",
    "training": "#3b78c3",
    "forward": "#7fa9dc",
    "optimizer": "#1f4580",
    "publishing": "#e6a532",
    "grading": "#8e63b8",
    "saving": "#7d6b5d",
    "starting": "#9aa4b2",
}
DARK = {**LIGHT, "prefill": "#9be3c8", "optimizer": "#b9d4f5"}
WORDS = {
    "forward": "forward without gradient",
    "prefill": "prefill after a reload",
    "optimizer": "optimizer step",
}


@dataclass(frozen=True)
class Window:
    """A stretch of one run."""

    title: str
    start: float
    end: float
    steps: tuple[tuple[int, float], ...]  # number, begin
    rows: tuple[tuple[str, tuple[Slice, ...]], ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def waiting_share(self, slices: Sequence[Slice]) -> float:
        idle = sum(
            max(0.0, min(s.end, self.end) - max(s.start, self.start))
            for s in slices
            if s.name.startswith(WAITING)
        )
        return idle / max(1e-9, self.seconds)


def kind_of(slice: Slice) -> str:
    """A colour's name; "" where it waits."""
    if slice.name.startswith(WAITING):
        return ""
    phase = str(slice.facts.get("phase", ""))
    if phase.endswith(" forward"):
        return "forward"
    word = phase.split()[0] if phase else ""
    return word if word in ("prefill", "optimizer") else slice.name


def window(title: str, reader: Reader, num_steps: int = NUM_STEPS) -> Window | None:
    """The last whole steps before the last one, which an evaluation follows. None: no trace."""
    steps = reader.steps()
    if not steps:
        return None
    last = steps[-1]
    begin = steps[max(0, len(steps) - 1 - num_steps)]
    end = last.start if len(steps) > 1 else last.end
    rows = []
    for worker in reader.workers:
        seen = (s for s in reader.states(worker) if s.end > begin.start and s.start < end)
        rows.append((worker, tuple(seen)))
    inside = tuple((s.step, s.start) for s in steps if begin.start <= s.start <= end)
    return Window(title, begin.start, end, inside, tuple(rows))


def columns(slices: Sequence[Slice], start: float, seconds: float, num: int) -> list[str | None]:
    """For each pixel the kind that has most of its time; None: nothing is known of it."""
    width = seconds / num
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(num)]
    for slice in slices:
        begin = max(0.0, (slice.start - start) / width)
        end = min(float(num), (slice.end - start) / width)
        kind = kind_of(slice)
        for place in range(int(begin), min(num, int(end) + 1)):
            shares[place][kind] += max(0.0, min(end, place + 1) - max(begin, place))
    return [max(s, key=lambda k: s[k]) if sum(s.values()) > 0 else None for s in shares]


def stretches(kinds: Sequence[str | None]) -> Iterator[tuple[str | None, int, int]]:
    """Neighbours that are alike, as (kind, first, number)."""
    first = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[first]:
            yield kinds[first], first, place - first
            first = place


def draw(windows: Sequence[Window]) -> str:
    seconds = max(w.seconds for w in windows)
    parts, y = [svg.STYLE, STYLE], 0.0
    used: dict[str, None] = {}
    for window in windows:
        drawn, y = _panel(window, seconds, y, used)
        parts += drawn
    parts.append(_axis(seconds, y))
    y += FOOT
    parts.append(_legend([kind for kind in LIGHT if kind in used], y))
    y += LEGEND
    box = f'viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}"'
    label = "what each device did over time"
    return f'<svg {box} role="img" aria-label="{label}">{"".join(parts)}</svg>'


STYLE = (
    "<style>.h{font:600 13px system-ui,sans-serif;fill:var(--ink)}"
    ".w{fill:none;stroke:var(--dim);stroke-width:.6;stroke-dasharray:2 2}"
    ".s{stroke:var(--ink);stroke-width:.6;opacity:.45}</style>"
)


def _panel(
    window: Window, seconds: float, y: float, used: dict[str, None]
) -> tuple[list[str], float]:
    num = max(1, round(COLUMNS * window.seconds / seconds))
    parts = [svg.text(LEFT, y + 17, window.title, kind="h")]
    parts.append(svg.text(WIDTH - RIGHT + 8, y + 17, "waiting"))
    y += HEAD
    bottom = y + len(window.rows) * (ROW + GAP)
    for step, at in window.steps[:-1]:
        x = LEFT + num * (at - window.start) / window.seconds
        parts.append(f'<path d="M{x:.1f} {y - 4:.1f}V{bottom:.1f}" class="s"/>')
        parts.append(svg.text(x + 3, bottom + 8, f"step {step}"))
    for worker, slices in window.rows:
        parts.append(svg.text(LEFT - 6, y + ROW - 7, worker, "end"))
        kinds = columns(slices, window.start, window.seconds, num)
        for kind, first, count in stretches(kinds):
            if kind is None:
                continue
            used.setdefault(kind)
            length_s = count / num * window.seconds
            tip = f"{WORDS.get(kind, kind) or 'waiting'}, {length_s:.2f} s"
            place = f'x="{LEFT + first}" y="{y:.1f}" width="{count}" height="{ROW}"'
            look = f'fill="var(--{kind})"' if kind else 'class="w"'
            parts.append(f"<rect {place} {look}><title>{escape(tip)}</title></rect>")
        share = window.waiting_share(slices)
        parts.append(svg.text(WIDTH - RIGHT + 8, y + ROW - 7, f"{share:.0%}"))
        y += ROW + GAP
    return parts, y + 14


def _axis(seconds: float, y: float) -> str:
    parts = [f'<path d="M{LEFT} {y:.1f}H{LEFT + COLUMNS}" class="grid"/>']
    for value in svg.nice_ticks(0, seconds, 8):
        x = LEFT + COLUMNS * value / seconds
        parts.append(svg.text(x, y + 14, f"{value:g} s", "middle"))
    return "".join(parts)


def _legend(kinds: Sequence[str], y: float) -> str:
    parts, x = [], float(LEFT)
    for kind in [*kinds, ""]:
        look = f'fill="var(--{kind})"' if kind else 'class="w"'
        words = WORDS.get(kind, kind) or "waiting"
        parts.append(f'<rect x="{x:.0f}" y="{y + 6:.0f}" width="12" height="10" {look}/>')
        parts.append(svg.text(x + 17, y + 15, words))
        x += 34 + 6.2 * len(words)
    return "".join(parts)
