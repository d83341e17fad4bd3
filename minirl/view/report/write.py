"""`minirl report`: from run directories to report.html and pictures beside it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from minirl.errors import RecipeError
from minirl.run_dir import RunDir
from minirl.view.report import png, svg, timeline
from minirl.view.report.charts import charts
from minirl.view.report.families import Family, families
from minirl.view.report.page import page
from minirl.view.report.timeline import Window, window
from minirl.view.trace import Reader, is_merged, merge, workers

MAX_TIMELINES = 4


@dataclass(frozen=True)
class Written:
    files: tuple[Path, ...]  # the page first
    notes: tuple[str, ...]


def write(runs: Sequence[RunDir], folder: Path) -> Written:
    found = families(runs)
    drawn, windows = charts(found), timelines(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "report.html"]
        files[0].write_text(page(found, drawn, windows))
        if windows:
            files.append(folder / "timeline.svg")
            alone = svg.standalone(timeline.draw(windows), timeline.LIGHT, timeline.DARK)
            files[-1].write_text(alone)
        if not png.is_there():
            return Written(tuple(files), (png.MISSING,))
        for chart in drawn:
            files.append(folder / f"{chart.name}.png")
            png.save_chart(chart, files[-1])
        if windows:
            files.append(folder / "timeline.png")
            png.save_timeline(windows, files[-1])
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise RecipeError("--out", str(folder), rule, "name a folder of yours") from None
    return Written(tuple(files), ())


def timelines(found: Sequence[Family]) -> list[Window]:
    """One traced run of each family; its trace is merged where that has not been done."""
    windows = []
    for family in found:
        for run in family.runs:
            if not workers(run.path):
                continue
            if not is_merged(run.path):
                with suppress(OSError):  # somebody else's run: its picture is drawn all the same
                    merge(run.path)
            eta = run.recipe.get("buffer.max_staleness")
            kind = "synchronous" if eta == 0 else "asynchronous"
            view = window(f"{kind} (η = {eta}): {run.name}", Reader(run.path))
            if view is not None:
                windows.append(view)
                break
    return windows[:MAX_TIMELINES]
