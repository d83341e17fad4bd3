"""`minirl watch`: the dashboard of a run that was started elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app
from minirl.cli.train import RUNS
from minirl.errors import RecipeError


@app.command(
    help="""Show the dashboard of a run that was started elsewhere, from its files alone.

Also of one that is over, or dead: it says so. Keys: q leaves (the run continues), p shows another
sample. Without a terminal it prints one plain line per step until the run is over.

\b
Examples:
  minirl watch                                the newest run in runs/
  minirl watch runs/smoke-20260101-120000
  minirl watch runs/smoke-20260101-120000 --once > now.txt
"""
)
def watch(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run directory. Default: the newest in runs/."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and stop.")] = False,
) -> None:
    from minirl.view import dashboard

    dashboard.watch(find_run(run), once)


def find_run(run: Path | None) -> Path:
    from minirl.view.status import FILE

    if run is None:
        found = sorted(RUNS.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
        if not found:
            remedy = "name a run directory, or start a run with minirl train"
            raise RecipeError("RUN", str(RUNS), "there is no run in it", remedy)
        return found[-1].parent
    if not run.is_dir():
        remedy = "name the run directory that minirl train printed"
        raise RecipeError("RUN", str(run), "no such directory", remedy)
    if not (run / FILE).exists():
        remedy = "wait until its workers start, or name a run directory"
        raise RecipeError("RUN", str(run), f"has no {FILE}", remedy)
    return run
