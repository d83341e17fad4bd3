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
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load
from minirl.run_dir import write_text
from minirl.tools.machine import FILE as MACHINE
from minirl.tools.outcome import (
    COLUMNS,
    Estimate,
    beside,
    cell_text,
    estimate,
    is_finished,
    mean_curve,
    result,
)

TABLE = "table"  # .md for people, .json for programs
PROGRAM = ("minirl.cli",)
VARIANT = "variant"  # no key of a recipe: minirl with a part replaced (variants.py)
VARIANTS = {
    "none": PROGRAM,
    **{name: ("tests.bench.variants", name) for name in ("waiting", "fixed", "keeping", "behind")},
}


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
        for name in (v for vary in self.varied if vary.key == VARIANT for v in vary.values):
            if name not in VARIANTS:
                rule = "no such variant"
                raise RecipeError("--vary variant", name, rule, f"one of {', '.join(VARIANTS)}")
        for cell in cells(self.varied):
            load(self.recipe, [*self.overrides, *self.settings(cell), f"seed={self.seeds[0]}"])

    def settings(self, cell: Cell) -> list[str]:
        return [f"{key}={value}" for key, value in cell.settings if key != VARIANT]

    def program(self, cell: Cell) -> Sequence[str]:
        return VARIANTS[dict(cell.settings).get(VARIANT, "none")]

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
            settings = [*self.overrides, *self.settings(cell), f"seed={seed}"]
            train(self.recipe, run_dir, settings, self.program(cell))
            self.write()

    def rows(self) -> list[dict[str, Any]]:
        """Of every combination that has a finished run."""
        found = []
        firsts: dict[int, dict[str, Any]] = {}  # the first combination's, by seed
        for cell in cells(self.varied):
            own = {
                seed: result(self.run_dir(cell, seed))
                for seed in self.seeds
                if is_finished(self.run_dir(cell, seed))
            }
            firsts = firsts or own
            results = [beside(one, firsts.get(seed)) for seed, one in own.items()]
            if results:
                row: dict[str, Any] = {"name": cell.name, "settings": dict(cell.settings)}
                for column in COLUMNS:
                    values = [v for r in results if (v := r[column]) is not None]
                    row[column] = estimate(values) if values else None
                row["runs"] = len(results)
                row["curve"] = mean_curve([r["accuracies"] for r in results])
                found.append(row)
        return found

    def table(self) -> list[tuple[str, ...]]:
        head = (*(vary.key for vary in self.varied), "seeds", *COLUMNS)
        body = [
            (
                *(row["settings"][vary.key] for vary in self.varied),
                str(row["runs"]),
                *(cell_text(row[c], form, row["runs"]) for c, form in COLUMNS.items()),
            )
            for row in self.rows()
        ]
        return [head, *body]

    @property
    def command(self) -> str:
        """What makes the same table."""
        options = [f"--vary {v.key}={','.join(v.values)}" for v in self.varied]
        options += [f"--seeds {len(self.seeds)}", *(f"--set {text}" for text in self.overrides)]
        return " ".join(["minirl sweep", str(self.recipe), *options])

    def machine(self) -> dict[str, Any]:
        """What the first run ran on."""
        for _, _, run_dir in self.runs():
            with suppress(OSError, ValueError):
                return json.loads((run_dir / MACHINE).read_text())
        return {}

    def write(self) -> None:
        """After every run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {k: vars(v) if isinstance(v, Estimate) else v for k, v in row.items()}
            for row in self.rows()
        ]
        whole = {"command": self.command, "machine": self.machine(), "rows": rows}
        write_text(self.folder / f"{TABLE}.json", json.dumps(whole, indent=1) + "\n")
        write_text(self.folder / f"{TABLE}.md", markdown(self.table()))


def train(
    recipe: Path, run_dir: Path, settings: Sequence[str], program: Sequence[str] = PROGRAM
) -> None:
    """One run, in a process of its own; what it prints goes into a log beside its directory."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    begun = (run_dir / "recipe.toml").is_file()
    command = [sys.executable, "-m", *program, "train", str(recipe), "--run-dir", str(run_dir)]
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


def markdown(table: Sequence[tuple[str, ...]]) -> str:
    head, *body = table
    lines = [head, tuple("---" for _ in head), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _plain(value: str) -> str:
    """For a folder's name."""
    return "".join(c if c.isalnum() or c in ".+-_" else "_" for c in value.strip('"')) or "_"
