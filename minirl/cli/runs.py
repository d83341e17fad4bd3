"""`minirl runs` and `minirl inspect`: runs, from their directories' files alone."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app, show_columns
from minirl.cli.train import RUNS

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command(
    help="""List runs: state, step, reward, held-out accuracy, and when they last wrote.

\b
States:
  running    its controller lives
  finished   all steps are done
  stopped    by Ctrl-C or SIGTERM, and saved: --resume goes on
  stalled    nothing moved for log.stall_s; see its stall.txt
  failed     it ended without a result; --resume goes on from its last checkpoint
"""
)
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where the run directories are.")
    ] = RUNS,
) -> None:
    from minirl.view.runs import list_runs, run_rows

    if folder == RUNS and not folder.exists():
        typer.echo(f"no runs yet: {RUNS}/ is made by the first minirl train")
        return
    found = list_runs(folder)
    if found:
        show_columns(run_rows(found))
    else:
        typer.echo(f"no runs in {folder}")


@app.command(
    help="""Print what a step trained: every trajectory's reward, versions, length and stop.

Below them the answers that were kept readable (log.samples per step).

\b
Example:
  minirl inspect runs/smoke-20260101-120000 --step 12
"""
)
def inspect(
    run: Run,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Which step. Default: the last.")
    ] = None,
) -> None:
    from minirl.run_dir import open_run
    from minirl.view.runs import find_step, sample_texts, trajectory_rows

    opened = open_run(run)
    line = find_step(opened, step)
    start = f", from version {line['version']}" if "version" in line else ""
    typer.echo(f"step {line['step']}{start}")
    show_columns(trajectory_rows(line))
    for text in sample_texts(opened, line["step"]):
        typer.echo(f"\n{text}")
