"""`minirl report`: runs as a page of pictures."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app

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

It goes to RUN/report, for several runs to ./report.
"""
)
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it goes; see above.")
    ] = None,
) -> None:
    from minirl.run_dir import open_run
    from minirl.view.report import write

    opened = [open_run(path) for path in dict.fromkeys(runs)]
    folder = out or (opened[0].path / "report" if len(opened) == 1 else Path("report"))
    for path in write(opened, folder):
        typer.echo(path)
