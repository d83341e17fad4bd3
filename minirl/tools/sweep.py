"""`minirl sweep`: one recipe, some keys varied, several seeds; one table.

Takes a recipe, the keys to vary with their values, and the number of seeds; runs every combination
one after another, each as `minirl train` in a run directory of its own; gives a table with mean and
95 % interval over the seeds. The same command resumes a sweep that was stopped, or shows its table
again. Leaves out: running several at once, which would measure each other.
"""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load
from minirl.run_dir import RunDir, holds_run, write_text
from minirl.statistics import Estimate, estimate

PROGRAM = (sys.executable, "-m", "minirl.cli")
VALUE = re.compile(r'(?:"[^"]*"|\[[^\]]*\]|[^,])+')  # commas in a list or in quotes are its own
Cell = dict[str, str]  # one combination: values by key. Its runs differ in the seed only

COLUMNS = {
    "accuracy_before": "{:.1%}",
    "accuracy_after": "{:.1%}",
    "steps_to_80": "{:.1f}",  # until held-out accuracy reaches 0.8, of runs that do
    "reward_last": "{:.2f}",
    "tokens_per_s": "{:,.0f}",
    "seconds": "{:,.0f}",
    "staleness_mean": "{:.2f}",
}


def cell_text(value: Estimate | None, form: str, num_runs: int) -> str:
    if value is None:
        return ""
    half = "" if value["half"] is None else f" ± {form.format(value['half'])}"
    partly = f" ({value['count']} of {num_runs} runs)" if value["count"] < num_runs else ""
    return form.format(value["mean"]) + half + partly


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """Values by key."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = (part.strip() for part in text.partition("="))
        if not key or not values:
            raise RecipeError("--vary", text, "is not KEY=A,B,C", "such as train.lr=1e-4,3e-4")
        if key == "seed":
            raise RecipeError("--vary", text, "seeds are counted apart", "use --seeds N")
        found.setdefault(key, []).extend(value.strip() for value in VALUE.findall(values))
    return found


def folder_name(cell: Cell) -> str:
    pairs = (f"{key.rpartition('.')[2]}={value}" for key, value in cell.items())
    return re.sub(r"[^\w.+=,-]", "_", ",".join(pairs).replace('"', "")) or "as-is"


@dataclass(frozen=True)
class Sweep:
    recipe: Path
    folder: Path
    varied: dict[str, list[str]]
    num_seeds: int
    overrides: Sequence[str] = ()
    name: ClassVar[str] = "minirl sweep"

    @property
    def cells(self) -> list[Cell]:
        every = itertools.product(*self.varied.values())
        return [dict(zip(self.varied, values, strict=True)) for values in every]

    def settings(self, cell: Cell, seed: int) -> list[str]:
        return [*self.overrides, *(f"{k}={v}" for k, v in cell.items()), f"seed={seed}"]

    def program(self, cell: Cell) -> tuple[str, ...]:
        return PROGRAM

    def run_dir(self, cell: Cell, seed: int) -> Path:
        return self.folder / folder_name(cell) / f"seed-{seed}"

    def go(self, say: Callable[[str], None]) -> None:
        """Seed by seed, so that a sweep that is cut short has something of every combination."""
        for cell in self.cells:  # a wrong one is refused before the first is run
            load(self.recipe, self.settings(cell, 0))
        todo = list(itertools.product(range(self.num_seeds), self.cells))
        for done, (seed, cell) in enumerate(todo, 1):
            run_dir = self.run_dir(cell, seed)
            before = ": done before" if RunDir(run_dir).state == "finished" else ""
            say(f"{done}/{len(todo)}  {folder_name(cell)} seed {seed}{before}")
            if not before:
                train(self.recipe, run_dir, self.settings(cell, seed), self.program(cell))
            self.write()

    def rows(self) -> list[dict[str, Any]]:
        """Of every combination that has a finished run."""
        found = []
        for cell in self.cells:
            runs = [RunDir(self.run_dir(cell, seed)) for seed in range(self.num_seeds)]
            if results := [result(run) for run in runs if run.state == "finished"]:
                found.append({"name": folder_name(cell), "settings": cell, **row_of(results)})
        return found

    def table(self) -> list[tuple[str, ...]]:
        found = [(*self.varied, "seeds", *COLUMNS)]
        for row in self.rows():
            texts = (cell_text(row[c], form, row["runs"]) for c, form in COLUMNS.items())
            found.append((*row["settings"].values(), str(row["runs"]), *texts))
        return found

    def write(self) -> None:
        """After every run."""
        options = [f"--vary {key}={','.join(values)}" for key, values in self.varied.items()]
        options += [f"--seeds {self.num_seeds}", *(f"--set {text}" for text in self.overrides)]
        command = " ".join([self.name, str(self.recipe), *options])
        machine = RunDir(self.run_dir(self.cells[0], 0)).machine
        whole = {"command": command, "machine": machine, "rows": self.rows()}
        write_text(self.folder / "table.json", json.dumps(whole, indent=1) + "\n")


def train(
    recipe: Path, run_dir: Path, settings: Sequence[str], program: Sequence[str] = PROGRAM
) -> None:
    """One run, in a process of its own; its output goes into a log beside its directory."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    resume = ["--resume"] if holds_run(run_dir) else []
    command = [*program, "train", str(recipe), "--run-dir", str(run_dir), *resume]
    command += [f"--set={setting}" for setting in settings]
    log = run_dir.with_suffix(".log")
    with log.open("a") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            process.wait()
        finally:
            process.wait()  # Ctrl-C reaches the run too, which saves and exits by itself
    if code := process.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        what = f"{run_dir} ended with exit code {code}: {last}; see {log}"
        raise MinirlError(f"{what}, and run the same command again to resume")


def result(run: RunDir) -> dict[str, Any]:
    """What a finished run came to. The first step is left out of rates: it waits for all."""
    lines, curve = run.metrics, run.summary.get("accuracies", [])
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    return {
        "accuracy_before": run.summary["accuracy_before"],
        "accuracy_after": run.summary["accuracy_after"],
        "accuracies": dict(curve),
        "steps_to_80": first_at(curve, 0.8),
        "reward_last": fmean(line["reward/mean"] for line in lines[-max(1, len(lines) // 10) :]),
        "tokens_per_s": sum(x["train/tokens"] for x in lines[1:]) / seconds if seconds else None,
        "seconds": lines[-1]["seconds"],
        "staleness_mean": fmean(line["buffer/staleness_mean"] for line in lines),
    }


def row_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"runs": len(results)}
    for column in COLUMNS:
        known = [r[column] for r in results if r[column] is not None]
        row[column] = estimate(known) if known else None
    # Where all runs were evaluated: a run that was disturbed may have missed one.
    curves = [r["accuracies"] for r in results]
    shared = sorted(set.intersection(*map(set, curves)))
    row["curve"] = [{"version": v, **estimate([c[v] for c in curves])} for v in shared]
    return row


def first_at(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """The version at which the accuracy first reaches the target; None: it never does."""
    for (v0, a0), (v1, a1) in itertools.pairwise([*curve[:1], *curve]):
        if a1 >= target:
            return v0 + (v1 - v0) * (target - a0) / (a1 - a0) if v1 > v0 else float(v0)
    return None
