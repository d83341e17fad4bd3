"""What all commands share: the app, the arguments that several take, and how rows are shown."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

EXIT_CODES = """
\b
Exit codes:
  0    done
  1    the run failed (or doctor found something)
  2    wrong input: the one line on stderr names key, value, rule and remedy
  3    nothing moved for log.stall_s seconds; stacks are in the run directory
  130  stopped by Ctrl-C or SIGTERM: saved after one, not after two
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=f"""Fully asynchronous reinforcement learning for language models, on one box.

\b
Start here:
  minirl doctor                                  is this machine ready?
  minirl train recipes/smoke.toml                a few minutes on 2 CPU cores, no download
  minirl watch                                   see a run that was started elsewhere
  minirl train recipes/gsm8k.toml --dry-run      check a GPU recipe on any machine
  minirl plan recipes/gsm8k.toml --gpu 4090      does it fit, how fast, which split? No GPU needed
  minirl data recipes/gsm8k.toml                 what the model will see of the task
  minirl eval tiny --recipe recipes/smoke.toml   how good is a model, and how sure is that?
  minirl config recipes/smoke.toml               every value, and where it came from
  minirl runs                                    what was run, and what it came to
  minirl report runs/smoke-…                     a run as one page of pictures
{EXIT_CODES}""",
)


Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A TOML recipe, such as recipes/smoke.toml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change one value; may be given many times. The value is TOML, a bare word a string.",
    ),
]


def show(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    # Values are the user's: a path such as "[old]" is no markup.
    Console(markup=False, highlight=False, emoji=False).print(table)


def size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def show_columns(rows: Sequence[Sequence[str]]) -> None:
    """Not through rich, which would cut names and figures to a narrow terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
