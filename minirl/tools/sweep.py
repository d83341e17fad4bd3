"""`minirl sweep`: one recipe, some keys varied, several seeds; one table.

Takes a recipe, the keys to vary with their values, and the number of seeds; runs every combination
one after another, each as `minirl train` in a run directory of its own; gives a table with mean and
95 % interval over the seeds. The same command resumes a sweep that was stopped, or shows its table
again. Leaves out: running several at once, which would measure each other, and curves (`minirl
report` draws them).
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load
from minirl.run_dir import RunDir, holds_run
from minirl.statistics import Estimate, estimate

PROGRAM = (sys.executable, "-m", "minirl.cli")
VALUE = re.compile(r'(?:"[^"]*"|\[[^\]]*\]|[^,])+')  # commas in a list or in quotes are its own
Cell = dict[str, str]  # one combination: values by key. Its runs differ in the seed only

COLUMNS = {
    "accuracy_before": "{:.1%}",
    "accuracy_after": "{:.1%}",
    "reward_last": "{:.2f}",
    "tokens_per_s": "{:,.0f}",
    "seconds": "{:,.0f}",
    "staleness_mean": "{:.2f}",
}


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
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

    @property
    def cells(self) -> list[Cell]:
        every = itertools.product(*self.varied.values())
        return [dict(zip(self.varied, values, strict=True)) for values in every]

    def settings(self, cell: Cell, seed: int) -> list[str]:
        return [*self.overrides, *(f"{k}={v}" for k, v in cell.items()), f"seed={seed}"]

    def run_dir(self, cell: Cell, seed: int) -> Path:
        return self.folder / folder_name(cell) / f"seed-{seed}"

    def go(self, say: Callable[[str], None]) -> None:
        """Seed by seed, so that a sweep that is cut short has something of every combination."""
        for cell in self.cells:  # a wrong one is refused before the first is run
            load(self.recipe, self.settings(cell, 0))
        for seed, cell in itertools.product(range(self.num_seeds), self.cells):
            is_done = RunDir(self.run_dir(cell, seed)).state == "finished"
            say(f"{folder_name(cell)} seed {seed}{': done before' if is_done else ''}")
            if not is_done:
                self.train(cell, seed)

    def train(self, cell: Cell, seed: int) -> None:
        train(self.recipe, self.run_dir(cell, seed), self.settings(cell, seed))

    def finished(self, cell: Cell) -> list[RunDir]:
        runs = [RunDir(self.run_dir(cell, seed)) for seed in range(self.num_seeds)]
        return [run for run in runs if run.state == "finished"]

    def table(self) -> list[tuple[str, ...]]:
        """One row per combination that has a finished run."""
        found = [(*self.varied, "seeds", *COLUMNS)]
        for cell in self.cells:
            if results := [result(run) for run in self.finished(cell)]:
                texts = (cell_text(column(results, c), form) for c, form in COLUMNS.items())
                found.append((*cell.values(), str(len(results)), *texts))
        return found


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
    lines = run.metrics
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    return {
        "accuracy_before": run.summary["accuracy_before"],
        "accuracy_after": run.summary["accuracy_after"],
        "reward_last": fmean(line["reward/mean"] for line in lines[-max(1, len(lines) // 10) :]),
        "tokens_per_s": sum(x["train/tokens"] for x in lines[1:]) / seconds if seconds else None,
        "seconds": lines[-1]["seconds"],
        "staleness_mean": fmean(line["buffer/staleness_mean"] for line in lines),
    }


def column(results: Sequence[dict[str, Any]], name: str) -> Estimate | None:
    known = [found[name] for found in results if found[name] is not None]
    return estimate(known) if known else None


def cell_text(value: Estimate | None, form: str) -> str:
    if value is None:
        return ""
    half = "" if value["half"] is None else f" ± {form.format(value['half'])}"
    return form.format(value["mean"]) + half
