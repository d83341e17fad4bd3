"""`minirl report`: run directories as one HTML page without network or script, and PNGs beside it.

Takes runs, whole or damaged; gives report.html, one PNG per figure and timeline.svg. matplotlib
draws each figure once: the page gets it as SVG whose colours are CSS variables, so that it follows
light and dark. report.html here is the jinja2 template of the page.

Runs whose recipes differ only in the seed are one family: one curve with a band.
Leaves out: everything that needs a model, a GPU or the processes of a run.
"""

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.errors import MinirlError, RecipeError
from minirl.run_dir import RunDir
from minirl.view.runs import Line, formatted, last, prompt_text, short_names
from minirl.view.trace import Slice, Window, read_window

NOT_COMPARED = ("seed", "log.", "checkpoint.", "tasks.verifiers")
MAX_KEYS = 3  # in a label
MAX_TIMELINES = 4
NUM_TOKEN_STEPS = 8  # of a run, evenly spread
GAP_LEVELS = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
NUM_COLOURS = 6
LIGHT = {
    **{"ink": "#1d2433", "dim": "#667085", "grid": "#e4e7ec", "paper": "#fefefe"},
    **{"c0": "#1f6fb4", "c1": "#c8572b", "c2": "#2b8a5b"},
    **{"c3": "#8a4fb0", "c4": "#b08a00", "c5": "#c2347c"},
    **{"generating": "#3aa17e", "prefill": "#1c6b50", "reloading": "#d1495b"},
    **{"training": "#3b78c3", "forward": "#7fa9dc", "optimizer": "#1f4580"},
    **{"publishing": "#e6a532", "grading": "#8e63b8", "saving": "#7d6b5d", "starting": "#9aa4b2"},
}
DARK = {
    **LIGHT,
    **{"ink": "#e8ebf1", "dim": "#98a2b3", "grid": "#313a4a", "paper": "#141922"},
    **{"c0": "#6cb2f0", "c1": "#f0956b", "c2": "#6fd0a0"},
    **{"c3": "#c79bea", "c4": "#e5c558", "c5": "#f07fb4"},
    **{"prefill": "#9be3c8", "optimizer": "#b9d4f5"},
}


# -- runs that belong together


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float
    high: float


Points = tuple[Point, ...]
Values = Callable[[RunDir], Points]


@dataclass(frozen=True)
class Family:
    label: str
    runs: tuple[RunDir, ...]

    def points(self, of: Values) -> Points:
        """One run: its own points and band. Several: mean, lowest and highest where x is shared."""
        if len(self.runs) == 1:
            return of(self.runs[0])
        at: dict[float, list[float]] = defaultdict(list)
        for point in (point for run in self.runs for point in of(run)):
            at[point.x].append(point.y)
        return tuple(Point(x, fmean(ys), min(ys), max(ys)) for x, ys in sorted(at.items()))


def families(runs: Sequence[RunDir]) -> list[Family]:
    found: dict[str, list[RunDir]] = defaultdict(list)
    for run in runs:
        kept = sorted((k, shown(v)) for k, v in run.recipe.items() if not _is_ignored(k))
        found[str(kept or run.path)].append(run)  # without a recipe: a family of its own
    firsts = [group[0] for group in found.values()]
    keys = [key for key in differing(firsts) if not _is_ignored(key)]
    labels = [_label(group, keys if len(firsts) > 1 else []) for group in found.values()]
    return [
        Family(label if labels.count(label) == 1 else f"{label} ({group[0].name})", tuple(group))
        for label, group in zip(labels, found.values(), strict=True)
    ]


def _is_ignored(key: str) -> bool:
    return key.startswith(NOT_COMPARED)


def _label(group: list[RunDir], keys: list[str]) -> str:
    recipe = group[0].recipe
    parts = [f"{key} = {shown(recipe[key])}" for key in keys[:MAX_KEYS] if key in recipe]
    more = ", …" if len(keys) > MAX_KEYS else ""
    seeds = f", {len(group)} seeds" if len(group) > 1 else ""
    return (", ".join(parts) + more if parts else group[0].name) + seeds


