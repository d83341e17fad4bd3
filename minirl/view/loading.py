"""A sign of life while something loads: on a terminal a spinner with the seconds, else one line.
It imports rich alone, so that it is there before anything heavy is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def loading(what: str) -> Iterator[None]:
    console = Console(highlight=False, soft_wrap=True)
    if is_plain := not console.is_terminal:
        console.print(f"loading {what}", markup=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=is_plain) as progress:
        progress.add_task(f"loading {what}")
        yield
