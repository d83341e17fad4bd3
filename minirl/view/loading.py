"""A sign of life while something loads: on a terminal a spinner with the seconds, else one line.
It imports rich alone, so that it is there before anything heavy is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def loading(what: str, console: Console | None = None) -> Iterator[None]:
    shown = console or Console(highlight=False, soft_wrap=True)
    if not shown.is_terminal:
        shown.print(f"loading {what}", markup=False)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True) as progress:
        progress.add_task(f"loading {what}")
        yield
