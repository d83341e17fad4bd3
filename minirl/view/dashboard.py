"""The dashboard: draws a Status on the terminal, live (Reporter) or from status.json (`watch`).

Takes a Status, gives a picture of any size: panels are lists of lines of rich Segments (Text and
Table would take three times as long). Leaves out: where a Status comes from (status.py).
"""

import contextlib
import os
import select
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from minirl.errors import one_line
from minirl.run_dir import RunDir
from minirl.view.status import SPEED, Lane, Observer, Phase, Point, Status, clock, eta

Line = list[Segment]

BLOCKS, EIGHTHS = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille, by row and column
COLOURS = {"█": "green", "▓": "magenta", "▒": "cyan"}  # of a strip's letters; others are dim
MIN_SIZE = (50, 14)  # in a smaller terminal plain lines say more
LOOK_S = 1.0
SILENT_S = 5.0
KEYS = " q finish and save   p another sample   s save a checkpoint now"
WATCH_KEYS = " q leave (the run continues)   p another sample"


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


@lru_cache(maxsize=64)  # a curve changes with a step, the picture every second
def resample(points: tuple[Point, ...], num: int) -> tuple[float, ...]:
    """`num` values at equal distances of x: means where there are more points, else on lines."""
    known = np.array([(x, y) for x, y in points if abs(x) < 1e99 and abs(y) < 1e99])  # no NaN
    if not len(known):
        return ()
    parts = [part.mean(axis=0) for part in np.array_split(known, min(num, len(known)))]
    x, y = np.array(parts).T
    return tuple(np.interp(np.linspace(x[0], x[-1], num), x, y).tolist())


