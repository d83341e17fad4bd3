"""`minirl runs` and `inspect`, from files alone; and the recipe reference."""

import fcntl
import os
import re
import shutil
from pathlib import Path

import pytest
from run_dirs import make_config, write_run
from typer.testing import CliRunner

from minirl.cli import app
from minirl.config import KEYS, SECTIONS
from minirl.errors import RecipeError
from minirl.metrics import NAMES
from minirl.run_dir import LOCK, RunDir, RunState, open_run
from minirl.view.runs import age, list_runs, run_rows
from tests.docs import reference

DOCUMENT = Path(__file__).parent.parent / "docs" / "recipe.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for eta in (0, 2):
        write_run(folder / f"eta-{eta}", make_config(eta=eta, seed=eta))
    (folder / "no-run").mkdir()
    return folder


def ran(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_runs_are_listed_with_what_they_came_to(folder: Path) -> None:
    rows = [line.split() for line in ran("runs", folder).splitlines()]
    assert rows[0] == ["RUN", "STATE", "STEP", "REWARD", "ACCURACY", "AGE"]
    assert [row[:3] for row in rows[1:]] == [
        ["eta-0", "finished", "6/6"],
        ["eta-2", "finished", "6/6"],
    ]
    assert rows[1][4] == "75.0%"
    assert ran("runs", folder / "eta-0").splitlines()[1].split()[0] == "eta-0"
    assert ran("runs", folder / "no-run") == f"no runs in {folder / 'no-run'}\n"
    ages = [age(seconds) for seconds in (3, 90, 7200, 200_000, -5)]
    assert ages == ["3 s", "2 min", "2 h", "2 d", "0 s"]


def test_every_state_is_told_apart(tmp_path: Path) -> None:
    run = RunDir(write_run(tmp_path / "run", make_config(steps=2), is_whole=False))
    assert run.state is RunState.FAILED
    with (run.path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.state is RunState.RUNNING
    (run.path / "stall.txt").write_text("{}")
    assert run.state is RunState.STALLED
    (run.path / "summary.json").write_text('{"finished": false}')
    assert RunDir(run.path).state is RunState.STOPPED
    (run.path / "summary.json").write_text('{"finished": true}')
    assert RunDir(run.path).state is RunState.FINISHED
    # Resumed, and then killed: its summary is of before.
    old = os.stat(run.path / "metrics.jsonl").st_mtime - 60
    for name in ("summary.json", "stall.txt"):
        os.utime(run.path / name, (old, old))
    assert RunDir(run.path).state is RunState.FAILED


def test_torn_recipes_are_listed_and_runs_of_a_sweep_by_what_tells_them_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "recipe.toml").write_text("seed = 0\n[train]\nste")
    assert run_rows(list_runs(tmp_path))[1][:5] == ("torn", "failed", "0", "—", "—")
    shutil.rmtree(tmp_path / "torn")
    for lr in ("1e-4", "1e-3"):
        run = tmp_path / "smoke" / f"lr={lr}" / "seed-0"
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(f"[train]\nlr = {lr}\n")
    names = [row[0] for row in run_rows(list_runs(tmp_path))[1:]]
    assert sorted(names) == ["lr=1e-3/seed-0", "lr=1e-4/seed-0"]


def test_inspect_prints_every_trajectory_of_a_step(folder: Path, tmp_path: Path) -> None:
    line = open_run(folder / "eta-2").batches[3]
    lines = ran("inspect", folder / "eta-2", "--step", 4).splitlines()
    assert lines[0] == "step 4, from version 3"
    lengths = [group["lengths"][0] for group in line["groups"]]
    assert [row.split() for row in lines[1:6]] == [
        ["GROUP", "PLACE", "REWARD", "VERSIONS", "TOKENS", "STOP"],
        ["8", "0", "1", "3", str(lengths[0]), "stop"],
        ["8", "1", "0", "2–3", "32", "length"],
        ["9", "0", "1", "3", str(lengths[1]), "stop"],
        ["9", "1", "0", "2–3", "32", "length"],
    ]
    assert "  answer: <i>4</i>" in lines
    assert ran("inspect", folder / "eta-2").startswith("step 6"), "the last by default"
    # Where a run has no more than its samples, these are shown.
    for name in ("samples.jsonl", "recipe.toml"):
        (tmp_path / name).write_text((folder / "eta-2" / name).read_text())
    out = ran("inspect", tmp_path, "--step", 2)
    assert out.startswith("step 2, from version ?\n") and "reward" in out


def test_a_step_that_a_run_does_not_have_is_named(folder: Path) -> None:
    words = ["inspect", str(folder / "eta-2"), "--step", "99"]
    with pytest.raises(RecipeError, match="--step = 99: eta-2 has no such step; it has 1 to 6"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("name", ["architecture.md", "troubleshooting.md"])
def test_documents_name_only_metrics_keys_and_files_that_there_are(name: str) -> None:
    root = DOCUMENT.parent.parent
    words = re.findall(r"`([^`\n]+)`", (DOCUMENT.parent / name).read_text())
    metrics = {
        w for w in words if re.fullmatch(r"(reward|eval|rollout|buffer|weights|train)/\w+", w)
    }
    assert metrics <= NAMES and (metrics or name == "architecture.md")
    sections = "|".join(SECTIONS)
    keys = [re.fullmatch(rf"((?:{sections})\.\w+)(?: = .*)?", word) for word in words]
    found = {match[1] for match in keys if match and not match[1].endswith((".py", ".jsonl"))}
    assert found and found <= KEYS.keys()
    files = {w.partition(":")[0] for w in words if re.fullmatch(r"[\w/]+\.py(:\w+)?", w)}
    missing = [f for f in files if not [*root.glob(f"minirl/**/{f}"), *root.glob(f"tests/**/{f}")]]
    assert not missing


def test_the_reference_is_printed_from_the_config_classes() -> None:
    assert DOCUMENT.read_text() == reference.document()
    rows = [line for line in reference.document().splitlines() if line.startswith("| `")]
    keys = [row.split("`")[1] for row in rows]
    assert [key for key in keys if key in KEYS] == list(KEYS)
