"""The dashboard as a pure function: snapshot, width, height, time → a frame of exactly that size.

A frame is lines of spans that are already cut and filled, so it never wraps, whatever the terminal;
drawing it costs a few milliseconds, where rich's own layouts take tens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from minirl.view.dashboard import parts
from minirl.view.dashboard.parts import Line, clock, fit, shorten, width_of
from minirl.view.dashboard.snapshot import FAILED, FINISHED, STARTING, Snapshot

STYLES = {
    "": Style(),
    "dim": Style(dim=True),
    "rule": Style(dim=True),
    "title": Style(bold=True),
    "name": Style(bold=True),
    "key": Style(bold=True),
    "idle": Style(color="bright_black"),
    "generate": Style(color="green"),
    "reload": Style(color="yellow"),
    "train": Style(color="blue"),
    "publish": Style(color="magenta"),
    "save": Style(color="cyan"),
    "good": Style(color="green"),
    "bad": Style(color="red", bold=True),
    "verdict": Style(bold=True),
}
MIN_WIDTH, MIN_HEIGHT = 50, 14  # in less, plain lines say more
WIDE = 130  # from here on samples and notes stand beside the rest
SILENT_S = 5.0
NEWLINE = Segment.line()


@dataclass(frozen=True)
class Options:
    sample: int = 0  # counts back from the newest
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Frame:
    """Lines of equal width. As a rich renderable it ends without a line break."""

    lines: list[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for i, line in enumerate(self.lines):
            if i:
                yield NEWLINE
            for text, style in line:
                yield Segment(text, STYLES[style])

    def plain(self) -> str:
        return "\n".join("".join(text for text, _ in line) for line in self.lines)


def render(
    snapshot: Snapshot, width: int, height: int, now: float, options: Options | None = None
) -> Frame:
    """`now` is in Unix seconds: how old the snapshot is, is part of the picture."""
    options = options or Options()
    width, height = max(1, width), max(1, height)
    top = [title(snapshot, width), subtitle(snapshot, width, now)]
    bottom = [key_line(options, width)] if options.keys else []
    room = height - len(top) - len(bottom)
    body = (
        wide(snapshot, width, room, options)
        if width >= WIDE
        else narrow(snapshot, width, room, options)
    )
    body = [*body[: max(0, room)], *[[] for _ in range(room - len(body))]]
    lines = [*top, *body, *bottom][:height]
    return Frame([fit(line, width) for line in lines])


def title(snapshot: Snapshot, width: int) -> Line:
    step, steps = snapshot.step, max(1, snapshot.steps)
    share = min(1.0, step / steps)
    left: Line = [(" minirl ", "title"), (shorten(snapshot.name, 32), "name")]
    eta = "" if snapshot.is_over else f"  ETA {clock(snapshot.eta_s)}"
    right = f" step {step}/{snapshot.steps}  {share:4.0%}  {clock(snapshot.seconds)}{eta} "
    room = width - width_of(left) - len(right) - 1
    if room < 8:
        return [(f" step {step}/{snapshot.steps} {share:.0%}{eta} ", "title"), *left]
    room = min(room, 60)
    full = round(share * room)
    gap = " " * (width - width_of(left) - len(right) - room - 1)
    return [
        *left,
        (" ", ""),
        ("━" * full, "good"),
        ("━" * (room - full), "rule"),
        (gap + right, ""),
    ]


def subtitle(snapshot: Snapshot, width: int, now: float) -> Line:
    """One line: how it ended, that nothing is heard, or what holds it back."""
    age = max(0.0, now - snapshot.time)
    doing = f"{snapshot.doing} · " if snapshot.doing else ""
    if snapshot.is_over:
        why = f": {snapshot.reason}" if snapshot.reason else ""
        style = "bad" if snapshot.state == FAILED else "good"
        if snapshot.state == FINISHED and snapshot.verdict:
            why = f" · {snapshot.verdict}"
        text = f"ended {clock(age)} ago, {snapshot.state}{why}"
    elif age >= SILENT_S:
        style, text = "bad", f"no news for {age:.0f} s {snapshot.reason}"
    elif snapshot.state == STARTING:
        style, text = "reload", snapshot.doing or "starting"
    else:
        style = "verdict"
        text = f"{doing}{snapshot.verdict or 'what holds it back is known after two steps'}"
    return [(f" {shorten(text, width - 1)}", style)]


def key_line(options: Options, width: int) -> Line:
    line: Line = []
    for key, meaning in options.keys:
        line += [(f" {key}", "key"), (f" {meaning}  ", "dim")]
    return line


def narrow(snapshot: Snapshot, width: int, room: int, options: Options) -> list[Line]:
    """One column. What is least needed goes first as rows get few."""
    num_lanes = len(snapshot.lanes)
    lanes = 1 + max(1, min(num_lanes, max(3, room // 5)))
    figures = 6 if room - lanes >= 11 else 0
    left = room - lanes - figures
    curves = min(left, max(4, left * 2 // 5)) if left >= 4 else 0
    left -= curves
    notes = 0 if left < 4 else max(3 if left >= 7 else 2, min(1 + 6, left // 3))
    sample = left - notes
    lines = parts.devices(snapshot, width, lanes)
    if curves:
        lines += parts.padded(parts.curves(snapshot, width, curves), curves)
    if figures:
        lines += parts.padded(parts.figures(snapshot, width, figures), figures)
    if sample > 1:
        lines += parts.padded(parts.sample(snapshot, options.sample, width, sample), sample)
    if notes:
        lines += parts.notes(snapshot, width, notes)
    return lines


def wide(snapshot: Snapshot, width: int, room: int, options: Options) -> list[Line]:
    """Two columns: the run at the left, what it says at the right."""
    left_width = width * 3 // 5
    right_width = width - left_width - 2
    lanes = 1 + max(1, min(len(snapshot.lanes), room // 3))
    figures = min(room - lanes, 6 if room < 30 else max(6, min(9, 2 + len(snapshot.staleness))))
    curves = max(0, room - lanes - max(0, figures))
    left = parts.devices(snapshot, left_width, lanes)
    left += parts.padded(parts.curves(snapshot, left_width, curves), curves) if curves > 1 else []
    left += parts.figures(snapshot, left_width, figures) if figures > 1 else []
    notes = max(3, room // 3)
    right = parts.padded(
        parts.sample(snapshot, options.sample, right_width, room - notes), room - notes
    )
    right += parts.notes(snapshot, right_width, notes)
    return parts.beside(left, left_width, right, right_width)
