"""The dashboard: what there is to see of a run now (`Status`), and how it looks on a terminal.

Takes a Status, of a run that trains here or, for `minirl watch`, from its status.json; gives a
picture, which is a function of it and fits any size, and the keys that are pressed. Panels are
lists of lines of rich Segments (Text and Table would take three times as long). Leaves out: plain
lines, and how a Status is made (console.py).
"""

import contextlib
import math
import os
import select
import termios
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from minirl.run_dir import RunDir, RunState, replacing
from minirl.view.runs import drops_text

Line = list[Segment]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]  # no NaN
Share = Annotated[float, Field(ge=0, le=1)]
Point = tuple[Number, Number]

FILE = "status.json"
NUM_SECONDS = 60  # that a lane shows
TRENDS = {"train/loss": "loss", "train/entropy": "entropy", "train/grad_norm": "gradient norm"}
SPEED = (  # metric, name, form of a value
    ("rollout/tokens_per_s", "generation", "{:,.0f} tok/s"),
    ("train/tokens_per_s", "training", "{:,.0f} tok/s"),
    ("rollout/length_mean", "length", "{:,.0f} tokens"),
    ("rollout/truncated_frac", "truncated", "{:.0%}"),
    ("train/logprob_gap", "logprob gap", "{:.1e}"),
)
CURVES = ("reward/mean", *TRENDS, *(metric for metric, _, _ in SPEED))
BLOCKS, EIGHTHS = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille, by row and column
MIN_SIZE = (50, 14)  # in a smaller terminal plain lines say more
LOOK_S = 1.0
SILENT_S = 5.0
KEYS = " q finish and save   p another sample   s save a checkpoint now"
WATCH_KEYS = " q leave (the run continues)   p another sample"


@dataclass(frozen=True)
class Lane:
    name: str  # of an engine or a rank
    state: str  # "generating 31 at v40", "waiting for batch", …
    seconds: list[tuple[Share, Share]]  # at work, for weights; newest last
    box: int = 0  # 0 is the head


@dataclass(frozen=True)
class Sample:
    title: str
    prompt: str
    answer: str


