"""`python -m tests.bench NAME`: run one benchmark, print its figures, write them as JSON.

Exits with 0 whether goals are reached or not, and with 2 and one line where the input is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minirl.errors import MinirlError
from tests.bench import BENCHES, Options, run

ABOUT = f"""Measure a part of minirl against the bare part it is made of, in the same run.

Benches:
{chr(10).join(f"  {name:<10} {bench.about}" for name, bench in BENCHES.items())}

Examples:
  python -m tests.bench queue
  python -m tests.bench weights --model 135m
  python -m tests.bench rollout --json rollout.json

Each figure is a median of interleaved repeats; processes are pinned to their cores. A figure with
a goal is "ok" or "MISSED"; both exit with 0. docs/benchmarks.md says how figures are measured, and
the header of each bench what its own mean."""


def main(words: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.bench", description=ABOUT, formatter_class=form
    )
    parser.add_argument("name", metavar="NAME", help="which bench; see above")
    parser.add_argument(
        "--model", default="tiny", metavar="tiny|135m", help="random weights; tiny: about a minute"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--trl", default="", metavar="PYTHON", help="of a venv with TRL, for peers")
    asked = parser.parse_args(words)
    try:
        report = run(asked.name, Options(asked.model, trl=asked.trl), asked.json)
    except MinirlError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print_columns(report.rows())


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
