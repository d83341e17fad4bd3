"""`python -m tests.bench.sweep RECIPE --vary variant=none,waiting …`: `minirl sweep`, and a key of
its own, `variant`, that no recipe has: minirl with one part replaced (variants.py).

Takes what `minirl sweep` takes, gives the same table and run directories.
"""

import argparse
import sys
from pathlib import Path

from minirl.errors import MinirlError, RecipeError
from minirl.tools.sweep import Cell, Sweep, parse_vary
from tests.bench.__main__ import print_columns
from tests.bench.variants import VARIANTS

VARIANT, NONE = "variant", "none"


class VariantSweep(Sweep):
    name = "python -m tests.bench.sweep"

    def settings(self, cell: Cell, seed: int) -> list[str]:
        if (name := cell.get(VARIANT, NONE)) not in (NONE, *VARIANTS):
            remedy = f"one of {', '.join((NONE, *VARIANTS))}"
            raise RecipeError("--vary variant", name, "no such variant", remedy)
        return super().settings({k: v for k, v in cell.items() if k != VARIANT}, seed)

    def program(self, cell: Cell) -> tuple[str, ...]:
        name = cell.get(VARIANT, NONE)
        if name == NONE:
            return super().program(cell)
        return (sys.executable, "-m", "tests.bench.variants", name)


def main() -> None:
    parser = argparse.ArgumentParser(VariantSweep.name, description=__doc__)
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
