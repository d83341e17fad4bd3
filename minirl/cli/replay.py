"""`minirl replay`: what a run trained or could not train, once more."""

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app, show
from minirl.errors import RecipeError


@app.command(
    help="""Compute again what a run trained, or could not train. PATH decides what.

\b
  a run with record/       trains again on every recorded batch after --from, without any engine,
                           and compares the losses (log.record = true keeps the batches)
  a folder of nonfinite/   the loss of a batch that was left out: which trajectory, which gradient
  a folder of blackbox/    the logprob gap, entropy and canary of a step that broke a rule

\b
Examples:
  minirl replay runs/smoke-20260101-120000 --from 10
  minirl replay runs/smoke-20260101-120000/nonfinite/step-000012-0
  minirl replay runs/smoke-20260101-120000/blackbox/step-000012-logprob_gap

Exits with 1 if a loss differs from the recorded one, or is not finite here either."""
)
def replay(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run directory, or a folder inside one.")
    ],
    first: Annotated[
        int,
        typer.Option(
            "--from", metavar="N", min=0, help="Begin at the checkpoint of step N; 0: at the model."
        ),
    ] = 0,
) -> None:
    if (path / "batch.json").is_file():
        raise typer.Exit(_batch(path))
    if (path / "why.json").is_file():
        raise typer.Exit(_box(path))
    if (path / "record").is_dir():
        raise typer.Exit(_run(path, first))
    rule = "holds no recorded batches" if path.is_dir() else "is no folder"
    remedy = "name a run that was trained with log.record = true, or a folder of its nonfinite/"
    raise RecipeError("PATH", str(path), rule, remedy)


def _run(path: Path, first: int) -> int:
    from minirl.replay import Replay

    run = Replay(path, first)
    for note in run.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{'step':>6}  {'recorded loss':>24}  {'replayed loss':>24}  equal?")
    is_equal = True
    for found in run.run():
        numbers = [
            "not finite" if loss is None else repr(loss)
            for loss in (found.recorded, found.replayed)
        ]
        answer = "yes" if found.is_equal else "NO"
        typer.echo(f"{found.step:>6}  {numbers[0]:>24}  {numbers[1]:>24}  {answer}")
        is_equal = is_equal and found.is_equal
    return 0 if is_equal else 1


def _batch(path: Path) -> int:
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
    return 0 if isfinite(found.loss) and isfinite(found.grad_norm) else 1


def _box(path: Path) -> int:
    from minirl.train.replay import look_into

    found = look_into(path)
    typer.echo(found.message)
    numbers = {
        "logprob gap here": found.gap,
        "entropy here": found.entropy,
        "canary, published against these weights": found.canary_gap,
    }
    show([(name, f"{value:.6g}") for name, value in numbers.items() if value is not None])
    for worst in found.worst:
        typer.echo(
            f"group {worst.group}, trajectory {worst.place}, token {worst.token}: "
            f"vLLM {worst.vllm:.4f}, here {worst.trainer:.4f}"
        )
    return 0 if all(value is None or isfinite(value) for value in numbers.values()) else 1
