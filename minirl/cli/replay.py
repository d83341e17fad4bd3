"""`minirl replay`: a batch that a run could not train, once more."""

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app, show


@app.command(
    help="""Compute the loss of a batch again that a run could not train.

A loss or gradient that is not finite is left out, counted (train/skipped_updates) and saved.

\b
Example:
  minirl replay runs/smoke-20260101-120000/nonfinite/step-000012-0

Exits with 1 if the loss is not finite here either."""
)
def replay(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of a run's nonfinite/.")],
) -> None:
    from minirl.train.replay import replay as compute

    found = compute(path)
    show([("step", str(found.step)), ("loss", f"{found.loss:.6g}")])
    show([("gradient norm", f"{found.grad_norm:.6g}")])
    for bad in found.bad_trajectories:
        typer.echo(
            f"rank {bad.rank}, micro-batch {bad.micro_batch}, sequence {bad.sequence}: "
            f"{bad.what} is not finite from token {bad.token} on"
        )
    if found.bad_gradients:
        typer.echo(f"gradients that are not finite: {', '.join(found.bad_gradients[:5])}, …")
    raise typer.Exit(0 if isfinite(found.loss) and isfinite(found.grad_norm) else 1)
