"""`minirl report`: run directories as one HTML page without network or script, and PNGs beside it.

Takes runs, whole or damaged; gives report.html, one PNG per figure and timeline.svg. Figures have
no background, so that the page can be light or dark; report.html here is its jinja2 template.
Leaves out the figures (charts.py).
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
from minirl.metrics import DROPPED
from minirl.run_dir import Line, RunDir
from minirl.view.charts import CHARTS, Families, draw_charts, draw_timeline, families, number
from minirl.view.runs import formatted, prompt_text, short_names

MAX_SAMPLES = 12  # with tokens, evenly spread over a run


def result_rows(run: RunDir) -> dict[str, str]:
    """The mean of the last 5 steps and the largest of all, for each curve by step."""
    rows = {}
    series = [(c, word, name) for c in CHARTS if c.x == "step" for word, name in c.series.items()]
    for chart, word, name in series:
        if values := [value for line in run.metrics if (value := number(line, name)) is not None]:
            form = ".1%" if chart.is_share else ",.0f" if max(values) >= 100 else ".3g"
            text = f"{fmean(values[-5:]):{form}} (largest {max(values):{form}})"
            rows[f"{chart.title}: {word}" if word else chart.title] = text
    last = run.metrics[-1] if run.metrics else {}
    for reason, name in DROPPED.items():
        if num := last.get(name):
            rows[f"Groups dropped: {reason.replace('_', ' ')}"] = f"{num:,} in all"
    return {**rows, "Balance": str(run.summary.get("balance", "—"))}


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


def page(found: Families, figures: Sequence[Any], flat: Sequence[str], timeline: str) -> str:
    from jinja2 import Environment

    runs = [run for family in found.values() for run in family]
    template = (files("minirl.view") / "report.html").read_text()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: formatted(value, ".1%")
    defaults = {key: str(get(Config(), key)).replace("()", "[]") for key in KEYS}
    recipes = table([run.recipe for run in runs])
    return environment.from_string(template).render(
        runs=runs,
        names=short_names(runs),
        results=table([result_rows(run) for run in runs]),
        figures=figures,
        flat=flat,
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
        charts = [*draw_charts(found)]
        drawn = [(chart, save(f, folder / chart.name)) for chart, f, flat in charts if not flat]
        flat = [text for *_, text in charts if text]
        if (figure := draw_timeline(found)) is not None:
            timeline = save(figure, folder / "timeline")
            (folder / "timeline.svg").write_text(timeline)
        (folder / "report.html").write_text(page(found, drawn, flat, timeline))
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
