"""`minirl doctor`: is this machine ready?"""

import typer

from minirl.cli.app import app, show


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
