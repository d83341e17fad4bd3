"""`minirl verify-resume`: kill a run, go on with it, and compare with one that was left alone."""

import shutil
from datetime import datetime
from pathlib import Path

import typer

from minirl.cli.app import Overrides, Recipe, app, show


@app.command(
    name="verify-resume",
    help="""Check that a run that is killed and resumed ends as if nothing had happened.

Runs the recipe twice on CPU with buffer.max_staleness = 0, where one seed gives one run: once
whole, once killed (SIGKILL) after a checkpoint and started again. Compares, bit for bit, all
metrics but those of a clock, and weights, optimizer, generators and prompts at the end.

\b
Example:
  minirl verify-resume recipes/smoke.toml --set train.steps=6 --set eval.num_prompts=32

Exits with 1 if anything differs; then both runs stay, for a look.""",
)
def verify_resume(recipe: Recipe, overrides: Overrides = None) -> None:
    from minirl.recipe import check_task, load
    from tests.verify_resume import FORCED, verify

    config = load(recipe, [*(overrides or []), *FORCED]).config
    check_task(config)
    folder = Path("runs") / f"verify-resume-{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    findings = verify(recipe, overrides or [], config, folder, typer.echo)
    show([(f.what, "equal" if f.is_equal else "DIFFERS", f.detail) for f in findings])
    if all(finding.is_equal for finding in findings):
        shutil.rmtree(folder)
        typer.echo("resumed and uninterrupted are one run")
        return
    typer.echo(f"they differ; both runs are in {folder}")
    raise typer.Exit(1)
