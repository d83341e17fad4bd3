"""`minirl sweep`: a recipe with some keys varied, over several seeds, in one table."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import Overrides, Recipe, app, show_columns
from minirl.errors import RecipeError


@app.command(
    help="""Train a recipe with some keys varied, over several seeds, and write one table.

Runs one after another. What is finished is not run again and what was begun goes on, so a sweep
that was stopped is started again with the same command.

\b
Examples:
  minirl sweep recipes/smoke.toml --vary buffer.max_staleness=0,2,8 --seeds 3
  minirl sweep recipes/smoke.toml --vary train.objective=decoupled,naive --vary train.lr=1e-4,3e-4

\b
What it leaves behind, in sweeps/<recipe>/:
  table.md, table.json          mean and 95 % interval over the seeds, after every run
  <values>/seed-<n>/            an ordinary run directory, for `minirl report`
"""
)
def sweep(
    recipe: Recipe,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="Values of one key; may be given many times."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, … of each combination.")] = 1,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the sweep goes. Default: sweeps/<recipe>."),
    ] = None,
) -> None:
    from minirl.tools.sweep import Sweep, parse_vary

    if not 1 <= seeds <= 100:
        raise RecipeError("--seeds", seeds, "must be from 1 to 100", "3 to 5 give an interval")
    folder = out or Path("sweeps") / recipe.stem
    planned = Sweep(
        recipe, folder, tuple(parse_vary(vary or [])), tuple(range(seeds)), tuple(overrides or [])
    )
    planned.check()
    planned.go(typer.echo)
    planned.write()
    show_columns(planned.table())
    typer.echo(f"table     {folder / 'table.md'}\ntry next  minirl report {folder}/*/seed-*")
