"""docs/results.md: every table and plot in it is what its file says; and how lines are counted."""

from pathlib import Path

from tests.docs import lines, results
from tests.docs.results import BLOCK, PAGE, draw, render


def test_the_page_is_what_its_files_say(tmp_path: Path) -> None:
    """Filled by `python -m tests.docs.results`."""
    text, plots = render(PAGE.read_text(), PAGE.parent)
    assert text == PAGE.read_text() and all(path.is_file() for path in plots)
    assert {block[2] for block in BLOCK.finditer(text)} <= {*results.KINDS, "curves"}
    path = PAGE.parent / "results" / "staleness-naive.svg"
    draw(tmp_path / path.name, "naive", plots[path])
    assert (tmp_path / path.name).read_text() == path.read_text(), "the same curves, the same file"
    missing, _ = render("A <!-- bench none.json -->\nold <!-- end --> B", tmp_path)
    assert missing == "A <!-- bench none.json -->\nNot measured yet.\n<!-- end --> B"


def test_lines_are_counted_by_room() -> None:
    rooms = lines.by_room()
    assert {"minirl/*.py", "minirl/train/", "minirl/view/", "tests/"} <= rooms.keys()
    counts = {name: lines.count(paths) for name, paths in rooms.items()}
    assert sum(counts.values()) == 2 * counts["minirl/"] + counts["tests/"]
