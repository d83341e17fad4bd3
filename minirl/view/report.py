"""`minirl report`: run directories as one HTML page without network or script, and PNGs beside it.

Takes runs, whole or damaged; gives report.html, one PNG per figure and timeline.svg. Figures have
no background, so that the page can be light or dark; report.html here is its jinja2 template.
Leaves out which curves there are (charts.py).
"""

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.config import KEYS, Config, get
from minirl.errors import MinirlError, RecipeError
from minirl.run_dir import Line, RunDir
from minirl.view.charts import GREY, Family, draw_charts, families, new_figure, number
from minirl.view.runs import formatted, prompt_text, short_names
from minirl.view.trace import Window, read_window

MAX_TIMELINES = 4
MAX_SAMPLES = 12  # with tokens, evenly spread over a run
STATES = {  # and phases: the colour of what a worker does
    **{"generating": "#3aa17e", "prefill": "#1c6b50", "reloading": "#d1495b"},
    **{"training": "#3b78c3", "forward": "#7fa9dc", "optimizer": "#2a5a9f"},
    **{"publishing": "#e6a532", "grading": "#8e63b8", "saving": "#7d6b5d", "starting": "#9aa4b2"},
}


def draw_timeline(windows: dict[str, Window]) -> Any:
    """One panel per run, one row per worker, all on one time axis."""
    from matplotlib.patches import Patch

    heights = [len(window.rows) + 1.5 for window in windows.values()]
    options = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, panels = new_figure(12.0, 0.33 * sum(heights) + 0.7, len(heights), **options)
    for (title, window), axes in zip(windows.items(), panels, strict=True):
        _draw_panel(axes, window)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    panels[-1].set_xlim(0, max(window.seconds for window in windows.values()))
    panels[-1].set_xlabel("seconds")
    patches = [Patch(label=kind, facecolor=colour) for kind, colour in STATES.items()]
    place = {"loc": "outside lower left", "ncols": 10, "columnspacing": 1.0, "handlelength": 1.0}
    figure.legend(handles=patches, frameon=False, labelcolor=GREY, **place)
    return figure


def _draw_panel(axes: Any, window: Window) -> None:
    """Waiting is left open."""
    axes.grid(visible=False)
    for y, slices in enumerate(window.rows.values()):
        bars = [(s.start, s.end - s.start) for s in slices if kind_of(s.name)]
        colours = [STATES[kind] for s in slices if (kind := kind_of(s.name))]
        axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=colours)
        waiting = 1 - sum(length for _, length in bars) / window.seconds
        axes.text(window.seconds, y, f" {waiting:.0%} waiting", color=GREY, va="center")
    for step, start in window.steps.items():
        axes.axvline(start, color=GREY, linewidth=0.6)
        axes.text(start, len(window.rows) - 0.2, f" {step}", color=GREY)
    axes.set_yticks(range(len(window.rows)), list(window.rows))
    axes.set_ylim(len(window.rows), -0.5)


def kind_of(name: str) -> str:
    """Of a state with its phase: the name of a colour; "" where it waits."""
    if name.startswith("waiting"):
        return ""
    state, _, phase = name.partition(": ")
    marks = {"prefill": "prefill after", "optimizer": "optimizer step", "forward": " forward"}
    return next((kind for kind, mark in marks.items() if mark in phase), state)


def read_windows(found: Sequence[Family]) -> dict[str, Window]:
    """Of the first run of each family, by title."""
    runs = {family.name: family.runs[0] for family in found[:MAX_TIMELINES]}
    etas = {name: run.recipe.get("buffer.max_staleness", "?") for name, run in runs.items()}
    windows = {f"{name} (η = {etas[name]})": read_window(run.path) for name, run in runs.items()}
    return {title: window for title, window in windows.items() if window is not None}


def headline(run: RunDir) -> str:
    """Model, task, accuracy before and after, time."""
    scores = []
    for line in run.evals[:1] + run.evals[1:][-1:]:
        score, low, high = (formatted(line.get(k), ".1%") for k in ("accuracy", "low", "high"))
        scores.append(f"{score} ({low} to {high}) at version {line.get('version')}")
    what = f"{run.recipe.get('model.path', '?')} on {run.recipe.get('tasks.kind', '?')}"
    hours = max((number(line, "seconds") or 0 for line in run.metrics), default=0) / 3600
    when = f"{len(run.metrics)} steps in {hours:.2f} h, {run.machine.get('started', '')}"
    return f"{what}: {' → '.join(scores) or 'no evaluation yet'}; {run.state}, {when}"


