"""`minirl runs`, `minirl inspect` and `minirl diff`: runs, from their directories' files alone."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app, show_columns
from minirl.cli.train import RUNS

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command(
    help="""List runs: state, step, reward, held-out accuracy, and how long ago they last wrote.

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
    from minirl.view.report.tables import list_runs, run_rows

    if folder == RUNS and not folder.exists():
        typer.echo(f"no runs yet: {RUNS}/ is made by the first minirl train")
        return
    found = list_runs(folder)
    if found:
        show_columns(run_rows(found))
    else:
        typer.echo(f"no runs in {folder}")


@app.command(
    help="""Print what a step trained: every trajectory's reward, versions and length.

Below them the answers that were kept readable (log.samples per step).

\b
Examples:
  minirl inspect runs/smoke-20260101-120000 --step 12
  minirl inspect runs/smoke-20260101-120000 --step 12 --group 371
"""
)
def inspect(
    run: Run,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Which step. Default: the last.")
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="ID", help="Only this group.")] = None,
) -> None:
    from minirl.run_dir import open_run
    from minirl.view.report.tables import find_step, sample_texts, trajectory_rows

    opened = open_run(run)
    line = find_step(opened, step)
    start = f", from version {line['version']}" if "version" in line else ""
    typer.echo(f"step {line['step']}{start}")
    if line.get("groups"):
        show_columns(trajectory_rows(line, group))
    for text in sample_texts(opened, line["step"], group):
        typer.echo(f"\n{text}")


@app.command(help="Say what differs between two runs: recipe, result, hardware and versions.")
def diff(run: Run, other: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    from minirl.run_dir import open_run
    from minirl.view.report.tables import diff_rows, told_apart

    a, b = open_run(run), open_run(other)
    names = told_apart((a, b))
    for title, rows in zip(("RECIPE", "RESULT", "MACHINE"), diff_rows(a, b), strict=True):
        if rows:
            show_columns([(title, *names), *rows])
        else:
            typer.echo(f"{title}  no difference")
        typer.echo()
