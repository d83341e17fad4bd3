"""`minirl report` and `minirl trace`: a run as a page of pictures, and as a timeline."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app
from minirl.errors import RecipeError

Runs = Annotated[list[Path], typer.Argument(metavar="RUN [RUN …]", help="Run directories.")]


@app.command(
    help="""Write report.html (one file, no network) and PNGs about one run, or several overlaid.

Reward and held-out accuracy with bands, staleness and its bound, the timeline of the devices
(log.trace), lengths, entropy, KL, clipping, logprob gap, throughput, idle shares, the same prompts
answered by each version, single tokens, recipe, versions and hardware. Runs that differ only in
their seed are one curve, with a band from the lowest to the highest.

\b
Examples:
  minirl report runs/smoke-20260101-120000
  minirl report runs/seed-* runs/other-seed-* --out comparison

It goes to RUN/report, for several runs to ./report. PNGs need the extra `report`.
"""
)
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it goes; see above.")
    ] = None,
) -> None:
    from minirl.run_dir import open_run
    from minirl.view.report.write import write

    opened = [open_run(path) for path in dict.fromkeys(runs)]
    folder = out or (opened[0].path / "report" if len(opened) == 1 else Path("report"))
    written = write(opened, folder)
    for path in written.files:
        typer.echo(path)
    for note in written.notes:
        typer.echo(f"note: {note}", err=True)


@app.command(
    help="""Merge what the workers of a run with log.trace = true wrote into trace.json.gz.

A run does this itself when it ends; this is for one that goes on or was killed. The file opens in
ui.perfetto.dev and chrome://tracing.
"""
)
def trace(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    from minirl.run_dir import open_run
    from minirl.view.trace import merge

    merged = merge(open_run(run).path)
    if merged is None:
        remedy = "train with --set log.trace=true"
        raise RecipeError("RUN", str(run), "was not traced: it has no trace/", remedy)
    typer.echo(merged)