def differing(runs: Sequence[RunDir]) -> list[str]:
    """Recipe keys that do not have one value in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    return [key for key in keys if len({shown(run.recipe.get(key)) for run in runs}) > 1]


def shown(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- which curves there are


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _points(lines: Iterable[Line], x: str, y: str, band: Callable[..., Any]) -> Points:
    """`band` gives (low, high) of a line and its y."""
    pairs = ((line, number(line, x), number(line, y)) for line in lines)
    return tuple(Point(a, b, *band(line, b)) for line, a, b in pairs if None not in (a, b))  # type: ignore[arg-type]


def of_metric(name: str) -> Values:
    return lambda run: _points(run.metrics, "step", name, lambda line, y: (y, y))


def reward_points(run: RunDir) -> Points:
    """The band: two standard errors, counted by prompts, whose answers are not independent."""
    num_prompts = number(run.recipe, "train.batch_size") or 1

    def band(line: Line, mean: float) -> tuple[float, float]:
        error = 2 * (number(line, "reward/std") or 0.0) / math.sqrt(num_prompts)
        return mean - error, mean + error

    return _points(run.metrics, "step", "reward/mean", band)


def accuracy_points(run: RunDir, x: str = "version") -> Points:
    def band(line: Line, mean: float) -> tuple[float, float]:
        low, high = number(line, "low"), number(line, "high")
        return mean if low is None else low, mean if high is None else high

    return _points(run.evals, x, "accuracy", band)


def accuracy_by_time(run: RunDir) -> Points:
    return accuracy_points(run, "seconds")


def length_points(run: RunDir) -> Points:
    """The band: the middle 80 % of a step's answers."""
    written = {
        line["step"]: sorted(
            n for group in line.get("groups", []) for n in group.get("lengths", [])
        )
        for line in run.batches
    }

    def band(line: Line, mean: float) -> tuple[float, float]:
        lengths = written.get(line["step"]) or [mean]
        return lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]

    return _points(run.metrics, "step", "rollout/length_mean", band)


@dataclass(frozen=True)
class Kind:
    """One chart. `series`: word in the legend to a metric, or to the values of a run."""

    name: str  # of its file
    title: str
    about: str
    series: dict[str, str | Values]
    is_share: bool = False  # from 0 to 1, shown in %
    is_log: bool = False
    x_label: str = "step"


KINDS = (
    Kind("reward", "Reward", "mean of each step's answers", {"": reward_points}),
    Kind(
        "accuracy",
        "Held-out accuracy",
        "mean reward on held-out prompts",
        {"": accuracy_points},
        x_label="version",
    ),
    Kind(
        "accuracy_time",
        "Held-out accuracy by time",
        "mean reward on held-out prompts, by wall time",
        {"": accuracy_by_time},
        x_label="seconds",
    ),
    Kind(
        "staleness",
        "Staleness and its bound",
        "of trained tokens; no token is ever above the bound η (buffer.max_staleness)",
        {"mean": "buffer/staleness_mean", "max": "buffer/staleness_max"},
    ),
    Kind("lengths", "Length of answers", "tokens that the model wrote", {"": length_points}),
    Kind(
        "truncated",
        "Cut at the limit",
        "share of answers that ran into rollout.max_new_tokens",
        {"": "rollout/truncated_frac"},
        is_share=True,
    ),
    Kind(
        "entropy",
        "Entropy",
        "of the policy at trained tokens, in nats; a fall to 0 ends exploration",
        {"": "train/entropy"},
    ),
    Kind("kl", "KL to the first model", "in nats", {"": "train/kl"}),
    Kind(
        "clip",
        "Clipped and capped",
        "share of trained tokens whose ratio was clipped, and whose w = prox / behaviour was above "
        "train.behav_cap",
        {"clipped": "train/clip_frac", "capped": "train/capped_frac"},
        is_share=True,
    ),
    Kind(
        "gap",
        "Logprob gap",
        "mean |vLLM's logprob − the trainer's| at tokens of the same version: it should stay flat",
        {"all": "train/logprob_gap", "after tokens of an older version": "train/spliced_gap"},
        is_log=True,
    ),
    Kind("grad_norm", "Gradient norm", "before clipping", {"": "train/grad_norm"}),
    Kind(
        "throughput",
        "Throughput",
        "tokens per second: sampled by all engines, trained by the ranks while they train",
        {"sampled": "rollout/tokens_per_s", "trained": "train/tokens_per_s"},
    ),
    Kind(
        "idle",
        "Idle",
        "share of each step in which engines had nothing to sample, and rank 0 no batch",
        {"engines": "rollout/idle_frac", "trainers": "train/idle_frac"},
        is_share=True,
    ),
)