@lru_cache(maxsize=64)
def braille(values: tuple[float, ...], height: int) -> tuple[list[str], float, float]:
    """A line through two values per letter, top row first; and its range. A flat line is in the
    middle."""
    low, high, most = min(values), max(values), 4 * height - 1
    if high - low <= 1e-9 * abs(high):
        low, high = low - (0.1 * abs(low) or 0.5), high + (0.1 * abs(high) or 0.5)
    levels = [round((value - low) / (high - low) * most) for value in values]
    rows = [[0x2800] * ((len(levels) + 1) // 2) for _ in range(height)]
    for column, (before, level) in enumerate(pairwise([levels[0], *levels])):
        for dot in range(level, before, 1 if before > level else -1) or [level]:
            row, part = divmod(most - dot, 4)
            rows[row][column // 2] |= DOTS[part][column % 2]
    return ["".join(map(chr, row)) for row in rows], low, high


def sparkline(points: tuple[Point, ...], width: int) -> str:
    values = resample(points, width)
    top = max((*values, 0.0)) or 1.0
    return "".join(BLOCKS[round(8 * max(0.0, value / top))] for value in values)


def bar(share: float, width: int) -> str:
    """Filled from the left, to an eighth of a letter; more than nothing is always seen."""
    eighths = max(round(min(1.0, share) * width * 8), int(share > 0))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(width)[:width]


def lane(one: Lane, width: int) -> Line:
    is_silent = ", silent" in one.state
    style = "bold red" if is_silent else COLOURS.get(one.strip[-1:], "bright_black")
    line = [paint(f"{one.name:<10.9}", "bold"), paint(f"{one.state:<27.26}", style)]
    cells, letters = max(1, width - 47), one.strip or " "
    for letter, run in groupby(letters[i * len(letters) // cells] for i in range(cells)):
        line.append(paint("".join(run), COLOURS.get(letter, "bright_black")))
    busy = sum(letter in COLOURS for letter in letters) / len(letters.strip() or " ")
    return [*line, paint(f" {busy:4.0%} busy")]


def plot(title: str, points: list[Point], form: str, width: int, height: int) -> list[Line]:
    values = resample(tuple(points), 2 * max(1, width - 8))
    if not values:
        return [header(title, width), [paint("nothing yet", "dim")]]
    rows, low, high = braille(values, height - 1)
    labels = [form.format(high), *[""] * (height - 3), form.format(low)]
    first, last = form.format(points[0][1]), form.format(points[-1][1])
    lines = [header(f"{title} {last}, from {first}", width)]
    for label, row in zip(labels, rows, strict=True):
        lines.append([paint(f"{label:>7} ", "dim"), paint(row, "blue")])
    return lines


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
        drawn = sparkline(tuple(status.curves.get(metric, ())), max(1, min(24, width - 25)))
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
    if status.is_over:
        style = "bold red" if status.state == "failed" else "green"
        return f"ended {clock(age)} ago, {status.state}: {status.reason or status.verdict}", style
    if age >= SILENT_S:
        return f"no news for {age:.0f} s", "bold red"
    verdict = status.verdict or "what limits throughput is known after two steps"
    return f"{status.doing} · {verdict}" if status.doing else verdict, "bold"


def body(status: Status, width: int, height: int, which: int) -> list[Line]:
    """Panels from top to bottom."""
    half, quarter = (width - 2) // 2, max(18, width // 4)
    rest = width - 2 * quarter - 4
    lanes = [lane(one, width) for one in status.lanes[: max(2, height // 5)]]
    lines = [header(f"{len(status.lanes)} devices, last minute", width), *lanes]
    rows = max(3, (height - len(lines) - 6) * 2 // 5)
    reward = plot("reward", status.curves.get("reward/mean", []), "{:.3f}", half, rows)
    accuracy = plot("held-out", status.curves.get("eval/accuracy", []), "{:.1%}", half, rows)
    lines += beside(rows, (reward, half), (accuracy, half))
    counts = {str(age): count for age, count in enumerate(status.staleness[:4])}
    counts |= {"older": sum(status.staleness[4:])} if status.staleness[4:] else {}
    stale = bars(f"staleness, η {status.max_staleness}", counts, "{1:>5.0%}", quarter)
    slots = bars(f"{sum(status.slots.values())} slots", status.slots, "{0:>5}", quarter)
    lines += beside(6, (stale, quarter), (slots, quarter), (speed(status, rest), rest))
    lines += sample(status, width, max(2, (height - len(lines)) * 3 // 5), which)
    lines.append(header("notes", width))
    for seconds, text in status.notes[-max(1, height - len(lines)) :]:
        lines.append([paint(f"{seconds:7.1f} s  ", "dim"), paint(shorten(text, width - 11))])
    return lines


def picture(
    status: Status, now: float, width: int, height: int, which: int = 0, keys: str = ""
) -> Segments:
    """Exactly as large as asked; what is too much is left out above the keys."""
    share = min(1.0, status.step / max(1, status.steps))
    right = f" step {status.step}/{status.steps}  {share:4.0%}  {clock(status.seconds)}"
    right += " " if status.is_over else f"  ETA {eta(status.last, status.steps)} "
    name = f" minirl {shorten(status.name, max(1, min(32, width - len(right) - 18)))} "
    done = bar(share, max(1, width - cell_len(name) - len(right) - 2))
    top = [paint(name, "bold"), paint("▕"), paint(done, "green"), paint("▏"), paint(right)]
    text, style = headline(status, now)
    lines = [top, [paint(f" {shorten(text, width - 1)}", style)]]
    lines += body(status, width, height - 3, which)
    lines = [*lines[: height - 1], *[[]] * (height - 1 - len(lines)), [paint(keys, "dim")]]
    rows = (Segment.adjust_line_length(line, width) for line in lines)
    return Segments([segment for row in rows for segment in (*row, Segment.line())])


def can_draw(console: Console) -> bool:
    """A terminal that is large enough, and ours: a process in the background would be stopped for
    using it."""
    is_large = console.width >= MIN_SIZE[0] and console.height >= MIN_SIZE[1]
    with contextlib.suppress(OSError):  # it is not a terminal, or not that of this session
        is_ours = os.isatty(0) and os.tcgetpgrp(1) == os.getpgrp()
        return is_ours and is_large and not console.is_dumb_terminal
    return False


class Screen:
    """A status on the alternate screen, and the keys that are pressed meanwhile."""

    def __init__(self, console: Console, keys: str):
        self._console, self._keys, self._which = console, keys, 0

    def __enter__(self) -> "Screen":
        """Keys come at once and unseen. Ctrl-Z is off: it would leave the screen as it is."""
        self._modes, modes = termios.tcgetattr(0), termios.tcgetattr(0)
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(0, termios.TCSANOW, modes)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSAFLUSH, self._modes)
        if self._console.is_alt_screen:
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)

    def show(self, status: Status) -> str:
        """Draws it; gives the keys that are pressed within a second. `p` is dealt with here."""
        width, height = map(max, self._console.size, MIN_SIZE)
        drawn = picture(status, time.time(), width, height, self._which, self._keys)
        self._console.update_screen(drawn)
        if not select.select([0], [], [], LOOK_S)[0]:
            return ""
        pressed = os.read(0, 64).decode(errors="ignore").lower()
        if not pressed:  # the terminal is gone
            time.sleep(LOOK_S)
        self._which += pressed.count("p")
        return pressed


class Reporter:
    """A thread of the controller: makes a status, saves and draws it, reads keys. The loop never
    waits for it, and whatever fails here is noted and costs the picture, not the run."""

    def __init__(
        self, observer: Observer, run_dir: Path, note: Callable[[str], None], screen: Screen | None
    ):
        self._observer, self._run_dir, self._note, self._screen = observer, run_dir, note, screen
        self._cost, self._is_ending = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The last status says how the run ended."""
        self._is_ending.set()
        self._thread.join(3.0)  # a stopped terminal (Ctrl-S) may hold it up
        loop, reason = self._observer.loop, ""
        state: Phase = "finished" if loop.step >= loop.config.train.steps else "stopped"
        if error is not None:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            reason = one_line(str(error) or type(error).__name__)
        with contextlib.suppress(Exception):  # the result of the run is elsewhere
            last = self._observer.status(self._cost)
            replace(last, state=state, reason=reason, doing="").save(self._run_dir)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            while not self._is_ending.is_set():
                status = self._observer.status(self._cost)
                with contextlib.suppress(OSError):  # a full disk costs `minirl watch` alone
                    status.save(self._run_dir)
                if self._screen is None:
                    self._is_ending.wait(LOOK_S)
                else:
                    self._press(self._screen.show(status))
                self._cost = time.thread_time() / (time.monotonic() - began)
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}")
            self._note(f"the dashboard is off, training continues: {what}")
            if self._screen is not None:
                self._screen.__exit__()

    def _press(self, keys: str) -> None:
        loop = self._observer.loop
        if "q" in keys:
            loop.is_interrupted = True
            self._note("q: finishing the step and saving; Ctrl-C ends it now")
        if "s" in keys and loop.step > 0:
            loop.wants_save = True
            self._note("s: a checkpoint is saved when the running step is done")


def look(run_dir: Path) -> Status:
    """A controller that is silent and does not hold its lock was killed."""
    found = Status.read(run_dir)
    if found.is_over or time.time() - found.time < SILENT_S or RunDir(run_dir).state == "running":
        return found
    return replace(found, state="failed", reason="its process is gone")


def watch(run_dir: Path, once: bool = False) -> None:
    """Until `q`; once, where there is no terminal."""
    console = Console(highlight=False, soft_wrap=True)
    if once or not can_draw(console):
        console.print(picture(look(run_dir), time.time(), console.width, max(24, console.height)))
        return
    with Screen(console, WATCH_KEYS) as screen, contextlib.suppress(KeyboardInterrupt):
        while "q" not in screen.show(look(run_dir)):
            pass
