"""`minirl report`: run directories as one HTML page without network or script, and PNGs beside it.

Takes runs, whole or damaged; gives report.html, one PNG per figure and timeline.svg. matplotlib
draws each figure once: the page gets it as SVG whose colours are CSS variables, so that it follows
light and dark. report.html here is the jinja2 template of the page.

Leaves out: which curves there are (charts.py), and whatever needs a model, a GPU or the processes
of a run.
"""

import io
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.errors import MinirlError, RecipeError
from minirl.run_dir import RunDir
from minirl.view.charts import Chart, Family, charts, families, number, shown
from minirl.view.runs import Line, formatted, last, prompt_text, short_names
from minirl.view.trace import Slice, Window, read_window

MAX_TIMELINES = 4
NUM_TOKEN_STEPS = 8  # of a run, evenly spread
GAP_LEVELS = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
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
    age: int  # versions behind the step that trained it
    gap: float | None

    @property
    def level(self) -> int:
        """Of the gap: 0 to 5; an unknown one is 0."""
        return 0 if self.gap is None else sum(abs(self.gap) >= level for level in GAP_LEVELS)


def samples_with_tokens(run: RunDir) -> list[tuple[Line, int, list[Token]]]:
    """Sample, version of the trainer, tokens; the last step first."""
    samples = [sample for sample in run.samples if sample.get("tokens")]
    steps = sorted({sample["step"] for sample in samples}, reverse=True)
    wanted = set(steps[:: math.ceil(len(steps) / NUM_TOKEN_STEPS) or 1])
    trained_from = {line["step"]: line.get("version") for line in run.batches}
    found = []
    for sample in (sample for sample in reversed(samples) if sample["step"] in wanted):
        versions = sample.get("token_versions", [])
        gaps = sample.get("token_gaps") or [None] * len(versions)
        now = trained_from.get(sample["step"]) or max(versions, default=0)
        columns = zip(sample["tokens"], versions, gaps, strict=False)
        found.append((sample, now, [Token(t, v, max(0, now - v), gap) for t, v, gap in columns]))
    return found


def _max_staleness(run: RunDir) -> int:
    """Where the recipe is lost: so much that no token counts as masked."""
    eta = number(run.recipe, "buffer.max_staleness")
    return 2**31 if eta is None else int(eta)


def page(found: Sequence[Family], figures: Sequence[tuple[Chart, str]], timeline: str) -> str:
    from jinja2 import Environment

    runs = [run for family in found for run in family.runs]
    template = (files("minirl.view") / "report.html").read_text()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    recipes = table([{key: shown(v) for key, v in run.recipe.items()} for run in runs])
    return environment.from_string(template).render(
        names=short_names(runs),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        results=table([result_rows(run) for run in runs]),
        figures=figures,
        timeline=timeline,
        answers=[answers_by_prompt(run) for run in runs],
        tokens=[samples_with_tokens(run) for run in runs],
        etas=[_max_staleness(run) for run in runs],
        gap_levels=GAP_LEVELS,
        differing=[(key, values) for key, values in recipes if len({*values}) > 1],
        alike=[(key, values[:1]) for key, values in recipes if len({*values}) == 1],
        machines=table([machine_rows(run) for run in runs]),
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
