"""`minirl replay`: what a run trained or could not train, once more."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app


@app.command(
    help="""Compute again what a run trained, or could not train, without vLLM. PATH decides what.

\b
  a folder of bad_batches/   a batch that went bad: its loss, its gradient norm, and the tokens and
                             gradients that are not finite
  a file of record/          the same of a recorded batch (log.record = true), from the checkpoint
                             before it
  a run with record/         every recorded batch after --from, compared with what was recorded

\b
Examples:
  minirl replay runs/smoke-20260101-120000/bad_batches/step-000012
  minirl replay runs/smoke-20260101-120000 --from 10

Exits with 1 if a loss is not finite, or differs from the recorded one."""
)
def replay(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run directory, or a batch inside one.")
    ],
    first: Annotated[
        int,
        typer.Option(
            "--from", metavar="N", min=0, help="Begin at the checkpoint of step N; 0: at the model."
        ),
    ] = 0,
) -> None:
    from minirl.train import bad_batch

    planned, is_good = bad_batch.plan(path, first), True
    for found in bad_batch.replay(planned):
        is_good &= found.is_good
        typer.echo("\n".join(found.lines))
    raise typer.Exit(0 if is_good else 1)
