"""`minirl replay`: what a run trained or could not train, once more."""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minirl.cli.app import app, show

if TYPE_CHECKING:
    from minirl.train.bad_batch import Replayed

CLOSE = 1e-3  # relative: other ranks and threads sum in another order


@app.command(
    help="""Compute again what a run trained, or could not train, without vLLM. PATH decides what.

\b
  a folder of bad_batches/   a batch that went bad: its loss, its gradient, the tokens that are not
                             finite, the largest gaps between vLLM's logprobs and the trainer's
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

    plan = bad_batch.plan(path, first)
    is_good = True
    for found in bad_batch.replay(plan):
        numbers = [found.values.get(name) for name in bad_batch.COMPARED]
        is_good &= all(number is None or isfinite(number) for number in numbers)
        if not plan.is_detailed:
            is_good &= _compare(found)
        elif found.saved is plan.batches[-1]:
            is_good &= _detail(found)
    raise typer.Exit(0 if is_good else 1)


def _compare(found: "Replayed") -> bool:
    losses = [found.saved.values.get("train/loss"), found.values.get("train/loss")]
    shown = "  ".join(f"{'not finite' if x is None else repr(x):>24}" for x in losses)
    gap = found.difference
    answer = "equal" if not gap else f"close ({gap:.0e})" if gap < CLOSE else "DIFFERENT"
    typer.echo(f"step {found.saved.batch.step:>6}  recorded, here: {shown}  {answer}")
    return gap < CLOSE


def _detail(found: "Replayed") -> bool:
    if found.saved.why:
        typer.echo(found.saved.why)
    numbers = {
        "loss": found.values.get("train/loss"),
        "gradient norm": found.values.get("train/grad_norm"),
        "logprob gap": found.values.get("train/logprob_gap"),
        "entropy": found.values.get("train/entropy"),
        "canary, published against these weights": found.canary_gap,
    }
    show([(name, f"{value:.6g}") for name, value in numbers.items() if value is not None])
    for token in (*found.bad_tokens, *found.worst):
        place = f"group {token.group}, trajectory {token.place}, token {token.token}"
        typer.echo(f"{place}: {token.what}")
    if found.bad_gradients:
        typer.echo(f"gradients that are not finite: {', '.join(found.bad_gradients[:5])}, …")
    return not found.bad_tokens and not found.bad_gradients