@dataclass(frozen=True)
class Curve:
    label: str
    points: Points
    colour: str
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    kind: Kind
    curves: tuple[Curve, ...]
    bounds: tuple[float, ...] = ()  # η

    @property
    def legend(self) -> list[Curve]:
        named = [curve for curve in self.curves if curve.label]
        return named if len(named) > 1 else []


def charts(found: Sequence[Family]) -> list[Chart]:
    """Those that have a point."""
    etas = {number(run.recipe, "buffer.max_staleness") for f in found for run in f.runs}
    bounds = tuple(sorted(eta for eta in etas if eta is not None))
    drawn = [
        Chart(kind, tuple(_curves(kind, found)), bounds if kind.name == "staleness" else ())
        for kind in KINDS
    ]
    return [chart for chart in drawn if chart.curves]


def _curves(kind: Kind, found: Sequence[Family]) -> Iterable[Curve]:
    """Colour distinguishes families where there are several, else the series."""
    for n, family in enumerate(found):
        for place, (word, source) in enumerate(kind.series.items()):
            of = of_metric(source) if isinstance(source, str) else source
            is_alone = len(found) == 1
            parts = [word] if is_alone and word else [family.label, word]
            label = " · ".join(part for part in parts if part)
            colour = f"c{(place if is_alone else n) % NUM_COLOURS}"
            curve = Curve(label, family.points(of), colour, place > 0 and not is_alone)
            if kind.x_label == "seconds" and len(family.runs) > 1:  # no x is shared
                singles = [tuple(Point(p.x, p.y, p.y, p.y) for p in of(r)) for r in family.runs]
                yield from (Curve("" if i else label, p, colour) for i, p in enumerate(singles))
            elif curve.points:
                yield curve


# -- drawing


