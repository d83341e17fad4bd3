"""`minirl sweep`: one recipe, some keys varied, several seeds; one table.

Takes a recipe, the keys to vary with their values, and the number of seeds; runs every combination
one after another, each as `minirl train` in a run directory of its own; gives a table with mean and
interval over the seeds. What is finished is not run again, what was begun goes on: a sweep that was
stopped is started again with the same command. Every run directory is an ordinary one.

Leaves out: running several at once. The pools of one run fill the machine, and runs beside each
other would measure each other.
"""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from minirl.errors import MinirlError, RecipeError
from minirl.lines import replace_text
from minirl.metrics import read
from minirl.recipe import load

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal's.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL95 = 1.96
TABLE = "table"  # .md for people, .json for programs


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
        if not self.settings:
            return "as-is"
        return ",".join(f"{key.rpartition('.')[2]}={_plain(v)}" for key, v in self.settings)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its 95 % interval; None: one seed says nothing."""

    mean: float
    half: float | None
    count: int

    def shown(self, form: Callable[[float], str]) -> str:
        return form(self.mean) + (f" ± {form(self.half)}" if self.half is not None else "")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    return f"{value:.2f}"


COLUMNS: dict[str, Callable[[float], str]] = {
    "accuracy_before": percent,
    "accuracy_after": percent,
    "reward_last": decimal,
    "tokens_per_s": count,
    "seconds": count,
    "staleness_mean": decimal,
    "staleness_max": decimal,
    "rollout_idle": percent,
    "train_idle": percent,
}


def parse_vary(texts: Sequence[str]) -> list[Vary]:
    found = []
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key.strip() or not values.strip():
            raise RecipeError("--vary", text, "is not KEY=A,B,C", "such as train.lr=1e-4,3e-4")
        if key.strip() == "seed":
            raise RecipeError("--vary", text, "seeds are counted apart", "use --seeds N")
        found.append(Vary(key.strip(), tuple(_split(values))))
    names = [vary.key for vary in found]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError("--vary", name, "is given twice", "give all its values at once")
    return found


def _split(values: str) -> Iterator[str]:
    """At commas that are in no brackets or quotes: a value may be a list."""
    depth, quoted, start = 0, False, 0
    for i, letter in enumerate(values):
        if letter == '"':
            quoted = not quoted
        elif not quoted and letter in "[{":
            depth += 1
        elif not quoted and letter in "]}":
            depth -= 1
        elif letter == "," and not quoted and not depth:
            yield values[start:i].strip()
            start = i + 1
    yield values[start:].strip()


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

    def check(self) -> None:
        """Every combination is read before the first is run."""
        for cell in cells(self.varied):
            load(self.recipe, [*self.overrides, *self.settings(cell), f"seed={self.seeds[0]}"])

    def settings(self, cell: Cell) -> list[str]:
        return [f"{key}={value}" for key, value in cell.settings]

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
            if is_finished(run_dir):
                say(f"{done}/{len(todo)}  {cell.name} seed {seed}: done before")
                continue
            say(f"{done}/{len(todo)}  {cell.name} seed {seed}")
            train(self.recipe, run_dir, [*self.overrides, *self.settings(cell), f"seed={seed}"])
            self.write()

    def rows(self) -> list[dict[str, Any]]:
        """Of every combination that has a finished run."""
        found = []
        for cell in cells(self.varied):
            results = [
                result(self.run_dir(cell, seed))
                for seed in self.seeds
                if is_finished(self.run_dir(cell, seed))
            ]
            if results:
                row: dict[str, Any] = {"name": cell.name, "settings": dict(cell.settings)}
                for column in COLUMNS:
                    values = [v for r in results if (v := r[column]) is not None]
                    row[column] = estimate(values) if values else None
                row["runs"] = len(results)
                found.append(row)
        return found

    def table(self) -> list[tuple[str, ...]]:
        head = (*(vary.key for vary in self.varied), "seeds", *COLUMNS)
        body = [
            (
                *(row["settings"][vary.key] for vary in self.varied),
                str(row["runs"]),
                *(row[c].shown(form) if row[c] else "" for c, form in COLUMNS.items()),
            )
            for row in self.rows()
        ]
        return [head, *body]

    def write(self) -> None:
        """After every run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {k: vars(v) if isinstance(v, Estimate) else v for k, v in row.items()}
            for row in self.rows()
        ]
        replace_text(self.folder / f"{TABLE}.json", json.dumps(rows, indent=1) + "\n")
        replace_text(self.folder / f"{TABLE}.md", markdown(self.table()))


def train(recipe: Path, run_dir: Path, settings: Sequence[str]) -> None:
    """One run, in a process of its own; what it prints goes into its run directory."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    begun = (run_dir / "recipe.toml").is_file()
    command = [sys.executable, "-m", "minirl.cli", "train", str(recipe), "--run-dir", str(run_dir)]
    command += ["--resume"] if begun else []
    command += [f"--set={setting}" for setting in settings]
    log = run_dir.with_suffix(".log")
    with log.open("a") as out:
        code = _wait(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        raise MinirlError(
            f"{run_dir} ended with exit code {code}: {last}; see {log}, and run the same command "
            "again to go on"
        )


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Ctrl-C reaches the run as well, which saves and ends by itself: it is waited for."""
    is_interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            is_interrupted = True
    if is_interrupted:
        raise KeyboardInterrupt
    return code


def is_finished(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def result(run_dir: Path) -> dict[str, float | None]:
    """What a finished run came to. The first step is left out of rates: it waits for all."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = read(run_dir / "metrics.jsonl")
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    last = lines[-max(1, len(lines) // 10) :]
    spans = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(lines)]

    def mean(name: str) -> float | None:
        pairs = [(x[name], s) for x, s in zip(lines[1:], spans, strict=True) if name in x]
        total = sum(s for _, s in pairs)
        return sum(value * s for value, s in pairs) / total if total else None

    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "reward_last": fmean(line["reward/mean"] for line in last),
        "tokens_per_s": sum(x["train/tokens"] for x in lines[1:]) / seconds if seconds else None,
        "seconds": lines[-1]["seconds"],
        "staleness_mean": fmean(line["buffer/staleness_mean"] for line in lines),
        "staleness_max": summary["staleness_max"],
        "rollout_idle": mean("rollout/idle_frac"),
        "train_idle": mean("train/idle_frac"),
    }


def estimate(values: Sequence[float]) -> Estimate:
    num = len(values)
    if num < 2:
        return Estimate(values[0], None, num)
    quantile = T95[num - 2] if num - 2 < len(T95) else NORMAL95
    return Estimate(fmean(values), quantile * stdev(values) / math.sqrt(num), num)


def markdown(table: Sequence[tuple[str, ...]]) -> str:
    head, *body = table
    lines = [head, tuple("---" for _ in head), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _plain(value: str) -> str:
    """For a folder's name."""
    return "".join(c if c.isalnum() or c in ".+-_" else "_" for c in value.strip('"')) or "_"
