"""`minirl plan`: what a recipe needs and would do on GPUs that need not be here."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import Overrides, app, show
from minirl.errors import RecipeError


@app.command(
    help="""What a recipe needs and would do, on GPUs that need not be here: memory, splits, scale.

Prints the memory bill of a rollout and of a training GPU, with the number to change if it is too
big; then throughput, idle shares and staleness of every split of the GPUs, from a simulation with
the real buffer and dispatcher, and the split to take. docs/planning.md says how far to trust it.

\b
Examples:
  minirl plan recipes/gsm8k.toml
  minirl plan recipes/gsm8k.toml --gpu 4090 --num 4 --mean 300
  minirl plan recipes/gsm8k.toml --gpus 8..512
  minirl plan recipes/gsm8k.toml --run runs/gsm8k-…   with the lengths of that run's answers
"""
)
def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A TOML recipe.")
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="H100, H800, A100-80, A100-40, L40S, 4090, 3090.")] = (
        "H100"
    ),
    num: Annotated[
        int, typer.Option(help="GPUs in all. Default: the recipe's rollout + train.")
    ] = 0,
    gpus: Annotated[
        str, typer.Option(metavar="FIRST..LAST", help="How it would scale, by doubling.")
    ] = "",
    mean: Annotated[
        float, typer.Option(help="Mean tokens of an answer. Default: 0.4 of the limit.")
    ] = 0.0,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the lengths of this run's answers.")
    ] = None,
) -> None:
    from minirl.recipe import load
    from minirl.tools.plan import report
    from minirl.tools.plan.gpus import gpu_named

    if recipe is None:
        raise RecipeError("recipe", "", "is missing", "name one, such as recipes/gsm8k.toml")
    config = load(recipe, overrides or []).config
    total = num or config.devices.rollout + config.devices.train
    asked = report.Question(config, gpu_named(gpu), total, mean or None, run)
    show(list(report.memory_rows(asked)))
    if gpus:
        show(list(report.scale_rows(asked, *report.parse_range(gpus))))
    else:
        show(list(report.split_rows(asked)))