def draw_chart(chart: Chart) -> Any:
    """A figure without title and legend: the page has them beside it."""
    figure, (axes,) = _figure(6.4, 3.5)
    for curve in chart.curves:
        xs, ys = [p.x for p in curve.points], [p.y for p in curve.points]
        colour, style = LIGHT[curve.colour], "--" if curve.is_dashed else "-"
        marker = "o" if chart.kind.x_label != "step" or len(xs) == 1 else None
        label = curve.label or "_"
        axes.plot(xs, ys, style, color=colour, marker=marker, markersize=5, label=label)
        low, high = [p.low for p in curve.points], [p.high for p in curve.points]
        if low != high:
            axes.fill_between(xs, low, high, color=colour, alpha=0.16, linewidth=0)
    for eta in chart.bounds:
        axes.axhline(eta, color=LIGHT["ink"], linestyle="--", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(f"η = {eta:g}", (0.99, eta), color=LIGHT["dim"], **place)
    _scale(axes, chart)
    figure.subplots_adjust(left=0.115, right=0.98, top=0.97, bottom=0.13)
    return figure


def _scale(axes: Any, chart: Chart) -> None:
    kind, points = chart.kind, [p for curve in chart.curves for p in curve.points]
    low, high = min(p.low for p in points), max(p.high for p in points)
    axes.locator_params(axis="x", nbins=7, integer=kind.x_label != "seconds")
    if kind.is_log and min(p.y for p in points) > 0:
        axes.set_yscale("log")
        decades = [math.floor(math.log10(min(p.y for p in points))), math.ceil(math.log10(high))]
        axes.set_ylim(10.0 ** decades[0], 10.0 ** max(decades[1], decades[0] + 1))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    else:
        axes.locator_params(axis="y", nbins=6)
        top = max(high, *chart.bounds, 0.01 if kind.is_share else low) or 1.0
        if kind.is_share or 0 <= low < 0.5 * top:
            axes.set_ylim(0.0, top * 1.05)
        form = (lambda v, _: f"{100 * v:.3g} %") if kind.is_share else (lambda v, _: _tick(v))
        axes.yaxis.set_major_formatter(form)
    if len({point.x for point in points}) == 1:
        axes.set_xlim(points[0].x - 1, points[0].x + 1)
    axes.set_xlabel(kind.x_label)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _figure(width: float, height: float, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for each in axes:
        each.spines[:].set_visible(False)
        each.tick_params(colors=LIGHT["dim"], length=0, labelsize=10)
        each.xaxis.label.set(color=LIGHT["dim"], size=10)
        each.grid(axis="y", color=LIGHT["grid"])
        each.set_axisbelow(True)
    return figure, axes


def svg_of(figure: Any) -> str:
    """With CSS variables for colours and the page's font."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minirl"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r"font: ([^;\"]*?)([\d.]+px)[^;\"]*", r"font: \1\2 system-ui, sans-serif", text)
    text = re.sub(r' id="[a-zA-Z]+\d*_\d+"', "", text)
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def standalone(svg: str) -> str:
    """As a file of its own: with the values of the colours."""
    style = f"svg{{{_variables(LIGHT)}background:var(--paper)}}"
    dark = f"@media (prefers-color-scheme:dark){{svg{{{_variables(DARK)}}}}}"
    head, _, rest = svg.partition(">")
    return f"{head}><style>{style}{dark}</style>{rest}"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


# -- the timeline


WORDS = {
    "forward": "forward without gradient",
    "prefill": "prefill after a reload",
    "optimizer": "optimizer step",
}


def kind_of(slice: Slice) -> str:
    """The name of a colour; "" where it waits."""
    if slice.is_wait:
        return ""
    state, _, phase = slice.name.partition(": ")
    if phase.endswith(" forward"):
        return "forward"
    word = phase.partition(" ")[0]
    return word if word in ("prefill", "optimizer") else state


def draw_timeline(windows: Sequence[tuple[str, Window]]) -> Any:
    """One panel per run, one row per worker, all on one time axis."""
    from matplotlib.patches import Patch

    heights = [len(window.rows) + 1.0 for _, window in windows]
    size = (13.6, 0.37 * sum(heights) + 1.0)
    options: dict[str, Any] = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, panels = _figure(*size, rows=len(windows), **options)
    used: set[str] = set()
    for (title, window), axes in zip(windows, panels, strict=True):
        used |= _draw_panel(axes, window)
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=LIGHT["ink"])
    panels[-1].set_xlim(0, max(window.seconds for _, window in windows))
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    kinds = [*(kind for kind in LIGHT if kind in used), ""]
    patches = [Patch(label=WORDS.get(k, k) or "waiting", **_look(k)) for k in kinds]
    look = {"frameon": False, "fontsize": 11, "labelcolor": LIGHT["dim"], "handlelength": 1.0}
    figure.legend(handles=patches, loc="lower left", ncols=10, columnspacing=1.2, **look)
    margins = {"top": 1 - 0.35 / size[1], "bottom": 0.75 / size[1], "hspace": 0.35}
    figure.subplots_adjust(left=0.08, right=0.9, **margins)
    return figure


def _draw_panel(axes: Any, window: Window) -> set[str]:
    axes.grid(visible=False)
    used: set[str] = set()
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "color": LIGHT["dim"]}
    for y, (_, slices) in enumerate(window.rows):
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for slice in slices:
            bars[kind_of(slice)].append((slice.start, slice.end - slice.start))
        waits = bars.pop("", [])
        axes.broken_barh([(0, window.seconds)], (y - 0.4, 0.8), **_look(""))
        for kind, spans in bars.items():
            axes.broken_barh(spans, (y - 0.4, 0.8), **_look(kind))
        used |= bars.keys()
        share = sum(length for _, length in waits) / window.seconds
        axes.text(1.01, y, f"{share:.0%} waiting", **beside)
    for name, begin in window.steps:
        axes.axvline(begin, color=LIGHT["ink"], linewidth=0.6, alpha=0.45)
        axes.text(begin, len(window.rows) - 0.25, f" {name}", color=LIGHT["dim"], va="center")
    axes.set_yticks(range(len(window.rows)), [name for name, _ in window.rows])
    axes.set_ylim(len(window.rows), -0.5)
    return used


def _look(kind: str) -> dict[str, Any]:
    """Waiting is left open."""
    if kind:
        return {"facecolor": LIGHT.get(kind, LIGHT["starting"])}
    return {"facecolor": "none", "edgecolor": LIGHT["dim"], "linestyle": ":", "linewidth": 0.6}


# -- what the page says


def result_rows(run: RunDir) -> dict[str, str]:
    """What a run came to, in words."""
    lines, recipe = run.metrics, run.recipe
    first = run.evals[0].get("accuracy") if run.evals else None
    trained = sum(number(line, "train/tokens") or 0 for line in lines)
    return {
        "state": str(run.state),
        "seed": shown(recipe.get("seed")),
        "steps": f"{len(lines)} of {shown(recipe.get('train.steps'))}",
        "seconds": formatted(last(lines, "seconds"), ".0f"),
        "reward, last 5 steps": formatted(_tail(lines, "reward/mean"), ".3f"),
        "held-out accuracy before": formatted(first, ".1%"),
        "held-out accuracy after": formatted(last(run.evals, "accuracy"), ".1%"),
        "trained tokens": f"{trained:,.0f}",
        "max staleness": formatted(_largest(lines, "buffer/staleness_max"), ".0f"),
        "allowed staleness": shown(recipe.get("buffer.max_staleness")),
        "largest logprob gap": formatted(_largest(lines, "train/logprob_gap"), ".1e"),
        "sampled tokens/s, last 5": formatted(_tail(lines, "rollout/tokens_per_s"), ",.0f"),
        "trained tokens/s, last 5": formatted(_tail(lines, "train/tokens_per_s"), ",.0f"),
        "engines idle, last 5": formatted(_tail(lines, "rollout/idle_frac"), ".0%"),
        "trainers idle, last 5": formatted(_tail(lines, "train/idle_frac"), ".0%"),
        "groups dropped": formatted(last(lines, "buffer/groups_dropped"), ".0f"),
        "balance": shown(run.summary.get("balance")),
    }


def _numbers(lines: Sequence[Line], name: str) -> list[float]:
    return [value for line in lines if (value := number(line, name)) is not None]


def _tail(lines: Sequence[Line], name: str) -> float | None:
    values = _numbers(lines, name)[-5:]
    return fmean(values) if values else None


def _largest(lines: Sequence[Line], name: str) -> float | None:
    return max(_numbers(lines, name), default=None)


def machine_rows(run: RunDir) -> dict[str, str]:
    facts = dict(run.machine)
    packages = facts.pop("packages", None) or {}
    names = ("device_kind", "gpus", "cuda", "cpu", "cores", "memory_gib", "system", "python")
    rows = {name: facts[name] for name in (*names, "started") if facts.get(name) not in (None, [])}
    return {key: shown(value) for key, value in {**rows, **packages}.items()}


def table(rows: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """One column per run."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [(key, [row.get(key, "—") for row in rows]) for key in keys]


def answers_by_prompt(run: RunDir) -> dict[str, list[tuple[Any, Line]]]:
    """The same held-out prompts: (version, answer)."""
    found: dict[str, list[tuple[Any, Line]]] = defaultdict(list)
    for line in run.evals:
        for answer in line.get("answers", []):
            found[prompt_text(answer.get("prompt"))].append((line.get("version"), answer))
    return found


@dataclass(frozen=True)
class Token:
    text: str
    version: int
    age: int
    gap: float | None
    is_masked: bool

    @property
    def level(self) -> int:
        """Of the gap: 0 to 5; an unknown one is 0."""
        return 0 if self.gap is None else sum(abs(self.gap) >= level for level in GAP_LEVELS)


def samples_with_tokens(run: RunDir) -> list[tuple[Line, int, list[Token]]]:
    """Sample, version of the trainer, tokens; the last step first."""
    samples = [sample for sample in run.samples if sample.get("tokens")]
    steps = sorted({sample["step"] for sample in samples})
    spread = {round(i * (len(steps) - 1) / (NUM_TOKEN_STEPS - 1)) for i in range(NUM_TOKEN_STEPS)}
    wanted = {step for place, step in enumerate(steps) if place in spread} or set(steps)
    versions = {line["step"]: line.get("version") for line in run.batches}
    eta = number(run.recipe, "buffer.max_staleness")
    found = []
    for sample in (sample for sample in reversed(samples) if sample["step"] in wanted):
        written = sample.get("token_versions", [])
        version = versions.get(sample["step"])
        version = max(written, default=0) if version is None else version
        gaps = sample.get("token_gaps") or [None] * len(written)
        found.append(
            (sample, version, list(_tokens(sample["tokens"], written, gaps, version, eta)))
        )
    return found


def _tokens(
    texts: list[str], versions: list[int], gaps: list[float | None], now: int, eta: float | None
) -> Iterable[Token]:
    for text, version, gap in zip(texts, versions, gaps, strict=False):
        age = max(0, now - version)
        yield Token(text, version, age, gap, eta is not None and age > eta)


def page(found: Sequence[Family], figures: Sequence[tuple[Chart, str]], timeline: str) -> str:
    from jinja2 import Environment

    runs = [run for family in found for run in family.runs]
    template = (files("minirl.view") / "report.html").read_text()
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            names=short_names(runs),
            light=_variables(LIGHT),
            dark=_variables(DARK),
            results=table([result_rows(run) for run in runs]),
            figures=figures,
            timeline=timeline,
            answers=[answers_by_prompt(run) for run in runs],
            tokens=[samples_with_tokens(run) for run in runs],
            etas=[run.recipe.get("buffer.max_staleness", 0) for run in runs],
            gap_levels=GAP_LEVELS,
            differing=differing(runs),
            recipes=table([{k: shown(v) for k, v in run.recipe.items()} for run in runs]),
            machines=table([machine_rows(run) for run in runs]),
        )
    )


