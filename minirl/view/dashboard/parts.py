"""The panels of the dashboard. Each takes a Snapshot, a width and a height, and gives lines.

A line is spans of (text, style's name); `fit` makes it exactly as wide as asked. What a model or a
task wrote is shown, never obeyed: control characters are taken out. Every state has a letter of its
own beside its colour, so that nothing is lost without colours.
"""

import math
from unicodedata import category

from rich.cells import cell_len, set_cell_size

from minirl.view.dashboard import plots
from minirl.view.dashboard.snapshot import NUM_BUCKETS, RARE, Curve, Lane, Sample, Snapshot

Span = tuple[str, str]
Line = list[Span]

GLYPHS = {
    "s": ("·", "dim"),
    ".": ("░", "idle"),
    "g": ("█", "generate"),
    "r": ("▓", "reload"),
    "t": ("█", "train"),
    "p": ("▓", "publish"),
    "c": ("▒", "save"),
    "k": ("█", "train"),
    " ": (" ", "dim"),
}
STATE_STYLES = {"generating": "generate", "reloading": "reload", "training": "train"}
SLOTS = {
    "sampling": "generate",
    "grading": "reload",
    "ready": "publish",
    "training": "train",
    "free": "dim",
}
UNSHOWN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode's categories
SILENT_S = 30.0  # without a beat, a lane says so


def clean(text: str) -> str:
    """Text of others: line breaks stay, tabs are spaces, other control characters are dots."""
    if text.isascii() and text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\t", "  ")
    return "".join(c if c == "\n" or category(c) not in UNSHOWN else "·" for c in text)


