"""`python -m tests.bench.sweep RECIPE --vary variant=none,waiting …`: `minirl sweep`, and a key of
its own, `variant`, that no recipe has: minirl with one part replaced (variants.py).

Takes what `minirl sweep` takes, gives the same table and run directories, and table.json for
docs/results.md: the table's figures, the steps until held-out accuracy is 80 %, and its curve.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.errors import MinirlError, RecipeError
from minirl.run_dir import RunDir, write_text
from minirl.statistics import estimate
from minirl.tools.sweep import COLUMNS, Cell, Sweep, column, folder_name, parse_vary, result, train
from tests.bench.__main__ import print_columns
from tests.bench.variants import VARIANTS, program

NAME = "python -m tests.bench.sweep"
VARIANT, NONE = "variant", "none"


class VariantSweep(Sweep):
    def settings(self, cell: Cell, seed: int) -> list[str]:
        if (name := cell.get(VARIANT, NONE)) not in (NONE, *VARIANTS):
            remedy = f"one of {', '.join((NONE, *VARIANTS))}"
            raise RecipeError("--vary variant", name, "no such variant", remedy)
        return super().settings({k: v for k, v in cell.items() if k != VARIANT}, seed)

    def train(self, cell: Cell, seed: int) -> None:
        name = cell.get(VARIANT, NONE)
        if name == NONE:
            super().train(cell, seed)
        else:
            settings = self.settings(cell, seed)
            train(self.recipe, self.run_dir(cell, seed), settings, program(name))
        self.write()

    def rows(self) -> list[dict[str, Any]]:
        """Of every combination that has a finished run."""
        found = {folder_name(cell): (cell, self.finished(cell)) for cell in self.cells}
        return [
            {"name": name, "settings": cell, **row_of(runs)}
            for name, (cell, runs) in found.items()
            if runs
        ]

    def write(self) -> None:
        """After every run."""
        options = [f"--vary {key}={','.join(values)}" for key, values in self.varied.items()]
        options += [f"--seeds {self.num_seeds}", *(f"--set {text}" for text in self.overrides)]
        command = " ".join([NAME, str(self.recipe), *options])
        machine = RunDir(self.run_dir(self.cells[0], 0)).machine
        whole = {"command": command, "machine": machine, "rows": self.rows()}
        write_text(self.folder / "table.json", json.dumps(whole, indent=1) + "\n")


def row_of(runs: Sequence[RunDir]) -> dict[str, Any]:
    curves = [dict(run.summary.get("accuracies", [])) for run in runs]
    reached = [first_at([*curve.items()], 0.8) for curve in curves]
    results = [{**result(run), "steps_to_80": at} for run, at in zip(runs, reached, strict=True)]
    # Where all runs were evaluated: a run that was disturbed may have missed one.
    shared = sorted(set.intersection(*map(set, curves)))
    return {
        "runs": len(runs),
        **{name: column(results, name) for name in (*COLUMNS, "steps_to_80")},
        "curve": [{"version": v, **estimate([c[v] for c in curves])} for v in shared],
    }


def first_at(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """The version at which the accuracy first reaches the target; None: it never does."""
    for (v0, a0), (v1, a1) in itertools.pairwise([*curve[:1], *curve]):
        if a1 >= target:
            return v0 + (v1 - v0) * (target - a0) / (a1 - a0) if v1 > v0 else float(v0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(NAME, description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B,C")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, … of each combination")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: sweeps/<recipe>")
    asked = parser.parse_args()
    folder = asked.out or Path("sweeps") / asked.recipe.stem
    try:
        varied = parse_vary(asked.vary)
        planned = VariantSweep(asked.recipe, folder, varied, asked.seeds, asked.set)
        planned.go(print)
    except MinirlError as error:
        print(f"sweep: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print_columns(planned.table())
    print(f"table     {folder / 'table.json'}")


if __name__ == "__main__":
    main()
