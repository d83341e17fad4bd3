"""The dashboard: draws a Status on the terminal, live (Reporter) or from status.json (`watch`).

Takes a Status, gives a picture of any size. rich does layout, screen and cutting; panels, keys and
suspension are here. Text of models and tasks is shown, never obeyed: control characters become
dots. Every state has a glyph beside its colour, for terminals without colours.

Leaves out: where a Status comes from (status.py), plots (curves.py), plain lines (console.py).
"""

import contextlib
import math
import os
import re
import select
import signal
import socket
import termios
import threading
import time
import tty
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from types import FrameType
from unicodedata import category

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from minirl.errors import one_line
from minirl.view.curves import bar, braille, resample, sparkline, strip
from minirl.view.status import Lane, Observer, Phase, Status, step_text

Line = list[tuple[str, str]]  # text and its style

GLYPHS = dict(zip("s.grtpck ", "·░█▓█▓▒█ ", strict=True))  # by a strip's letters
COLOURS = dict(g="green", r="yellow", t="blue", p="magenta", c="cyan", k="blue")
STATES = {"generating": "green", "reloading": "yellow", "training": "blue"}
SLOTS = dict(sampling="green", grading="yellow", ready="magenta", training="blue", free="dim")
PLOTS = (  # metric, title, form of a value, form of the last point's x, colour
    ("reward/mean", "reward", "{:.3f}", "", "blue"),
    ("eval/accuracy", "held-out", "{:.1%}", " at v{:.0f}", "magenta"),
    ("rollout/length_mean", "length", "{:,.0f}", "", "blue"),
    ("rollout/truncated_frac", "cut", "{:.0%}", "", "magenta"),
    ("rollout/tokens_per_s", "generation", "{:,.0f} tok/s", "", "blue"),
    ("train/logprob_gap", "logprob gap", "{:.1e}", "", "magenta"),
)
MIN_WIDTH, MIN_HEIGHT = 50, 14  # in a smaller terminal plain lines say more
WIDE = 130  # from here on samples and notes stand beside the rest
TALL = 9  # rows of a plot, from which on more plots say more than larger ones
TICK_S, LOOK_S, JOIN_S = 0.25, 1.0, 3.0
NO_NEWS_S, SILENT_S = 5.0, 30.0  # of the controller; of a worker without a heartbeat
UNSHOWN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode's categories
UNKNOWN = r"nan( tok/s|%)?"  # a metric that the last step has not
KEYS = {"q": "finish and save", "p": "another sample", "s": "save a checkpoint now"}
WATCH_KEYS = {"q": "leave (the run continues)", "p": "another sample"}
GONE = "and its process is gone"


# -- text


def clean(text: str) -> str:
    """Text of others: line breaks stay, tabs are spaces, other control characters are dots."""
    text = text.replace("\r\n", "\n").replace("\t", "  ")
    return "".join(c if c == "\n" or category(c) not in UNSHOWN else "·" for c in text)


def shorten(text: str, width: int) -> str:
    """On one line, with an ellipsis where it was cut."""
    text = " ".join(clean(text).split())
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


@lru_cache(maxsize=64)
def wrap(text: str, width: int, height: int) -> list[str]:
    """Broken at words; a last line that is not the end has an ellipsis."""
    shown = "\n".join(line for line in clean(text).split("\n") if line.strip())
    lines = [line.plain.rstrip() for line in Text(shown).wrap(Console(width=width), width)]
    if len(lines) > height > 0:
        lines[height - 1] = set_cell_size(lines[height - 1], width - 1).rstrip() + "…"
    return lines[:height]