class Status(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str = ""
    time: float = 0.0  # when it was made, Unix seconds
    state: RunState = "running"
    doing: str = ""  # what the controller waits for
    reason: str = ""  # why the run failed
    step: int = 0
    steps: int = 0
    seconds: Number = 0.0  # since training began
    verdict: str = ""  # what limits throughput
    lanes: list[Lane] = []
    slots: dict[str, int] = {}
    staleness: list[int] = []  # trained tokens by staleness, recent steps
    max_staleness: int = 0
    curves: dict[str, list[Point]] = {}  # by step
    evaluations: list[tuple[int, Number, Number, Number]] = []  # version, accuracy, its interval
    drops: dict[str, int] = {}  # groups by reason
    last: dict[str, Number] = {}  # the last step's metrics
    samples: list[Sample] = []  # newest last
    notes: list[tuple[Number, str]] = []  # seconds, text; newest last
    cost: float = 0.0  # CPU seconds per second that the reporter takes

    def save(self, run_dir: Path) -> None:
        with replacing(run_dir / FILE, sync=False) as aside:  # a sync could take seconds
            aside.write_text(self.model_dump_json())


def clock(seconds: float) -> str:
    if not 0 <= seconds < 1e9:
        return "?"
    return str(timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")


def eta(line: dict[str, float], steps: int) -> str:
    """After the step of this metrics line, if all take as long as those before."""
    step = line.get("step") or math.nan
    return clock(line.get("seconds", 0.0) / step * (steps - step))


def paint(text: str, style: str = "") -> Segment:
    """Control characters in texts of models become dots."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " if c.isspace() else "·" for c in text)
    return Segment(text, Style.parse(style))


@lru_cache(maxsize=64)
def wrap(text: str, width: int, height: int) -> list[str]:
    """Broken at words; a last line that is not the end has an ellipsis."""
    shown = "\n".join(line for line in text.splitlines() if line.strip())
    lines = [line.plain.rstrip() for line in Text(shown).wrap(Console(), width, tab_size=2)]
    if len(lines) > height > 0:
        lines[height - 1] = set_cell_size(lines[height - 1], width - 1).rstrip() + "…"
    return lines[:height]


def shorten(text: str, width: int) -> str:
    return "".join(wrap(" ".join(text.split()), width, 1))


def header(title: str, width: int) -> Line:
    title = shorten(title, width - 4)
    rule = "─" * (width - 3 - cell_len(title))
    return [paint("─ ", "dim"), paint(title, "bold"), paint(f" {rule}", "dim")]


def beside(height: int, *parts: tuple[list[Line], int]) -> list[Line]:
    """Panels with their widths, side by side."""
    shapes = [Segment.set_shape(lines[:height], width + 2, height) for lines, width in parts]
    return [[segment for line in row for segment in line] for row in zip(*shapes, strict=True)]


def place(value: float, start: float, end: float, most: int) -> int:
    """From 0 at the start to `most` at the end."""
    return round(most * (value - start) / (end - start or 1))


@lru_cache(maxsize=64)  # a curve changes with a step, the picture every second
def resample(points: tuple[Point, ...], num: int) -> tuple[float, ...]:
    """`num` values at equal distances of x: means where there are more points, else on lines."""
    if not points:
        return ()
    parts = np.array_split(np.array(points), min(num, len(points)))
    x, y = np.array([part.mean(axis=0) for part in parts]).T
    return tuple(np.interp(np.linspace(x[0], x[-1], num), x, y).tolist())


@lru_cache(maxsize=64)
def braille(values: tuple[float, ...], height: int) -> tuple[list[str], float, float]:
    """A line through two values per letter, top row first; and its range. A flat line is in the
    middle."""
    low, high, most = min(values), max(values), 4 * height - 1
    if high - low <= 1e-9 * abs(high):
        low, high = low - (0.1 * abs(low) or 0.5), high + (0.1 * abs(high) or 0.5)
    levels = [place(value, low, high, most) for value in values]
    rows = [[0x2800] * ((len(levels) + 1) // 2) for _ in range(height)]
    for column, (before, level) in enumerate(pairwise([levels[0], *levels])):
        for dot in range(level, before, 1 if before > level else -1) or [level]:
            row, part = divmod(most - dot, 4)
            rows[row][column // 2] |= DOTS[part][column % 2]
    return ["".join(map(chr, row)) for row in rows], low, high


def bar(share: float, width: int) -> str:
    """Filled from the left, to an eighth of a letter; more than nothing is always seen."""
    eighths = max(round(min(1.0, share) * width * 8), int(share > 0))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width, "░")[:width]


def letter(seconds: list[Point]) -> str:
    """As high as the share at work; ▓ only where weights took the most."""
    if not seconds:
        return " "
    work, weights = map(fmean, zip(*seconds, strict=True))
    is_reload = weights > max(work, 1 - work - weights)
    return "▓" if is_reload else BLOCKS[round(8 * min(1.0, work + weights))].replace(" ", "·")


def lane(one: Lane, width: int) -> Line:
    style = "bold red" if ", silent" in one.state else ""
    line = [paint(f"{one.name:<10.9}", "bold"), paint(f"{one.state:<25.24}", style)]
    known, cells = one.seconds[-NUM_SECONDS:], min(NUM_SECONDS, max(1, width - 58))
    edges = [max(0, len(known) - (cells - i) * NUM_SECONDS // cells) for i in range(cells + 1)]
    for mark, run in groupby(letter(known[a:b]) for a, b in pairwise(edges)):
        line.append(paint("".join(run), {"▓": "magenta", "·": "bright_black"}.get(mark, "green")))
    means = map(fmean, zip(*known, strict=True))
    return [*line, paint(" {:4.0%} work {:4.0%} weights".format(*means) if known else "")]


def plot(title: str, points: list[Point], form: str, width: int, height: int) -> list[Line]:
    values = resample(tuple(points), 2 * max(1, width - 9))
    if not values:
        return [header(title, width), [paint("nothing yet", "dim")]]
    rows, low, high = braille(values, height - 1)
    first, last, bottom, top = (form.format(y) for y in (points[0][1], points[-1][1], low, high))
    return framed(f"{title} {last}, from {first}", rows, (top, bottom), width)


def framed(title: str, rows: Iterable[str], ends: tuple[str, str], width: int) -> list[Line]:
    """With the largest and the smallest value beside the first and the last row."""
    drawn = [[paint(" " * 9), paint(row, "blue")] for row in rows]
    drawn[-1][0], drawn[0][0] = (paint(f"{end:>8} ", "dim") for end in reversed(ends))
    return [header(title, width), *drawn]


def evaluations(status: Status, width: int, height: int) -> list[Line]:
    """Dots with their 95 % intervals, over an axis of versions."""
    if not (known := status.evaluations):
        return [header("held-out accuracy", width), [paint("not evaluated yet", "dim")]]
    shown = [y for _, *values in known for y in values]
    top, bottom, newest = max(shown), min(shown), max(status.step, *(one[0] for one in known))
    grid = np.full((height - 2, max(1, width - 9)), " ")
    for version, *values in known:
        column = place(version, 0, newest, grid.shape[1] - 1)
        row, end, begin = (place(y, top, bottom, height - 3) for y in values)
        grid[begin : end + 1, column] = "│"
        grid[row, column] = "●"
    _, last, low, high = known[-1]
    since = f"from {known[0][1]:.1%}" if len(known) > 1 else f"at version {known[0][0]}"
    title = f"held-out {last:.1%} ({100 * low:.0f}–{100 * high:.0f}), {since}"
    lines = framed(title, map("".join, grid), (f"{top:.1%}", f"{bottom:.1%}"), width)
    return [*lines, [paint(f" version 0{newest:>{max(0, width - 10)}}", "dim")]]


def bars(title: str, counts: dict[str, int], form: str, width: int) -> list[Line]:
    lines = [header(title, width)]
    for name, number in counts.items():
        share = number / max(1, sum(counts.values()))
        filled = paint(bar(share, max(1, width - 14)), "green")
        lines.append([paint(f"{name:<9}"), filled, paint(form.format(number, share))])
    return lines


def speed(status: Status, width: int) -> list[Line]:
    lines = [header(f"speed of step {status.step}", width)]
    for metric, name, form in SPEED:
        value = form.format(status.last[metric]) if metric in status.last else "–"
        values = resample(tuple(status.curves.get(metric, ())), max(1, min(24, width - 25)))
        top = max((*values, 0.0)) or 1.0
        drawn = "".join(BLOCKS[round(8 * max(0.0, value / top))] for value in values)
        lines.append([paint(f"{name:<12}{value:<12} "), paint(drawn, "blue")])
    return lines


def sample(status: Status, width: int, height: int, which: int) -> list[Line]:
    """`which` counts back from the newest."""
    if not status.samples:
        return [header("sample", width), [paint("none yet", "dim")]]
    place = which % len(status.samples)
    one = status.samples[-1 - place]
    asked = wrap(one.prompt.strip(), width - 2, max(1, (height - 1) // 3))
    answer = wrap(one.answer.strip() or "(empty)", width - 2, max(0, height - 1 - len(asked)))
    lines = [[paint("? ", "dim"), paint(text, "dim")] for text in asked]
    lines += [[paint("> ", "green"), paint(text)] for text in answer]
    return [header(f"sample {place + 1}/{len(status.samples)} {one.title}", width), *lines]


def headline(status: Status, now: float) -> tuple[str, str]:
    """How it ended, silence, or what limits throughput; and its style."""
    age = max(0.0, now - status.time)
    if status.state != "running":
        why, style = status.verdict, "green"
        if status.state == "failed":
            why, style = status.reason or "its process is gone", "bold red"
        return f"ended {clock(age)} ago, {status.state}: {why}", style
    if age >= SILENT_S:
        return f"no news for {age:.0f} s", "bold red"
    verdict = status.verdict or "what limits throughput is known after two steps"
    return f"{status.doing} · {verdict}" if status.doing else verdict, "bold"


def body(status: Status, width: int, height: int, which: int) -> list[Line]:
    """Panels from top to bottom."""
    half, quarter = (width - 2) // 2, max(18, width // 4)
    rest = width - 2 * quarter - 4
    boxes = [list(own) for _, own in groupby(status.lanes, key=lambda one: one.box)] or [[]]
    lines = list[Line]()
    for lanes in boxes:
        where = f"box {lanes[0].box}: " if len(boxes) > 1 else ""
        lines.append(header(f"{where}{len(lanes)} devices, last minute", width))
        lines += [lane(one, width) for one in lanes[: max(2, height // 5) // len(boxes) or 1]]
    if len(lines) > height // 3:
        each = len(lines) // len(boxes)
        num = (height // 3 - 1) // each
        lines = [*lines[: num * each], [paint(f"and {len(boxes) - num} more boxes", "dim")]]
    num_more = 6 if height >= 33 else 0  # rows for the trends of training
    rows = max(3, (height - len(lines) - 6 - num_more) // 2)
    reward = plot("reward", status.curves.get("reward/mean", []), "{:.3f}", half, rows)
    lines += beside(rows, (reward, half), (evaluations(status, half, rows), half))
    if num_more:
        third, points = (width - 4) // 3, status.curves
        trends = [plot(TRENDS[n], points.get(n, []), "{:.2g}", third, num_more) for n in TRENDS]
        lines += beside(num_more, *((trend, third) for trend in trends))
    counts = {str(age): count for age, count in enumerate(status.staleness[:4])}
    counts |= {"older": sum(status.staleness[4:])} if status.staleness[4:] else {}
    stale = bars(f"staleness, η {status.max_staleness}", counts, "{1:>5.0%}", quarter)
    slots = bars(f"{sum(status.slots.values())} slots", status.slots, "{0:>5}", quarter)
    lines += beside(6, (stale, quarter), (slots, quarter), (speed(status, rest), rest))
    if status.drops:
        text = f"{sum(status.drops.values()):,} groups dropped: {drops_text(status.drops)}"
        lines.append([paint(shorten(text, width), "yellow")])
    lines += sample(status, width, max(2, (height - len(lines)) * 3 // 5), which)
    lines.append(header("notes", width))
    for seconds, text in status.notes[-max(1, height - len(lines)) :]:
        lines.append([paint(f"{seconds:7.1f} s  ", "dim"), paint(shorten(text, width - 11))])
    return lines


def picture(status: Status, now: float, size: tuple[int, int], which: int, keys: str) -> Segments:
    """Exactly as large as asked; what is too much is left out above the keys."""
    (width, height), share = size, min(1.0, status.step / max(1, status.steps))
    right = f" step {status.step}/{status.steps}  {share:4.0%}  {clock(status.seconds)}"
    right += f"  ETA {eta(status.last, status.steps)} " if status.state == "running" else " "
    name = f" minirl {shorten(status.name, max(1, min(32, width - len(right) - 18)))} "
    done = bar(share, max(1, width - cell_len(name) - len(right) - 2))
    top = [paint(name, "bold"), paint("▕"), paint(done, "green"), paint("▏"), paint(right)]
    text, style = headline(status, now)
    lines = [top, [paint(f" {shorten(text, width - 1)}", style)]]
    lines += body(status, width, height - 3, which)
    above = Segment.set_shape(lines[: height - 1], width, height - 1)
    rows = [*above, Segment.adjust_line_length([paint(keys, "dim")], width)]
    return Segments([segment for row in rows for segment in (*row, Segment.line())])


def can_draw(console: Console) -> bool:
    """A terminal that is large enough, and ours: a process in the background would be stopped for
    using it."""
    is_large = console.width >= MIN_SIZE[0] and console.height >= MIN_SIZE[1]
    with contextlib.suppress(OSError):  # it is not a terminal, or not that of this session
        is_ours = os.isatty(0) and os.tcgetpgrp(1) == os.getpgrp()
        return is_ours and is_large and not console.is_dumb_terminal
    return False


class Screen(contextlib.ExitStack):
    """A status on the alternate screen, and the keys that are pressed meanwhile."""

    def __init__(self, console: Console, keys: str):
        """Keys come at once and unseen. Ctrl-Z is off: it would leave the screen as it is."""
        super().__init__()
        self._console, self._keys, self._which = console, keys, 0
        modes = termios.tcgetattr(0)
        self.callback(self._restore, termios.tcgetattr(0))
        self.enter_context(console.screen())
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(0, termios.TCSANOW, modes)

    def _restore(self, modes: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSAFLUSH, modes)

    def show(self, status: Status) -> str:
        """Draws it; gives the keys that are pressed within a second. `p` is dealt with here."""
        width, height = map(max, self._console.size, MIN_SIZE)
        drawn = picture(status, time.time(), (width, height), self._which, self._keys)
        self._console.update_screen(drawn)
        if not select.select([0], [], [], LOOK_S)[0]:
            return ""
        pressed = os.read(0, 64).decode(errors="ignore").lower()
        if not pressed:  # the terminal is gone
            time.sleep(LOOK_S)
        self._which += pressed.count("p")
        return pressed


def look(run_dir: Path) -> Status:
    """The files of a run say how it ended. A fresh status is no failure, whatever the lock says."""
    state = RunDir(run_dir).state
    try:
        found = Status.model_validate_json((run_dir / FILE).read_bytes())
    except (OSError, ValidationError):
        found = Status(time=time.time(), doing=f"no status.json in {run_dir}")
    is_silent = time.time() - found.time >= SILENT_S
    return found.model_copy(update={"state": state}) if is_silent or state != "failed" else found


def watch(run_dir: Path) -> None:
    """Until `q`; once, where there is no terminal."""
    console = Console(highlight=False, soft_wrap=True)
    if not can_draw(console):
        size = console.width, max(24, console.height)
        console.print(picture(look(run_dir), time.time(), size, 0, ""))
        return
    with Screen(console, WATCH_KEYS) as screen, contextlib.suppress(KeyboardInterrupt):
        while "q" not in screen.show(look(run_dir)):
            pass
