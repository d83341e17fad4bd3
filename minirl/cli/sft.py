"""`minirl sft`: teach a model a task's worked answers, before RL."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import Overrides, Recipe, app, show
from minirl.cli.train import RUNS
from minirl.errors import RecipeError


@app.command(
    help="""Train a recipe's model on its task's worked answers: what a base model needs before RL.

The task's training examples are the data: each with its worked answer, or else with the answer
that the reference makes. Only the answers' tokens are learned, packed, on devices.train devices.
[sft] of the recipe says how long and how fast; the rest is as in [train].

\b
Examples:
  minirl sft recipes/gsm8k.toml --set sft.steps=300
  minirl sft recipes/smoke.toml --set sft.lr=3e-4 --accuracy
  minirl train recipes/gsm8k.toml --set model.path=runs/gsm8k-sft-…/model

\b
What it leaves behind, in runs/<recipe>-sft-<time>/:
  model/           a Hugging Face folder
  metrics.jsonl    loss of each step, loss on held-out examples every eval.every steps
  summary.json     held-out loss before and after

Ctrl-C once: finish the step, save, exit. Twice: now."""
)
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it goes. Default: runs/<recipe>-sft-<time>."),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Afterwards also `minirl eval` the model.")
    ] = False,
) -> None:
    from minirl.recipe import check_task, load
    from minirl.tools.sft_run import MODEL
    from minirl.tools.sft_run import sft as learn

    config = load(recipe, overrides or []).config
    check_task(config)
    folder = run_dir or RUNS / f"{recipe.stem}-sft-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise RecipeError("--run-dir", str(folder), "is not empty", "name a new directory")
    code = learn(config, folder)
    if code == 0 and accuracy:
        from minirl.cli.evaluate import rows
        from minirl.tools.evaluate import Options, evaluate, resolve

        options = Options(recipe=recipe, overrides=tuple(overrides or ()))
        done = evaluate(resolve(str(folder / MODEL), options), options, folder / "eval")
        show(list(rows(done.summary, done.folder)))
    raise typer.Exit(code)