RESULTS = {  # words: name and format; the mean of the last 5 steps, or the largest
    "reward": ("reward/mean", ".3f"),
    "sampled tokens/s": ("rollout/tokens_per_s", ",.0f"),
    "trained tokens/s": ("train/tokens_per_s", ",.0f"),
    "engines idle": ("rollout/idle_frac", ".0%"),
    "trainers idle": ("train/idle_frac", ".0%"),
    "largest staleness": ("buffer/staleness_max", ".0f"),
    "largest logprob gap": ("train/logprob_gap", ".1e"),
    "groups dropped, largest": ("buffer/groups_dropped", ".0f"),
}


def result_rows(run: RunDir) -> dict[str, str]:
    rows = {}
    for words, (name, form) in RESULTS.items():
        values = [value for line in run.metrics if (value := number(line, name)) is not None]
        kept = [max(values)] if values and "largest" in words else values[-5:]
        rows[words] = formatted(fmean(kept), form) if kept else "—"
    return {**rows, "balance": str(run.summary.get("balance", "—"))}


def table(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """One column per run."""
    keys = dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, dict))
    return [(key, [str(row.get(key, "—")) for row in rows]) for key in keys]


def answers_by_prompt(run: RunDir) -> dict[str, list[tuple[Any, Line]]]:
    """The same held-out prompts: (version, answer)."""
    found: dict[str, list[tuple[Any, Line]]] = defaultdict(list)
    for line in run.evals:
        for answer in line.get("answers", []):
            found[prompt_text(answer.get("prompt"))].append((line.get("version"), answer))
    return found


def samples_with_tokens(run: RunDir) -> list[tuple[Line, int, Any]]:
    """Sample, version of the trainer, (token, version, gap)s; the last step first."""
    samples = [sample for sample in reversed(run.samples) if sample.get("tokens")]
    trained_from = {line["step"]: line.get("version") for line in run.batches}
    found = []
    for sample in samples[:: math.ceil(len(samples) / MAX_SAMPLES) or 1]:
        columns = [sample.get(f"token{name}", []) for name in ("s", "_versions", "_gaps")]
        version = trained_from.get(sample["step"]) or max(columns[1], default=0)
        found.append((sample, version, list(zip(*columns, strict=False))))
    return found


def page(found: Sequence[Family], figures: Sequence[Any], timeline: str) -> str:
    from jinja2 import Environment

    runs = [run for family in found for run in family.runs]
    template = (files("minirl.view") / "report.html").read_text()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    defaults = {key: str(get(Config(), key)).replace("()", "[]") for key in KEYS}
    recipes = table([run.recipe for run in runs])
    return environment.from_string(template).render(
        names=short_names(runs),
        headlines=[headline(run) for run in runs],
        results=table([result_rows(run) for run in runs]),
        figures=figures,
        timeline=timeline,
        answers=[answers_by_prompt(run) for run in runs],
        tokens=[samples_with_tokens(run) for run in runs],
        etas=[number(run.recipe, "buffer.max_staleness") for run in runs],
        chosen=[(key, row) for key, row in recipes if {*row} != {defaults.get(key)}],
        defaults=[(key, row) for key, row in recipes if {*row} == {defaults.get(key)}],
        machines=table([{**run.machine, **run.machine.get("packages", {})} for run in runs]),
    )


def write(runs: Sequence[RunDir], folder: Path) -> list[Path]:
    """The files, the page first."""
    if not find_spec("jinja2") or not find_spec("matplotlib"):
        raise MinirlError('a report needs jinja2 and matplotlib: pip install "minirl[report]"')
    found, timeline = families(runs), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = [(chart, save(figure, folder / chart.name)) for chart, figure in draw_charts(found)]
        if windows := read_windows(found):
            timeline = save(draw_timeline(windows), folder / "timeline")
            (folder / "timeline.svg").write_text(timeline)
        (folder / "report.html").write_text(page(found, drawn, timeline))
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise RecipeError("--out", str(folder), rule, "name a folder of yours") from None
    return [folder / "report.html", *sorted(folder.glob("*.png"))]


def save(figure: Any, path: Path) -> str:
    """PATH.png, and the same as SVG."""
    import matplotlib

    figure.savefig(path.with_suffix(".png"), dpi=150)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minirl"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :]
