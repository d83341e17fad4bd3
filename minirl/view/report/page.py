"""The report as one HTML file: no network, no script, light and dark. Takes runs, gives text."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from minirl.run_dir import RunDir
from minirl.tools.plan.balance import balance
from minirl.view.report import answers, svg, timeline
from minirl.view.report.charts import BANDS, Chart
from minirl.view.report.families import Family, differing, shown
from minirl.view.report.timeline import Window

NO_TRACE = "No timeline: run with <code>--set log.trace=true</code> to have one."


def page(families: Sequence[Family], charts: Sequence[Chart], windows: Sequence[Window]) -> str:
    runs = [run for family in families for run in family.runs]
    names = ", ".join(run.name for run in runs)
    parts = [
        _section("Result", _results(runs)),
        _section("Curves", _charts(charts) if charts else "<p>No step was trained yet.</p>"),
        _section("Timeline", _timeline(windows)),
        _each(runs, "The same prompts, version by version", answers.time_travel),
        _each(runs, "Tokens", answers.token_view),
        _section("Recipe", _recipes(runs)),
        _section("Hardware and versions", _machines(runs)),
    ]
    colours = (
        f":root{{{svg.variables(svg.LIGHT, timeline.LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{svg.variables(svg.DARK, timeline.DARK)}}}}}"
    )
    style = (files("minirl.view.report") / "page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>minirl: {escape(names)}</title><style>{colours}\n{style}</style></head><body>"
        f"<h1>minirl <span class='dim'>{escape(names)}</span></h1>{''.join(parts)}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _each(runs: Sequence[RunDir], title: str, view: Any) -> str:
    """One view a run, the first open."""
    found = [(run, body) for run in runs if (body := view(run))]
    if len(runs) == 1:
        return _section(title, found[0][1] if found else "")
    blocks = [
        f"<details{' open' if n == 0 else ''}><summary><b>{escape(run.name)}</b></summary>"
        f"{body}</details>"
        for n, (run, body) in enumerate(found)
    ]
    return _section(title, "".join(blocks))


# -- result


def result_rows(run: RunDir) -> list[tuple[str, str]]:
    """What a run came to, in words: also for `minirl diff`."""
    summary, lines = run.summary, run.metrics
    accuracies = summary.get("accuracies") or []
    devices = run.recipe.get("devices.rollout", 1), run.recipe.get("devices.train", 1)
    verdict = balance([line for line in lines if "seconds" in line], *devices)
    is_synchronous = run.recipe.get("buffer.max_staleness") == 0
    rows = [
        ("state", str(run.state)),
        ("seed", shown(run.recipe.get("seed"))),
        ("steps", f"{len(lines)} of {shown(run.recipe.get('train.steps'))}"),
        ("seconds", _of(run.last("seconds"), ".0f")),
        ("reward, last 5 steps", _of(_tail(run, "reward/mean"), ".3f")),
        ("held-out accuracy before", _of(accuracies[0][1] if accuracies else None, ".1%")),
        ("held-out accuracy after", _of(run.accuracy, ".1%")),
        ("trained tokens", _of(sum(x.get("train/tokens", 0) for x in lines), ",.0f")),
        ("max staleness", _of(_largest(run, "buffer/staleness_max"), ".0f")),
        ("allowed staleness", shown(run.recipe.get("buffer.max_staleness"))),
        ("largest logprob gap", _of(_largest(run, "train/logprob_gap"), ".1e")),
        ("sampled tokens/s, last 5", _of(_tail(run, "rollout/tokens_per_s"), ",.0f")),
        ("trained tokens/s, last 5", _of(_tail(run, "train/tokens_per_s"), ",.0f")),
        ("engines idle, last 5", _of(_tail(run, "rollout/idle_frac"), ".0%")),
        ("trainers idle, last 5", _of(_tail(run, "train/idle_frac"), ".0%")),
        ("groups dropped", _of(run.last("buffer/groups_dropped"), ".0f")),
        ("balance", verdict.sentence("device", is_synchronous) if verdict else "—"),
    ]
    return rows


def _of(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _tail(run: RunDir, name: str) -> float | None:
    values = [line[name] for line in run.metrics if name in line][-5:]
    return sum(values) / len(values) if values else None


def _largest(run: RunDir, name: str) -> float | None:
    return max((line[name] for line in run.metrics if name in line), default=None)


def _results(runs: Sequence[RunDir]) -> str:
    rows = [result_rows(run) for run in runs]
    body = [(names[0][0], [value for _, value in names]) for names in zip(*rows, strict=True)]
    return _table([run.name for run in runs], body)


# -- curves and timeline


def _charts(charts: Sequence[Chart]) -> str:
    figures = [
        f"<figure><figcaption><b>{escape(chart.title)}</b> <span class='dim'>"
        f"{escape(chart.about)}</span></figcaption>{svg.draw(chart)}{_legend(chart)}</figure>"
        for chart in charts
    ]
    return f"<p class='dim'>{escape(BANDS)}</p><div class='charts'>{''.join(figures)}</div>"


def _legend(chart: Chart) -> str:
    named = [curve for curve in chart.curves if curve.label and curve.points]
    if len(named) < 2:
        return ""
    marks = [
        f"<span><i style='border-color:var(--c{c.colour % svg.NUM_COLOURS});"
        f"border-top-style:{'dashed' if c.is_dashed else 'solid'}'></i>{escape(c.label)}</span>"
        for c in named
    ]
    return f"<div class='legend'>{''.join(marks)}</div>"


def _timeline(windows: Sequence[Window]) -> str:
    if not windows:
        return f"<p>{NO_TRACE}</p>"
    about = (
        "A few steps near the end, all runs on one time axis. Open = waiting. All of it, with an "
        "arrow from each answer to the step that trained it, is in the run's "
        "<code>trace.json.gz</code>, for ui.perfetto.dev or chrome://tracing."
    )
    return f"<p class='dim'>{about}</p><div class='wide'>{timeline.draw(windows)}</div>"


# -- recipe and machine


def _recipes(runs: Sequence[RunDir]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    differ = set(differing([run.recipe for run in runs]))
    body = [(key, [shown(run.recipe.get(key)) for run in runs]) for key in keys]
    if len(runs) == 1:
        return _table(["value"], body)
    marked = [row for row in body if row[0] in differ]
    alike = [row for row in body if row[0] not in differ]
    heads = [run.name for run in runs]
    table = _table(heads, marked) if marked else "<p>All runs have the same recipe.</p>"
    rest = _table(["all runs"], [(key, values[:1]) for key, values in alike])
    return f"{table}<details><summary>what is alike</summary>{rest}</details>"


def machine_rows(run: RunDir) -> dict[str, str]:
    facts = dict(run.machine)
    packages = facts.pop("packages", None) or {}
    names = ("device_kind", "gpus", "cuda", "cpu", "cores", "memory_gib", "system", "python")
    rows = {name: facts[name] for name in (*names, "started") if facts.get(name) not in (None, [])}
    return {key: shown(value) for key, value in {**rows, **packages}.items()}


def _machines(runs: Sequence[RunDir]) -> str:
    rows = [machine_rows(run) for run in runs]
    keys = dict.fromkeys(key for row in rows for key in row)
    body = [(key, [row.get(key, "—") for row in rows]) for key in keys]
    return _table([run.name for run in runs], body)


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows
    )
    return f"<div class='wide'><table class='facts'><tr><th></th>{head}</tr>{body}</table></div>"
