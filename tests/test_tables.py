"""`minirl runs` and `inspect`, from files alone; and the recipe reference."""

import os
import re
from pathlib import Path

import pytest
from run_dirs import make_config, write_run
from typer.testing import CliRunner

from minirl.cli import app
from minirl.config import KEYS, SECTIONS
from minirl.errors import RecipeError
from minirl.metrics import METRICS
from tests.docs import reference

DOCUMENT = Path(__file__).parent.parent / "docs" / "recipe.md"


def ran(*words: object) -> list[str]:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_runs_are_listed_with_what_they_came_to(tmp_path: Path) -> None:
    assert ran("runs", tmp_path) == [f"no runs in {tmp_path}"]
    write_run(tmp_path / "eta-0", make_config(eta=0))
    nested = tmp_path / "smoke" / "lr=1e-3" / "seed-0"  # of a sweep
    for folder in (nested, nested / "eval"):  # and an evaluation in it, which is no run
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text("seed = 0\n[train]\nste")
    os.utime(nested / "recipe.toml", (0, 0))
    rows = [re.split(r"  +", line) for line in ran("runs", tmp_path)]
    assert rows[0] == ["RUN", "STATE", "STEP", "REWARD", "ACCURACY", "CHANGED"]
    assert rows[1][:5] == ["eta-0", "finished", "6/6", "0.500", "75.0%"]
    assert rows[2][:5] == ["smoke/lr=1e-3/seed-0", "failed", "0/?", "—", "—"] and len(rows) == 3


def test_inspect_prints_every_trajectory_of_a_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_config())
    lines = ran("inspect", run, "--step", 4)
    assert lines[0] == "step 4, from version 3" and "  answer: <i>4</i>" in lines
    assert lines.index("  answer: <i>4</i>") < len(lines) - 5, "answers come first"
    assert [row.split() for row in lines[-5:]] == [
        ["GROUP", "PLACE", "REWARD", "VERSIONS", "TOKENS", "STOP"],
        ["8", "0", "1", "3", "3", "stop"],
        ["8", "1", "0", "2–3", "4", "length"],
        ["9", "0", "1", "3", "3", "stop"],
        ["9", "1", "0", "2–3", "4", "length"],
    ]
    assert ran("inspect", run)[0].startswith("step 6"), "the last by default"
    with pytest.raises(RecipeError, match=r"--step = 99: run has no such step; it has 1 to 6"):
        ran("inspect", run, "--step", 99)
    (run / "batches.jsonl").unlink()
    with pytest.raises(RecipeError, match="let it train a step"):
        ran("inspect", run)


@pytest.mark.parametrize("name", ["architecture.md", "troubleshooting.md"])
def test_documents_name_only_metrics_keys_and_files_that_there_are(name: str) -> None:
    root = DOCUMENT.parent.parent
    words = re.findall(r"`([^`\n]+)`", (DOCUMENT.parent / name).read_text())
    rooms = r"(reward|eval|rollout|buffer|weights|train)/\w+"
    assert {word for word in words if re.fullmatch(rooms, word)} <= METRICS.keys()
    keys = [re.fullmatch(rf"((?:{'|'.join(SECTIONS)})\.\w+)(?: = .*)?", word) for word in words]
    found = {match[1] for match in keys if match and not match[1].endswith((".py", ".jsonl"))}
    assert found and found <= KEYS.keys()
    files = {w.partition(":")[0] for w in words if re.fullmatch(r"[\w/]+\.py(:\w+)?", w)}
    missing = [f for f in files if not [*root.glob(f"minirl/**/{f}"), *root.glob(f"tests/**/{f}")]]
    assert not missing


def test_the_reference_is_printed_from_the_config_classes() -> None:
    assert DOCUMENT.read_text() == reference.document()
