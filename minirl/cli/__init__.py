"""The command line: parse, call, exit code. The only room that imports typer.

A file a subject; each registers its commands when it is imported, in the order of `--help`. Imports
stay inside the commands, so that `minirl --help` answers at once and loads no torch. Every
MinirlError ends as one line on stderr and its exit code; a traceback is always our bug.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TextIO

from minirl.cli.app import app
from minirl.errors import MinirlError, RecipeError, one_line

SUBJECTS = (
    "train",
    "watch",
    "plan",
    "machine",
    "recipe",
    "data",
    "replay",
    "report",
    "runs",
    "sweep",
    "evaluate",
    "sample",
    "sft",
)
REMOVED = {
    "bench": "python -m tests.bench, in a source tree",
    "chaos": "python -m tests.soak, in a source tree",
    "verify-resume": "pytest tests/test_verify_resume.py, in a source tree",
}
for subject in SUBJECTS:
    import_module(f"minirl.cli.{subject}")


def main() -> None:
    """The console entry."""
    try:
        if sys.argv[1:2] and (instead := REMOVED.get(sys.argv[1])):
            raise RecipeError("command", sys.argv[1], "is no command any more", f"use {instead}")
        app(prog_name="minirl")
    except MinirlError as error:
        print(f"minirl: {one_line(str(error), limit=2000)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _let_go(sys.stdout)


def _let_go(stream: TextIO) -> None:
    """Where the last words cannot be written, they are no reason for another exit code."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
