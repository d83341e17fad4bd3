"""`minirl report`: run directories as one HTML page without network or script, and PNGs beside it.

Takes runs, whole or damaged; gives report.html and one PNG per figure. Runs whose recipes differ in
their seed alone are one family: its curve is their mean, with a band from the lowest to the
highest. A single run's accuracy has its 95 % interval as a band. Figures have no background and one
grey that can be read on white and on black; report.html here is the page's jinja2 template. Leaves
out what a step's workers did: Perfetto shows that (shm/tracer.py).
"""

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from minirl.config import KEYS, Config, get
from minirl.errors import MinirlError
from minirl.run_dir import Line, RunDir
from minirl.view.runs import formatted, prompt_text, short_names, so_far, summary_rows

Families = dict[str, list[RunDir]]  # by the name of the first run
Point = tuple[float, float, float, float]  # x, y, lowest, highest

MAX_SAMPLES = 12  # with tokens, evenly spread over a run
GREY = "#7b8494"
COLOURS = ("#2f7fc4", "#d2622f", "#329a66", "#9a5fc0", "#b8920c", "#d0458c")


class Chart(NamedTuple):
    name: str  # of its file
    title: str
    about: str
    value: str  # the name of a metric
    is_share: bool = False
    x: str = "step"  # else it shows evaluations

    def curve(self, runs: Sequence[RunDir]) -> list[Point]:
        """One point per step: an evaluation's time differs from run to run."""
        found: dict[int, list[Point]] = defaultdict(list)
        for run in runs:
            for line in run.metrics if self.x == "step" else run.evals:
                x, y, low, high = (number(line, n) for n in (self.x, self.value, "low", "high"))
                if x is not None and y is not None:
                    found[line["step"]].append((x, y, y if low is None else low, high or y))
        if len(runs) == 1:
            return [point for points in found.values() for point in points]
        columns = [[*zip(*found[step], strict=True)] for step in sorted(found)]
        return [(fmean(xs), fmean(ys), min(ys), max(ys)) for xs, ys, *_ in columns]


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


CHARTS = (
    Chart("accuracy", "Held-out accuracy", "by version", "accuracy", True, "version"),
    Chart("accuracy_time", "Held-out accuracy", "by wall time", "accuracy", True, "seconds"),
    Chart("reward", "Reward", "mean of each step's answers", "reward/mean"),
    Chart("staleness", "Staleness", "mean of trained tokens", "buffer/staleness_mean"),
    Chart("stalest", "Largest staleness", "never above the bound η", "buffer/staleness_max"),
    Chart("lengths", "Length of answers", "mean tokens written", "rollout/length_mean"),
    Chart("truncated", "Cut", "at max_new_tokens", "rollout/truncated_frac", True),
    Chart("entropy", "Entropy", "in nats; at 0 exploration has ended", "train/entropy"),
    Chart("kl", "KL to the first model", "in nats", "train/kl"),
    Chart("clip", "Clipped", "share of trained tokens", "train/clip_frac", True),
    Chart("capped", "Above behav_cap", "share of trained tokens", "train/capped_frac", True),
    Chart("gap", "Logprob gap", "engine to trainer: should stay flat", "train/logprob_gap"),
    Chart("grad_norm", "Gradient norm", "before clipping", "train/grad_norm"),
    Chart("sampled", "Sampling speed", "tokens per second", "rollout/tokens_per_s"),
    Chart("trained", "Training speed", "tokens per second", "train/tokens_per_s"),
    Chart("engines_idle", "Engines idle", "share of each step", "rollout/idle_frac", True),
    Chart("trainers_idle", "Trainers idle", "share of each step", "train/idle_frac", True),
)


def families(runs: Sequence[RunDir]) -> Families:
    """Runs without a recipe are families of their own."""
    found: dict[str, list[tuple[str, RunDir]]] = defaultdict(list)
    for name, run in zip(short_names(runs), runs, strict=True):
        recipe = sorted((key, str(v)) for key, v in run.recipe.items() if key != "seed")
        found[str(recipe or run.path)].append((name, run))
    return {
        f"{first}, {1 + len(more)} seeds" if more else first: [run, *(other for _, other in more)]
        for (first, run), *more in found.values()
    }


def draw(chart: Chart, found: Families) -> Any:
    from matplotlib.figure import Figure

    figure = Figure((3.9, 2.6), layout="constrained")  # in a column of the page its text has 12 px
    axes: Any = figure.subplots()
    for colour, (name, runs) in zip(cycle(COLOURS), found.items(), strict=False):
        if points := chart.curve(runs):
            xs, ys, lows, highs = zip(*points, strict=True)
            style = "o-" if len(xs) < 12 else "-"
            axes.plot(xs, ys, style, color=colour, markersize=4, label=name)
            if lows != highs:
                axes.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)
    if chart.name == "stalest":
        for eta in {number(runs[0].recipe, "buffer.max_staleness") for runs in found.values()}:
            axes.axhline(eta or 0, color=GREY, linestyle=":", label=f"η = {eta or 0:g}")
    if axes.get_ylim()[0] < 0.5 * axes.get_ylim()[1]:
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
    if chart.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", colors=GREY, length=0)
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.set_xlabel(chart.x, color=GREY)
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color=GREY)
    if len(found) > 1:
        figure.set_figheight(2.4 + 0.2 * len(axes.lines))
        figure.legend(loc="outside lower left", frameon=False, labelcolor=GREY)
    return figure


def draw_all(found: Families, folder: Path) -> tuple[list[tuple[Chart, str]], list[str]]:
    """Charts with their SVG, and in words what never changes. Wall time only to compare runs."""
    drawn, flat = [], []
    for chart in CHARTS if len(found) > 1 else [c for c in CHARTS if c.x != "seconds"]:
        shown = {y for runs in found.values() for _, y, *_ in chart.curve(runs)}
        if len(shown) > 1:
            drawn.append((chart, save(draw(chart, found), folder / chart.name)))
        elif shown:
            value = format(min(shown), ".1%" if chart.is_share else ".3g")
            flat.append(f"{chart.title.lower()} {value}")
    return drawn, flat


def table(rows: Sequence[Line]) -> list[tuple[str, list[str]]]:
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


def page(found: Families, figures: Sequence[Any], flat: Sequence[str]) -> str:
    from jinja2 import Environment, FileSystemLoader

    runs = [run for family in found.values() for run in family]
    here = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: formatted(value, ".1%")
    defaults = {key: str(get(Config(), key)).replace("()", "[]") for key in KEYS}
    recipes = table([run.recipe for run in runs])
    return environment.get_template("report.html").render(
        runs=runs,
        names=short_names(runs),
        results=table([summary_rows(run.summary or so_far(run)) for run in runs]),
        figures=figures,
        flat=flat,
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
    found = families(runs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(page(found, *draw_all(found, folder)))
    return [folder / "report.html", *sorted(folder.glob("*.png"))]


def save(figure: Any, path: Path) -> str:
    """PATH.png, and the same as SVG."""
    import matplotlib

    figure.savefig(path.with_suffix(".png"), dpi=150)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minirl"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :]