# -- writing


def write(runs: Sequence[RunDir], folder: Path) -> list[Path]:
    """The files, the page first."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        words = " and ".join(missing)
        raise MinirlError(f'a report needs {words}: pip install "minirl[report]"')
    found = families(runs)
    windows = timelines(found)
    pages = [folder / "report.html"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures, timeline = [], ""
        for chart in charts(found):
            figure = draw_chart(chart)
            figures.append((chart, svg_of(figure)))
            pages.append(_save_png(figure, chart, folder / f"{chart.kind.name}.png"))
        if windows:
            figure = draw_timeline(windows)
            timeline = svg_of(figure)
            pages += [folder / "timeline.svg", folder / "timeline.png"]
            pages[-2].write_text(standalone(timeline))
            figure.savefig(pages[-1], dpi=110)
        pages[0].write_text(page(found, figures, timeline))
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise RecipeError("--out", str(folder), rule, "name a folder of yours") from None
    return pages


def _save_png(figure: Any, chart: Chart, path: Path) -> Path:
    """Looked at alone: with a title and a legend."""
    axes = figure.axes[0]
    axes.set_title(chart.kind.title, fontsize=12)
    if chart.legend:
        axes.legend(fontsize=9, framealpha=0.85, edgecolor="none")
    figure.subplots_adjust(top=0.9)
    figure.savefig(path, dpi=130)
    return path


def timelines(found: Sequence[Family]) -> list[tuple[str, Window]]:
    """One traced run of each family, with its title."""
    windows = []
    for family in found:
        traced = ((run, window) for run in family.runs if (window := read_window(run.path)))
        for run, window in list(traced)[:1]:
            eta = run.recipe.get("buffer.max_staleness")
            kind = "synchronous" if eta == 0 else "asynchronous"
            windows.append((f"{kind} (η = {eta}): {run.name}", window))
    return windows[:MAX_TIMELINES]
