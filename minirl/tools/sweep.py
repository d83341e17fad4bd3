"""`minirl sweep`: one recipe, some keys varied, several seeds; one table.

Takes a recipe, the keys to vary with their values, and the number of seeds; runs every combination
one after another, each as `minirl train` in a run directory of its own; gives a table with mean and
95 % interval over the seeds. The same command resumes a sweep that was stopped: a finished run is
not run again, one that was begun is resumed. Every run directory is an ordinary one.

Leaves out: running several at once. The pools of one run fill the machine, and runs beside each
other would measure each other.
"""

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

import numpy as np
from scipy import stats

from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load
from minirl.run_dir import read_lines, write_text

PROGRAM = (sys.executable, "-m", "minirl.cli")
TARGET = 0.8
VALUE = re.compile(r'(?:"[^"]*"|\[[^\]]*\]|[^,])+')  # commas in a list or in quotes are its own
Curve = Sequence[tuple[int, float]]  # (version, held-out accuracy)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


COLUMNS: dict[str, Callable[[float], str]] = {
    "accuracy_before": percent,
    "accuracy_after": percent,
    "accuracy_mean": percent,  # over all steps: the area under the curve
    "steps_to_80": "{:.1f}".format,  # until held-out accuracy reaches TARGET, of runs that do
    "reward_last": "{:.2f}".format,
    "tokens_per_s": "{:,.0f}".format,
    "speed": "{:.2f}".format,  # tokens_per_s over the first row's, seed by seed
    "gain_after": points,  # accuracy_after minus the first row's, seed by seed
    "gain_mean": points,  # accuracy_mean minus the first row's
    "seconds": "{:,.0f}".format,
    "staleness_mean": "{:.2f}".format,
    "staleness_max": "{:.2f}".format,
    "rollout_idle": percent,
    "train_idle": percent,
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its 95 % interval; None: one seed says nothing."""

    mean: float
    half: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval."""
    num = len(values)
    if num < 2:
        return Estimate(values[0], None, num)
    quantile = float(stats.t.ppf(0.975, num - 1))
    return Estimate(fmean(values), quantile * stdev(values) / math.sqrt(num), num)


def cell_text(value: Estimate | None, form: Callable[[float], str], num_runs: int) -> str:
    if value is None:
        return ""
    half = "" if value.half is None else f" ± {form(value.half).removeprefix('+')}"
    partly = f" ({value.count} of {num_runs} runs)" if value.count < num_runs else ""
    return form(value.mean) + half + partly


@dataclass(frozen=True)
class Vary:
    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One combination of values: its runs differ in the seed only."""

    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """For a folder."""
        pairs = (f"{key.rpartition('.')[2]}={_plain(value)}" for key, value in self.settings)
        return ",".join(pairs) or "as-is"


def _plain(value: str) -> str:
    return "".join(c if c.isalnum() or c in ".+-_" else "_" for c in value.strip('"')) or "_"


def parse_vary(texts: Sequence[str]) -> list[Vary]:
    found: dict[str, Vary] = {}
    for text in texts:
        key, _, values = (part.strip() for part in text.partition("="))
        if not key or not values:
            raise RecipeError("--vary", text, "is not KEY=A,B,C", "such as train.lr=1e-4,3e-4")
        if key == "seed":
            raise RecipeError("--vary", text, "seeds are counted apart", "use --seeds N")
        if key in found:
            raise RecipeError("--vary", key, "is given twice", "give all its values at once")
        found[key] = Vary(key, tuple(text.strip() for text in VALUE.findall(values)))
    return list(found.values())


def cells(varied: Sequence[Vary]) -> list[Cell]:
    keys = [vary.key for vary in varied]
    every = itertools.product(*(vary.values for vary in varied))
    return [Cell(tuple(zip(keys, values, strict=True))) for values in every]


@dataclass(frozen=True)
class Sweep:
    recipe: Path
    folder: Path
    varied: tuple[Vary, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    name: ClassVar[str] = "minirl sweep"

    def check(self) -> None:
        """Every combination is read before the first is run."""
        for cell in cells(self.varied):
            load(self.recipe, self.settings(cell, self.seeds[0]))

    def settings(self, cell: Cell, seed: int) -> list[str]:
        return [*self.overrides, *(f"{k}={v}" for k, v in cell.settings), f"seed={seed}"]

    def program(self, cell: Cell) -> tuple[str, ...]:
        return PROGRAM

    def run_dir(self, cell: Cell, seed: int) -> Path:
        return self.folder / cell.name / f"seed-{seed}"

    def runs(self) -> Iterator[tuple[Cell, int, Path]]:
        """Seed by seed, so that a sweep that is cut short has something of every combination."""
        for seed in self.seeds:
            for cell in cells(self.varied):
                yield cell, seed, self.run_dir(cell, seed)

    def go(self, say: Callable[[str], None]) -> None:
        todo = list(self.runs())
        for done, (cell, seed, run_dir) in enumerate(todo, 1):
            is_done = is_finished(run_dir)
            before = ": done before" if is_done else ""
            say(f"{done}/{len(todo)}  {cell.name} seed {seed}{before}")
            if not is_done:
                train(self.recipe, run_dir, self.settings(cell, seed), self.program(cell))
                self.write()

    def rows(self) -> list[dict[str, Any]]:
        """Of every combination that has a finished run."""
        found = []
        firsts: dict[int, dict[str, Any]] = {}  # the first combination's, by seed
        for cell in cells(self.varied):
            dirs = {seed: self.run_dir(cell, seed) for seed in self.seeds}
            own = {seed: result(path) for seed, path in dirs.items() if is_finished(path)}
            firsts = firsts or own
            if own:
                results = [beside(one, firsts.get(seed)) for seed, one in own.items()]
                found.append(
                    {"name": cell.name, "settings": dict(cell.settings), **row_of(results)}
                )
        return found

    def table(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
        keys = [vary.key for vary in self.varied]
        head = (*keys, "seeds", *COLUMNS)
        body = [
            (
                *(row["settings"][key] for key in keys),
                str(row["runs"]),
                *(cell_text(row[c], form, row["runs"]) for c, form in COLUMNS.items()),
            )
            for row in rows
        ]
        return [head, *body]

    @property
    def command(self) -> str:
        """What makes the same table."""
        options = [f"--vary {v.key}={','.join(v.values)}" for v in self.varied]
        options += [f"--seeds {len(self.seeds)}", *(f"--set {text}" for text in self.overrides)]
        return " ".join([self.name, str(self.recipe), *options])

    def machine(self) -> dict[str, Any]:
        """What the first run ran on."""
        for _, _, run_dir in self.runs():
            with suppress(OSError, ValueError):
                return json.loads((run_dir / "machine.json").read_text())
        return {}

    def write(self) -> None:
        """After every run: table.md for people, table.json for programs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = self.rows()
        whole = {"command": self.command, "machine": self.machine(), "rows": rows}
        text = json.dumps(whole, indent=1, default=vars)  # an Estimate is its fields
        write_text(self.folder / "table.json", text + "\n")
        write_text(self.folder / "table.md", markdown(self.table(rows)))


def train(
    recipe: Path, run_dir: Path, settings: Sequence[str], program: Sequence[str] = PROGRAM
) -> None:
    """One run, in a process of its own; its output goes into a log beside its directory."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [*program, "train", str(recipe), "--run-dir", str(run_dir)]
    if (run_dir / "recipe.toml").is_file():
        command.append("--resume")
    command += [f"--set={setting}" for setting in settings]
    log = run_dir.with_suffix(".log")
    with log.open("a") as out:
        code = _wait(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        raise MinirlError(
            f"{run_dir} ended with exit code {code}: {last}; see {log}, and run the same command "
            "again to resume"
        )


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Ctrl-C reaches the run too, which saves and exits by itself: wait for it."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def is_finished(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def result(run_dir: Path) -> dict[str, Any]:
    """What a finished run came to. The first step is left out of rates: it waits for all."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = read_lines(run_dir / "metrics.jsonl")
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    last = lines[-max(1, len(lines) // 10) :]
    curve = summary.get("accuracies", [])

    def mean(name: str) -> float | None:
        """Weighted by the time of each step."""
        pairs = [(b[name], b["seconds"] - a["seconds"]) for a, b in steps if name in b]
        total = sum(s for _, s in pairs)
        return sum(value * s for value, s in pairs) / total if total else None

    steps = list(itertools.pairwise(lines))
    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "accuracies": curve,
        "accuracy_mean": area(curve),
        "steps_to_80": first_at(curve, TARGET),
        "reward_last": fmean(line["reward/mean"] for line in last),
        "tokens_per_s": sum(x["train/tokens"] for x in lines[1:]) / seconds if seconds else None,
        "seconds": lines[-1]["seconds"],
        "staleness_mean": fmean(line["buffer/staleness_mean"] for line in lines),
        "staleness_max": summary["staleness_max"],
        "rollout_idle": mean("rollout/idle_frac"),
        "train_idle": mean("train/idle_frac"),
    }


def beside(found: dict[str, Any], first: dict[str, Any] | None) -> dict[str, Any]:
    """A run's result with what it is beside another of the same seed: a slow hour cancels out."""
    own: dict[str, float | None] = dict.fromkeys(("speed", "gain_after", "gain_mean"))
    if first is not None:
        if found["tokens_per_s"] and first["tokens_per_s"]:
            own["speed"] = found["tokens_per_s"] / first["tokens_per_s"]
        for name in ("after", "mean"):
            a, b = found[f"accuracy_{name}"], first[f"accuracy_{name}"]
            own[f"gain_{name}"] = None if a is None or b is None else a - b
    return {**found, **own}


def row_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in COLUMNS:
        values = [v for r in results if (v := r[column]) is not None]
        row[column] = estimate(values) if values else None
    # Where all runs were evaluated: a run that was disturbed may have missed one.
    curves = [{version: accuracy for version, accuracy in r["accuracies"]} for r in results]
    shared = sorted(set.intersection(*map(set, curves)))
    curve = [{"version": v, **vars(estimate([c[v] for c in curves]))} for v in shared]
    return {**row, "runs": len(results), "curve": curve}


def area(curve: Curve) -> float | None:
    """Mean accuracy over versions, straight lines between evaluations."""
    if len(curve) < 2 or curve[-1][0] <= curve[0][0]:
        return None
    versions, accuracies = zip(*curve, strict=True)
    return float(np.trapezoid(accuracies, versions)) / (versions[-1] - versions[0])


def first_at(curve: Curve, target: float) -> float | None:
    """The version at which the curve first reaches the target; None: it never does."""
    if curve and curve[0][1] >= target:
        return float(curve[0][0])
    for (v0, a0), (v1, a1) in itertools.pairwise(curve):
        if a1 >= target:
            return v0 + (v1 - v0) * (target - a0) / (a1 - a0)
    return None


def markdown(table: Sequence[tuple[str, ...]]) -> str:
    head, *body = table
    lines = [head, tuple("---" for _ in head), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)