def width_of(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def fit(line: Line, width: int) -> Line:
    """Cut or filled up to exactly `width` cells."""
    fitted: Line = []
    left = width
    for text, style in line:
        if not text.isprintable():  # the last look: names and reasons are others' too
            text = clean(text).replace("\n", "·")
        taken = cell_len(text)
        if taken > left:
            text, taken = set_cell_size(text, left), left
        if text:
            fitted.append((text, style))
        left -= taken
        if left == 0:
            return fitted
    return [*fitted, (" " * left, "")]


def shorten(text: str, width: int) -> str:
    """On one line, with an ellipsis where it was cut."""
    text = " ".join(clean(text).split())
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def wrap(text: str, width: int, height: int) -> list[str]:
    """Broken at words; a last line that is not the end has an ellipsis."""
    lines: list[str] = []
    for paragraph in clean(text).split("\n"):
        rest = paragraph.rstrip()
        if not rest and (not lines or not lines[-1]):
            continue
        while True:
            if len(lines) > height:
                break
            if cell_len(rest) <= width:
                lines.append(rest)
                break
            head = set_cell_size(rest, width).rstrip(" ") or rest[:1]
            space = head.rfind(" ")
            taken = space if space > width // 2 else len(head)
            lines.append(rest[:taken])
            rest = rest[taken:].lstrip()
    if len(lines) > height > 0:
        last = set_cell_size(lines[height - 1], max(0, width - 1)).rstrip()
        return [*lines[: height - 1], f"{last}…"]
    return lines[: max(0, height)]


def clock(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def padded(lines: list[Line], height: int) -> list[Line]:
    return [*lines[:height], *[[] for _ in range(height - len(lines))]]


def header(title: str, width: int, right: str = "") -> Line:
    """A rule with its title, and something at its right end if there is room."""
    left = f"─ {title} "
    end = f" {right} ─" if right and cell_len(left) + cell_len(right) + 6 <= width else ""
    gap = width - cell_len(left) - cell_len(end)
    if gap < 0:
        return fit([(left, "title")], width)
    return [("─ ", "rule"), (f"{title} ", "title"), ("─" * gap, "rule"), (end, "rule")]


# -- devices


def devices(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    lanes = snapshot.lanes
    shown = lanes if len(lanes) < height else lanes[: max(0, height - 2)]
    lines = [header("devices", width, "last minute")]
    lines += [lane(one, snapshot, width) for one in shown]
    if hidden := lanes[len(shown) :]:
        states = [one.state for one in hidden]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        told = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines.append([(f"… {len(hidden)} more: {told}", "dim")])
    return lines[:height]


def lane(one: Lane, snapshot: Snapshot, width: int) -> Line:
    name_width, state_width = 10, 28 if width >= 70 else 20
    state = one.state
    if state == "waiting for a batch" and snapshot.batch_size:
        state = f"waiting for a batch ({snapshot.slots.get('ready', 0)}/{snapshot.batch_size})"
    elif state == "generating":
        state = f"generating {one.running}" + (f" at v{one.version}" if one.version >= 0 else "")
    elif one.since_s >= 10:
        state = f"{state} {clock(one.since_s)}"
    style = STATE_STYLES.get(one.state, "idle" if one.state.startswith("waiting") else "publish")
    if one.beat_s > SILENT_S and not one.state.startswith("waiting"):
        state, style = f"{one.state}, silent {clock(one.beat_s)}", "bad"
    tail = f" {1 - one.idle:4.0%} busy" if one.strip else ""
    memory = f" {size(one.memory_bytes):>8}" if one.memory_bytes and width >= 78 else ""
    line: Line = [
        (f"{one.name:<{name_width}}"[:name_width], "name"),
        (shorten(state, state_width - 1).ljust(state_width), style),
    ]
    room = width - name_width - state_width - len(tail) - len(memory)
    if room >= 8:
        line += paint(plots.strip(one.strip, room, NUM_BUCKETS, RARE))
        line += [(tail, ""), (memory, "dim")]
    return line


def paint(letters: str) -> Line:
    """Neighbours of one colour make one span."""
    spans: Line = []
    for letter in letters:
        glyph, style = GLYPHS.get(letter, (" ", "dim"))
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + glyph, style)
        else:
            spans.append((glyph, style))
    return spans


# -- curves


MORE_CURVES = (
    (("length", "rollout/length_mean", "{:,.0f}"), ("cut", "rollout/truncated_frac", "{:.0%}")),
    (("generation", "rollout/tokens_per_s", "{:,.0f}"), ("gap", "train/logprob_gap", "{:.1e}")),
)
TALL = 9  # rows of a plot, from which on more plots say more than larger ones


def curves(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Reward and held-out accuracy, side by side; where there is room, more below them."""
    num = 1 + min(len(MORE_CURVES), max(0, height // TALL - 1))
    each = height // num
    lines = main_curves(snapshot, width, height - each * (num - 1))
    for pair in MORE_CURVES[: num - 1]:
        shown = []
        for name, key, form in pair:
            points = snapshot.curves.get(key, Curve())
            told = f"{name} {form.format(points.y[-1])}" if points.y else name
            shown.append((told, points))
        lines += pair_of(shown[0], shown[1], width, each)
    return lines


def main_curves(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    reward, accuracy = snapshot.curves.get("reward/mean", Curve()), snapshot.accuracies
    told = f"reward {reward.y[-1]:.3f}" if reward.y else "reward"
    heldout, right = "held-out", ""
    if accuracy.y:
        heldout = f"held-out {accuracy.y[-1]:.1%} at v{accuracy.x[-1]:.0f}"
        right = f"from {accuracy.y[0]:.1%}"
    return pair_of((told, reward), (heldout, accuracy), width, height, right)


def pair_of(
    left: tuple[str, Curve], right: tuple[str, Curve], width: int, height: int, end: str = ""
) -> list[Line]:
    half = (width - 2) // 2
    first = padded(curve(*left, "", half, height, "train"), height)
    second = curve(*right, end, width - 2 - half, height)
    return beside(first, half, second, width - 2 - half)


def curve(
    title: str, points: Curve, right: str, width: int, height: int, style: str = "publish"
) -> list[Line]:
    lines = [header(title, width, right)]
    rows = height - 1
    label = 6
    if not points.y or rows < 1 or width < label + 4:
        return [*lines, [("nothing yet", "dim")]][:height]
    plotted, low, high = plots.curve(tuple(points.x), tuple(points.y), width - label, rows)
    for i, row in enumerate(plotted):
        shown = high if i == 0 else low if i == rows - 1 else None
        lines.append([(tick(shown).rjust(label - 1) + " ", "dim"), (row, style)])
    return lines[:height]


def tick(value: float | None) -> str:
    """At most five letters."""
    if value is None:
        return ""
    if 0 < abs(value) < 0.01:
        return f"{value:.0e}".replace("e-0", "e-")[:5]
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"[:5]
    return (f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}")[:5]


def beside(left: list[Line], left_width: int, right: list[Line], right_width: int) -> list[Line]:
    num = max(len(left), len(right))
    left = left + [[] for _ in range(num - len(left))]
    right = right + [[] for _ in range(num - len(right))]
    pairs = zip(left, right, strict=True)
    return [[*fit(a, left_width), ("  ", ""), *fit(b, right_width)] for a, b in pairs]


# -- figures


def figures(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Staleness, slots, and numbers; three columns, or two and the numbers cut in the middle."""
    first, second = max(16, width // 4), max(18, width // 4)
    third = width - first - second - 4
    if third < 24:
        first, third = 0, width - second - 2
        return beside(slots(snapshot, second, height), second, numbers(snapshot, third), third)[
            :height
        ]
    two = beside(staleness(snapshot, first, height), first, slots(snapshot, second, height), second)
    return beside(two, first + 2 + second, numbers(snapshot, third)[:height], third)[:height]


def staleness(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    counts = snapshot.staleness
    lines = [header("staleness", width, f"η {snapshot.max_staleness}")]
    total = sum(counts)
    if not total:
        return [*lines, [("nothing yet", "dim")]]
    ages = [str(age) for age in range(len(counts))]
    if len(counts) > height - 1:  # the oldest share a row
        kept = max(1, height - 2)
        counts = [*counts[:kept], sum(counts[kept:])]
        ages = [*ages[:kept], f"{kept}+"]
    room = max(1, width - 10)
    for age, count in zip(ages, counts, strict=True):
        share = count / total
        lines.append(
            [(f"{age:>3} ", "dim"), (plots.bar(share, room), "generate"), (f" {share:>4.0%}", "")]
        )
    return lines[:height]


def slots(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    total = sum(snapshot.slots.values())
    lines = [header(f"{total} slots" if total else "slots", width)]
    room = max(1, width - 15)
    for name, style in SLOTS.items():
        count = snapshot.slots.get(name, 0)
        told = plots.bar(count / total if total else 0.0, room)
        lines.append([(f"{name:<9}", ""), (told, style), (f" {count:>4}", "")])
    return lines[:height]


def numbers(snapshot: Snapshot, width: int) -> list[Line]:
    last = snapshot.last

    def told(name: str, form: str, unit: str = "") -> str:
        return form.format(last[name]) + unit if name in last else "–"

    length = told("rollout/length_mean", "{:,.0f}")
    cut = told("rollout/truncated_frac", "{:.0%}")
    gap = told("train/logprob_gap", "{:.1e}")
    speed = told("train/tokens_per_s", "{:,.0f}", " tok/s")
    memory = sum(one.memory_bytes for one in snapshot.lanes)
    free = f", {size(snapshot.free_bytes)} free" if snapshot.free_bytes else ""
    rows = [
        ("generation", f"{snapshot.tokens_per_s:,.0f} tok/s", "rollout/tokens_per_s", "generate"),
        ("training", speed, "train/tokens_per_s", "train"),
        ("length", f"{length} of {snapshot.max_new_tokens}, {cut} cut", "rollout/length_mean", ""),
        ("logprob gap", gap, "train/logprob_gap", "publish"),
        ("memory", f"{size(memory)}{free}" if memory else "–", "", ""),
    ]
    lines = [header("speed", width, f"version {snapshot.version}")]
    for name, value, key, style in rows:
        line: Line = [(f"{name:<12}", ""), (value, "")]
        room = width - width_of(line) - 1
        points = snapshot.curves.get(key)
        if points and room >= 6:
            room = min(room, 24)
            gap_width = width - width_of(line) - room
            drawn = plots.small_curve(tuple(points.x), tuple(points.y), room)
            line += [(" " * gap_width, ""), (drawn, style)]
        lines.append(line)
    return lines


# -- a sample, and notes


def sample(snapshot: Snapshot, which: int, width: int, height: int) -> list[Line]:
    """`which` counts back from the newest."""
    if not snapshot.samples:
        return [header("sample", width), [("none yet", "dim")]][:height]
    place = which % len(snapshot.samples)
    one = snapshot.samples[-1 - place]
    lines = [header(sample_title(one), width, f"{place + 1}/{len(snapshot.samples)}")]
    room = height - 1
    asked_room = max(1, min(room // 3, 6)) if room >= 2 else 0
    asked = wrap(one.prompt.strip(), width - 2, asked_room)
    answered = wrap(one.answer.strip() or "(empty)", width - 2, room - len(asked))
    style = "good" if one.reward > 0 else "bad"
    lines += [[("? " if i == 0 else "  ", "dim"), (text, "dim")] for i, text in enumerate(asked)]
    lines += [[("> " if i == 0 else "  ", style), (text, "")] for i, text in enumerate(answered)]
    return lines[:height]


def sample_title(one: Sample) -> str:
    version = "–".join(f"{v}" for v in dict.fromkeys(one.versions))
    cut = ", cut" if one.stop == "length" else ""
    wanted = f", wanted {shorten(one.reference, 16)}" if one.reference else ""
    return f"sample of step {one.step}: reward {one.reward:g}{wanted}{cut}, by version {version}"


def notes(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """The newest at the bottom."""
    room = height - 1
    lines: list[Line] = []
    for note in reversed(snapshot.notes):
        if len(lines) >= room:
            break
        stamp = f"{note.seconds:7.1f} s  "
        parts = wrap(note.text, max(10, width - len(stamp)), max(1, min(3, room - len(lines))))
        block = [
            [(stamp if i == 0 else " " * len(stamp), "dim"), (part, "")]
            for i, part in enumerate(parts)
        ]
        lines = block + lines
    return [header("notes", width), *lines][:height] if height else []
