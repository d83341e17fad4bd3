"""`minirl plan`: what a recipe needs and would do on GPUs that need not be here."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import Overrides, Recipe, app, show


@app.command(
    help="""What a recipe needs and would do, on GPUs that need not be here: memory and splits.

Prints the memory bill of a rollout and of a training GPU, with the number to change if it is too
big; then throughput, idle shares and staleness of every split of the GPUs, from a simulation with
the real buffer and dispatcher, and the split to take. docs/planning.md says how far to trust it.

\b
Examples:
  minirl plan recipes/gsm8k.toml
  minirl plan recipes/gsm8k.toml --gpu 4090 --num 4 --mean 300
  minirl plan recipes/gsm8k.toml --run runs/gsm8k-…   with the lengths of that run's answers
"""
)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="H100, H800, A100-80, A100-40, L40S, 4090, 3090.")] = (
        "H100"
    ),
    num: Annotated[
        int, typer.Option(help="GPUs in all. Default: the recipe's rollout + train.")
    ] = 0,
    mean: Annotated[
        float, typer.Option(help="Mean tokens of an answer. Default: 0.4 of the limit.")
    ] = 0.0,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the lengths of this run's answers.")
    ] = None,
) -> None:
    from minirl.recipe import load
    from minirl.tools.plan import Plan, gpu_named, usual_lengths
    from minirl.tools.simulate import of_run

    config = load(recipe, overrides or []).config
    total = num or config.devices.rollout + config.devices.train
    lengths = of_run(run) if run else usual_lengths(config, mean or None)
    planned = Plan(config, gpu_named(gpu), lengths)
    show(list(planned.memory_rows(total)))
    show(list(planned.split_rows(total)))