def clock(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 1e9:
        return "?"
    return str(timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def header(title: str, width: int, right: str = "") -> Line:
    """A rule with its title, and something at its right end if there is room."""
    title, end = shorten(title, width - 3), f" {right} ─" if right else ""
    gap = width - 3 - cell_len(title) - cell_len(end)
    if gap < 1:
        end, gap = "", gap + cell_len(end)
    return [("─ ", "dim"), (title, "bold"), (f" {'─' * gap}{end}", "dim")]


# -- panels: a status, a width and a height give lines; the layout cuts what is too much


def devices(status: Status, width: int, height: int) -> list[Line]:
    lanes = status.lanes
    shown = lanes if len(lanes) < height else lanes[: height - 2]
    lines = [header("devices", width, "last minute"), *(lane(o, status, width) for o in shown)]
    if hidden := [one.state for one in lanes[len(shown) :]]:
        counts = ", ".join(f"{hidden.count(state)} {state}" for state in dict.fromkeys(hidden))
        lines.append([(f"… {len(hidden)} more: {counts}", "dim")])
    return lines


def lane(one: Lane, status: Status, width: int) -> Line:
    state_width = 28 if width >= 70 else 20
    state, style = lane_state(one, status)
    tail = f" {1 - one.idle:4.0%} busy"
    memory = f" {size(one.memory_bytes):>8}" if one.memory_bytes and width >= 78 else ""
    letters = strip(one.strip, max(1, width - 10 - state_width - len(tail + memory)))
    return [
        (set_cell_size(shorten(one.name, 9), 10), "bold"),
        (set_cell_size(shorten(state, state_width - 1), state_width), style),
        *((GLYPHS.get(letter, " "), COLOURS.get(letter, "bright_black")) for letter in letters),
        (tail, ""),
        (memory, "dim"),
    ]


def lane_state(one: Lane, status: Status) -> tuple[str, str]:
    """In words, and its style."""
    state, style = one.state, STATES.get(one.state, "magenta")
    if state == "generating" and one.beat_s <= SILENT_S:
        return f"{state} {one.running}" + (f" at v{one.version}" if one.version >= 0 else ""), style
    if state.startswith("waiting"):
        style = "bright_black"
        if state == "waiting for a batch" and status.batch_size:
            return f"{state} ({status.slots.get('ready', 0)}/{status.batch_size})", style
    elif one.beat_s > SILENT_S and state != "starting":
        return f"{state}, silent {clock(one.beat_s)}", "bold red"
    return f"{state} {clock(one.since_s)}" if one.since_s >= 10 else state, style


def plot(status: Status, width: int, height: int, place: int) -> list[Line]:
    metric, name, form, at, colour = PLOTS[place]
    points = status.curves.get(metric, [])
    values = resample(tuple(points), 2 * max(1, width - 8))
    if not values:
        return [header(name, width), [("nothing yet", "dim")]]
    rows, low, high = braille(values, max(1, height - 1))
    labels = {i: form.format(v).split()[0] for i, v in ((len(rows) - 1, low), (0, high))}
    title = f"{name} {form.format(points[-1][1])}{at.format(points[-1][0])}"
    lines = [header(title, width, f"from {form.format(points[0][1])}")]
    for i, drawn in enumerate(rows):
        lines.append([(f"{labels.get(i, ''):>7} ", "dim"), (drawn, colour)])
    return lines


def bars(counts: dict[str, int], colours: list[str], width: int, form: str) -> list[Line]:
    total = max(1, sum(counts.values()))
    label = max(map(len, counts), default=0) + 1
    lines: list[Line] = []
    for colour, (name, count) in zip(cycle(colours), counts.items(), strict=False):
        number = form.format(count=count, share=count / total)
        filled = bar(count / total, max(1, width - label - len(number)))
        lines.append([(name.ljust(label), ""), (filled, colour), (number, "")])
    return lines or [[("nothing yet", "dim")]]


def staleness(status: Status, width: int, height: int) -> list[Line]:
    counts = {f"{number:>3}": count for number, count in enumerate(status.staleness)}
    if len(counts) > height - 1:  # the oldest share a row
        kept = max(1, height - 2)
        counts = {**dict([*counts.items()][:kept]), f"{kept:>2}+": sum(status.staleness[kept:])}
    title = header("staleness", width, f"η {status.max_staleness}")
    return [title, *bars(counts, ["green"], width, " {share:>4.0%}")]


def slots(status: Status, width: int, height: int) -> list[Line]:
    counts = {name: status.slots.get(name, 0) for name in SLOTS}
    title = header(f"{sum(counts.values())} slots", width)
    return [title, *bars(counts, [*SLOTS.values()], width, " {count:>4}")]


def speed(status: Status, width: int, height: int) -> list[Line]:
    last: dict[str, float] = defaultdict(lambda: math.nan, status.last)
    memory = size(sum(one.memory_bytes for one in status.lanes))
    length = "{rollout/length_mean:,.0f} of {max:,}, {rollout/truncated_frac:.0%} cut"
    rows = [
        ("generation", f"{status.tokens_per_s:,.0f} tok/s", "rollout/tokens_per_s", "green"),
        ("training", "{train/tokens_per_s:,.0f} tok/s", "train/tokens_per_s", "blue"),
        ("length", length, "rollout/length_mean", ""),
        ("logprob gap", "{train/logprob_gap:.1e}", "train/logprob_gap", "magenta"),
        ("memory", f"{memory}, {size(status.free_bytes)} free", "", ""),
    ]
    last["max"] = status.max_new_tokens
    lines = [header("speed", width, f"version {status.version}")]
    for name, form, metric, colour in rows:
        text = f"{name:<12}{re.sub(UNKNOWN, '–', form.format_map(last))} "
        room = min(24, width - len(text))
        drawn = sparkline(status.curves.get(metric, []), room) if room >= 6 else ""
        lines.append([(text.ljust(width - len(drawn)), ""), (drawn, colour)])
    return lines


def sample(status: Status, width: int, height: int, which: int) -> list[Line]:
    """`which` counts back from the newest."""
    if not status.samples:
        return [header("sample", width), [("none yet", "dim")]]
    place = which % len(status.samples)
    one = status.samples[-1 - place]
    wanted = f", wanted {shorten(one.reference, 16)}" if one.reference else ""
    cut = ", cut" if one.stop == "length" else ""
    versions = "–".join(str(version) for version in dict.fromkeys(one.versions))
    title = f"sample of step {one.step}: reward {one.reward:g}{wanted}{cut}, by version {versions}"
    asked = wrap(one.prompt.strip(), width - 2, max(1, min((height - 1) // 3, 6)))
    answer = wrap(one.answer.strip() or "(empty)", width - 2, max(0, height - 1 - len(asked)))
    lines = [header(title, width, f"{place + 1}/{len(status.samples)}")]
    lines += [[("  " if i else "? ", "dim"), (text, "dim")] for i, text in enumerate(asked)]
    colour = "green" if one.reward > 0 else "bold red"
    return lines + [[("  " if i else "> ", colour), (text, "")] for i, text in enumerate(answer)]


def notes(status: Status, width: int, height: int) -> list[Line]:
    """The newest at the bottom."""
    lines: list[Line] = []
    for seconds, text in reversed(status.notes):
        if len(lines) >= height - 1:
            break
        parts = wrap(text, max(10, width - 11), min(3, height - 1 - len(lines)))
        stamps = [f"{seconds:7.1f} s  ", *[" " * 11] * len(parts)]
        lines[:0] = [[(s, "dim"), (part, "")] for s, part in zip(stamps, parts, strict=False)]
    return [header("notes", width), *lines]


# -- the frame


def headline(status: Status, now: float) -> tuple[str, str]:
    """How it ended, that nothing is heard, or what limits throughput; and its style."""
    age = max(0.0, now - status.time)
    if status.state.is_over:
        why = f": {status.reason}" if status.reason else ""
        if status.state is Phase.FINISHED and status.verdict:
            why = f" · {status.verdict}"
        style = "bold red" if status.state is Phase.FAILED else "green"
        return f"ended {clock(age)} ago, {status.state}{why}", style
    if age >= NO_NEWS_S:
        return f"no news for {age:.0f} s {status.reason}".rstrip(), "bold red"
    if status.state is Phase.STARTING:
        return status.doing or "starting", "yellow"
    verdict = status.verdict or "what limits throughput is known after two steps"
    return f"{status.doing} · {verdict}" if status.doing else verdict, "bold"


class Lines:
    """Lines that are drawn to the size that the layout gives them. They become Segments: rich's
    Text and Table would take three times as long."""

    def __init__(self, draw: Callable[[int, int], list[Line]]):
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        height = options.height or 1
        for line in self._draw(options.max_width, height)[:height]:
            for text, style in line:
                shown = text if text.isprintable() else clean(text).replace("\n", "·")
                yield Segment(shown, Style.parse(style))
            yield Segment.line()


def panel(
    draw: Callable[[int, int], list[Line]], size: int | None = None, ratio: int = 1, least: int = 1
) -> Layout:
    return Layout(Lines(draw), size=size, ratio=ratio, minimum_size=least, visible=size != 0)


def fixed(line: Line, size: int) -> Layout:
    return panel(lambda width, height: [line], size)


def gap() -> Layout:
    return fixed([], 2)


def split(splitter: str, *parts: Layout, size: int | None = None, ratio: int = 1) -> Layout:
    layout = Layout(size=size, ratio=ratio, visible=size != 0)
    layout.split(*parts, splitter=splitter)
    return layout


@dataclass(frozen=True)
class Frame:
    """A status as a rich renderable of any size."""

    status: Status
    now: float  # Unix seconds
    which: int = 0  # of the samples, counted back from the newest
    keys: dict[str, str] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Layout]:
        width, height = options.max_width, options.height or options.max_height
        text, style = headline(self.status, self.now)
        head = fixed([(f" {shorten(text, width - 1)}", style)], 1)
        keys: Line = []
        for key, meaning in self.keys.items():
            keys += [(f" {key}", "bold"), (f" {meaning}  ", "dim")]
        body = self._body(width, height - 2 - bool(keys))
        yield split("column", self._title(width), head, body, fixed(keys, int(bool(keys))))

    def _title(self, width: int) -> Layout:
        status = self.status
        share = min(1.0, status.step / max(1, status.steps))
        eta = "" if status.state.is_over else f"  ETA {clock(status.eta_s)}"
        right = f" step {status.step}/{status.steps}  {share:4.0%}  {clock(status.seconds)}{eta} "
        name = f" minirl {shorten(status.name, 32)} "
        name_width = max(9, min(cell_len(name), width - len(right) - 8))
        done = Layout(ProgressBar(1.0, share, style="bright_black", complete_style="green"))
        ends = fixed([(name, "bold")], name_width), fixed([(right, "")], len(right))
        return split("row", ends[0], done, ends[1], size=1)

    def _body(self, width: int, height: int) -> Layout:
        """One column, or two: the run at the left, what it says at the right."""
        is_wide = width >= WIDE
        left = width * 3 // 5 if is_wide else width
        lanes = 1 + max(1, min(len(self.status.lanes), height // (3 if is_wide else 5)))
        run = (
            panel(partial(devices, self.status), lanes),
            self._curves(height if is_wide else height // 2),
            self._figures(left, 6 if height >= 18 else 0),
        )
        said = (
            panel(partial(sample, self.status, which=self.which), ratio=2),
            panel(partial(notes, self.status), least=3),
        )
        if not is_wide:
            return split("column", *run, *said)
        return split("row", split("column", *run, size=left), gap(), split("column", *said))

    def _curves(self, height: int) -> Layout:
        """Reward and held-out accuracy side by side; where there is room, more below them."""
        plots = [panel(partial(plot, self.status, place=place)) for place in range(len(PLOTS))]
        rows = [split("row", a, gap(), b) for a, b in zip(plots[::2], plots[1::2], strict=True)]
        return split("column", *rows[: max(1, height // TALL - 1)], ratio=2)

    def _figures(self, width: int, height: int) -> Layout:
        parts = (
            panel(partial(staleness, self.status), max(16, width // 4)),
            gap(),
            panel(partial(slots, self.status), max(18, width // 4)),
            gap(),
            panel(partial(speed, self.status)),
        )
        return split("row", *parts[0 if width >= 62 else 2 :], size=height)


# -- the terminal


def can_draw(console: Console) -> bool:
    """A terminal that can show it, and ours to use. NO_COLOR only takes the colours away."""
    is_utf = (console.encoding or "").lower().startswith("utf")
    return is_utf and not console.is_dumb_terminal and is_foreground()


def is_foreground() -> bool:
    """A process in the background must not touch the terminal: it would be stopped for it."""
    try:
        return os.isatty(1) and os.tcgetpgrp(1) == os.getpgrp()
    except OSError:
        return False


class Screen:
    """A status on the alternate screen, by rich's Live, and the keys that are pressed meanwhile."""

    def __init__(self, console: Console, keys: dict[str, str]):
        self._console, self._keys = console, keys
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._stdin = 0 if os.isatty(0) else None
        self._modes = termios.tcgetattr(0) if self._stdin is not None else None
        self._which, self._is_closed = 0, False
        self._drawn: tuple[object, ...] = ()

    @property
    def is_on(self) -> bool:
        return self._live.is_started

    def show(self, status: Status) -> None:
        """Draws what is new. In the background, or where there is no room, it draws nothing."""
        width, height = self._console.size
        if self._is_closed or not is_foreground():
            return
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            self._leave()
            return
        new = (status, width, height, self._which)
        if not self.is_on:
            if self._stdin is not None:
                tty.setcbreak(self._stdin, termios.TCSANOW)
            self._live.start()
        elif new == self._drawn:
            return
        self._drawn = new
        frame = Frame(status, time.time(), self._which, self._keys)
        self._live.update(frame, refresh=True)

    def read_keys(self, timeout_s: float) -> str:
        """Keys that were pressed, waiting at most so long; `p` is dealt with here."""
        if self._stdin is None or not self.is_on or not is_foreground():
            time.sleep(timeout_s)
            return ""
        if not select.select([self._stdin], [], [], timeout_s)[0]:
            return ""
        pressed = os.read(self._stdin, 64).decode(errors="ignore").lower()
        if not pressed:  # the terminal is gone
            self._stdin = None
        self._which += pressed.count("p")
        return pressed

    def _leave(self) -> None:
        if self.is_on:
            if self._modes is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(0, termios.TCSAFLUSH, self._modes)
            self._live.stop()

    def close(self) -> None:
        """Gives the terminal back; as often as one likes."""
        self._is_closed = True
        self._leave()

    @contextlib.contextmanager
    def suspendable(self) -> Iterator[None]:
        """Ctrl-Z gives the terminal back, the first draw after `fg` takes it. Main thread only."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.close()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # sleeps here
            signal.signal(signal.SIGTSTP, handle)
            self._is_closed = False

        before = signal.signal(signal.SIGTSTP, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)
            self.close()


# -- a run's own dashboard


class Reporter:
    """A thread of the controller: samples, saves status.json, draws, reads keys. The loop never
    waits for it, and whatever fails here is noted once and costs the picture, not the run."""

    def __init__(
        self,
        observer: Observer,
        run_dir: Path,
        note: Callable[[str], None],
        check: Callable[[], None],  # called once a second
        screen: Screen | None,  # None: status.json alone
    ):
        self._observer, self._run_dir = observer, run_dir
        self._note, self._check, self._screen = note, check, screen
        self._cost = 0.0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The last status says how the run ended."""
        self._is_ending.set()
        self._thread.join(JOIN_S)  # a stopped terminal (Ctrl-S) may hold it up
        loop, state, reason = self._observer.loop, Phase.FINISHED, ""
        if error is not None:
            state = Phase.STOPPED if isinstance(error, KeyboardInterrupt) else Phase.FAILED
            reason = one_line(str(error) or type(error).__name__)
        elif loop.step < loop.config.train.steps:
            state, reason = Phase.STOPPED, "asked to; saved"
        with contextlib.suppress(Exception):  # the result of the run is elsewhere
            last = self._observer.status(self._cost)
            last = replace(last, state=state, reason=reason, doing="", eta_s=None)
            last.save(self._run_dir)

    def _run(self) -> None:
        began, before = time.monotonic(), time.thread_time()
        next_look, status = began, Status()
        while not self._is_ending.is_set():
            try:
                self._observer.sample()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_S
                    status = self._observer.status(self._cost)
                    with contextlib.suppress(OSError):  # a full disk costs `minirl watch` alone
                        status.save(self._run_dir)
                    self._check()
                self._draw(status)
            except Exception as error:
                if self._screen is not None:
                    self._screen.close()
                what = one_line(f"{type(error).__name__}: {error}")
                self._note(f"the dashboard is off, training continues: {what}")
                return
            self._cost = (time.thread_time() - before) / (time.monotonic() - began)

    def _draw(self, status: Status) -> None:
        if self._screen is None:
            self._is_ending.wait(TICK_S)
            return
        was_on = self._screen.is_on
        self._screen.show(status)
        if was_on and not self._screen.is_on and not self._is_ending.is_set():
            self._note("the terminal is too small for the dashboard: plain lines")
        for key in self._screen.read_keys(TICK_S):
            self._press(key)

    def _press(self, key: str) -> None:
        loop = self._observer.loop
        if key == "q":
            what = "finishing already" if loop.is_interrupted else "finishing the step and saving"
            loop.is_interrupted = True
            self._note(f"q: {what}; Ctrl-C ends it now")
        elif key == "s" and loop.step == 0:
            self._note("s: nothing is trained yet")
        elif key == "s":
            loop.wants_save = True
            self._note("s: a checkpoint is saved when the running step is done")


# -- `minirl watch`


def look(run_dir: Path) -> Status:
    found = Status.read(run_dir)
    if found is None:
        return Status(name=run_dir.name, time=time.time(), doing=f"no status.json in {run_dir}")
    is_silent = not found.state.is_over and time.time() - found.time >= NO_NEWS_S
    is_here = found.host == socket.gethostname() and found.pid > 0
    is_gone = is_silent and is_here and not os.path.exists(f"/proc/{found.pid}")
    return replace(found, reason=GONE) if is_gone else found


def watch(run_dir: Path, once: bool = False) -> None:
    """The dashboard of a run that was started elsewhere, until `q`."""
    console = Console(highlight=False, soft_wrap=True)
    if once:
        height = max(24, console.height)
        console.print(Frame(look(run_dir), time.time()), height=height)
    elif not can_draw(console):
        follow(run_dir, console)
    else:
        screen = Screen(console, WATCH_KEYS)
        with screen.suspendable(), contextlib.suppress(KeyboardInterrupt):
            pressed, next_look = "", 0.0
            while "q" not in pressed:
                if time.monotonic() >= next_look:
                    status, next_look = look(run_dir), time.monotonic() + LOOK_S
                screen.show(status)
                pressed = screen.read_keys(TICK_S)


def follow(run_dir: Path, console: Console) -> None:
    """Without a terminal: one plain line per step, until the run is over or gone."""
    last_step = -1
    while True:
        status = look(run_dir)
        if status.step != last_step and status.last:
            text = f"step {status.step}/{status.steps}  {step_text(status.last)}"
            console.print(f"{text}  ETA {clock(status.eta_s)}", markup=False)
        last_step = status.step
        if status.state.is_over or status.reason == GONE:
            console.print(headline(status, time.time())[0], markup=False)
            return
        time.sleep(LOOK_S)
