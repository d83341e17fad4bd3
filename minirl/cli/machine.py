"""`minirl doctor` and `minirl bench`: what this machine can do."""

from pathlib import Path
from typing import Annotated

import typer

from minirl.cli.app import app, show, show_columns


def _benches() -> str:
    from tests.bench import BENCHES

    return "\n".join(f"  {name:<10} {bench.about}" for name, bench in BENCHES.items())


@app.command(
    help="""Check this machine: Python, torch, vLLM, devices, memory, disk; each ok or its remedy.

Uses no network. Exits with 0 if all is ok, else with 1."""
)
def doctor() -> None:
    from minirl.tools.doctor import diagnose

    findings = diagnose()
    remedies = ["" if f.ok else f"\nremedy: {f.remedy}" for f in findings]
    rows = zip(findings, remedies, strict=True)
    show([("ok" if f.ok else "NOT OK", f.name, f.detail + remedy) for f, remedy in rows])
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command(
    help=f"""Measure a part of minirl against the bare part it is made of, in the same run.

\b
Benches:
{_benches()}

\b
Examples:
  minirl bench queue
  minirl bench weights --model 135m
  minirl bench rollout --json rollout.json

Each figure is a median of interleaved repeats; processes are pinned to their cores. A figure with
a goal is "ok" or "MISSED"; both exit with 0. docs/benchmarks.md says what each figure means."""
)
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which bench; see above.")],
    model: Annotated[
        str,
        typer.Option(metavar="tiny|135m", help="Random weights; tiny takes about a minute."),
    ] = "tiny",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the figures here, as JSON."),
    ] = None,
) -> None:
    from tests.bench import Options, run

    show_columns(run(name, Options(model), json_file).rows())
