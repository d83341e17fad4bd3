"""`minirl config`: a recipe as minirl reads it."""

import typer

from minirl.cli.app import Overrides, Recipe, app


@app.command(
    help="""Print the resolved recipe as TOML, each value with where it came from.

\b
Examples:
  minirl config recipes/gsm8k-2gpu.toml
  minirl config recipes/smoke.toml --set train.lr=1e-4 > mine.toml
"""
)
def config(recipe: Recipe, overrides: Overrides = None) -> None:
    from minirl.recipe import load, to_toml

    loaded = load(recipe, overrides or [])
    typer.echo(to_toml(loaded.config, loaded.origins), nl=False)
