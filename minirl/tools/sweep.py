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
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

from scipy import stats

from minirl.balance import balance
from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load
from minirl.run_dir import RunDir, write_text

PROGRAM = (sys.executable, "-m", "minirl.cli")
TARGET = 0.8
VALUE = re.compile(r'(?:"[^"]*"|\[[^\]]*\]|[^,])+')  # commas in a list or in quotes are its own
Curve = Sequence[tuple[int, float]]  # (version, held-out accuracy)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


COLUMNS: dict[str, Callable[[float], str]] = {
    "accuracy_before": percent,
    "accuracy_after": percent,
    "steps_to_80": "{:.1f}".format,  # until held-out accuracy reaches TARGET, of runs that do
    "reward_last": "{:.2f}".format,
    "tokens_per_s": "{:,.0f}".format,
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
        pairs = (f"{key.rpartition('.')[2]}={value}" for key, value in self.settings)
        return re.sub(r"[^\w.+=,-]", "_", ",".join(pairs).replace('"', "")) or "as-is"


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
        for seed, cell in itertools.product(self.seeds, cells(self.varied)):
            yield cell, seed, self.run_dir(cell, seed)

    def go(self, say: Callable[[str], None]) -> None:
        todo = list(self.runs())
        for done, (cell, seed, run_dir) in enumerate(todo, 1):
            before = ": done before" if is_finished(run_dir) else ""
            say(f"{done}/{len(todo)}  {cell.name} seed {seed}{before}")
            if not before:
                train(self.recipe, run_dir, self.settings(cell, seed), self.program(cell))
                self.write()

    def rows(self) -> list[dict[str, Any]]:
        """Of every combination that has a finished run."""
        found = []
        for cell in cells(self.varied):
            dirs = [self.run_dir(cell, seed) for seed in self.seeds]
            results = [result(path) for path in dirs if is_finished(path)]
            if results:
                own = {"name": cell.name, "settings": dict(cell.settings)}
                found.append({**own, **row_of(results)})
        return found

    def table(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
        found = [(*(vary.key for vary in self.varied), "seeds", *COLUMNS)]
        for row in rows:
            texts = (cell_text(row[c], form, row["runs"]) for c, form in COLUMNS.items())
            found.append((*row["settings"].values(), str(row["runs"]), *texts))
        return found

    @property
    def command(self) -> str:
        """What makes the same table."""
        options = [f"--vary {v.key}={','.join(v.values)}" for v in self.varied]
        options += [f"--seeds {len(self.seeds)}", *(f"--set {text}" for text in self.overrides)]
        return " ".join([self.name, str(self.recipe), *options])

    def write(self) -> None:
        """After every run: table.md for people, table.json for programs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows, machines = self.rows(), (RunDir(path).machine for _, _, path in self.runs())
        whole = {"command": self.command, "machine": next(machines, {}), "rows": rows}
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
    return bool(RunDir(run_dir).summary.get("finished"))


def result(run_dir: Path) -> dict[str, Any]:
    """What a finished run came to. The first step is left out of rates: it waits for all."""
    run = RunDir(run_dir)
    summary, lines = run.summary, run.metrics
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    idle = balance(lines, *(lines[-1].get(f"{pool}/devices", 1) for pool in ("rollout", "train")))
    curve = summary.get("accuracies", [])
    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "accuracies": curve,
        "steps_to_80": first_at(curve, TARGET),
        "reward_last": fmean(line["reward/mean"] for line in lines[-max(1, len(lines) // 10) :]),
        "tokens_per_s": sum(x["train/tokens"] for x in lines[1:]) / seconds if seconds else None,
        "seconds": lines[-1]["seconds"],
        "staleness_mean": fmean(line["buffer/staleness_mean"] for line in lines),
        "staleness_max": summary["staleness_max"],
        "rollout_idle": idle.rollout_idle if idle else None,
        "train_idle": idle.train_idle if idle else None,
    }


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
