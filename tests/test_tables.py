"""`minirl runs`, `inspect` and `diff`, from files alone; and the recipe reference."""

import fcntl
import os
import re
from pathlib import Path

import pytest
from run_dirs import make_config, write_run
from typer.testing import CliRunner

from minirl.cli import app
from minirl.config import KEYS, SECTIONS
from minirl.errors import RecipeError
from minirl.metrics import NAMES
from minirl.run_dir import LOCK, RunDir, RunState, open_run
from minirl.view.report.tables import age, list_runs, run_rows
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


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "3 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d"), (-5, "0 s")]
)
def test_age(seconds: float, words: str) -> None:
    assert age(seconds) == words


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


def test_a_run_of_which_nothing_is_left_but_half_a_recipe_is_listed(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "recipe.toml").write_text("seed = 0\n[train]\nste")
    assert run_rows(list_runs(tmp_path))[1][:5] == ("torn", "failed", "0", "—", "—")


def test_runs_of_a_sweep_are_listed_by_what_tells_them_apart(tmp_path: Path) -> None:
    for lr in ("1e-4", "1e-3"):
        run = tmp_path / "smoke" / f"lr={lr}" / "seed-0"
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(f"[train]\nlr = {lr}\n")
    names = [row[0] for row in run_rows(list_runs(tmp_path))[1:]]
    assert sorted(names) == ["lr=1e-3/seed-0", "lr=1e-4/seed-0"]
    told = ran("diff", *(tmp_path / "smoke" / name for name in names)).splitlines()
    assert told[0].split() == ["RECIPE", *names]


def test_inspect_prints_every_trajectory_of_a_step(folder: Path) -> None:
    line = open_run(folder / "eta-2").batches[3]
    lines = ran("inspect", folder / "eta-2", "--step", 4).splitlines()
    assert lines[0] == "step 4, from version 3"
    shown = [row.split()[:5] for row in lines[2:6]]
    expected = [
        [
            str(group["id"]),
            str(place),
            f"{group['rewards'][place]:g}",
            "3",
            str(group["lengths"][place]),
        ]
        for group in line["groups"]
        for place in range(2)
    ]
    assert shown == expected
    assert any("answer: <i>4</i>" in text for text in lines)
    only = ran("inspect", folder / "eta-2", "--step", 4, "--group", line["groups"][1]["id"])
    assert len(only.splitlines()) < len(lines)
    assert ran("inspect", folder / "eta-2").startswith("step 6"), "the last by default"


def test_inspect_lives_on_samples_where_a_run_has_no_more(folder: Path, tmp_path: Path) -> None:
    for name in ("samples.jsonl", "recipe.toml"):
        (tmp_path / name).write_text((folder / "eta-2" / name).read_text())
    out = ran("inspect", tmp_path, "--step", 2)
    assert out.startswith("step 2\n") and "reward" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--step", "99"], "--step = 99: eta-2 has no such step; it has 1 to 6"),
        (["--step", "2", "--group", "99"], "--group = 99: step 2 has no such group; it trained"),
    ],
)
def test_what_a_run_does_not_have_is_named(folder: Path, words: list[str], line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        CliRunner().invoke(app, ["inspect", str(folder / "eta-2"), *words], catch_exceptions=False)
    assert str(caught.value).startswith(line)


def test_diff_says_what_differs_and_only_that(folder: Path) -> None:
    out = ran("diff", folder / "eta-0", folder / "eta-2")
    recipe, result, machine = out.split("\n\n")[:3]
    assert [line.split() for line in recipe.splitlines()] == [
        ["RECIPE", "eta-0", "eta-2"],
        ["seed", "0", "2"],
        ["buffer.max_staleness", "0", "2"],
    ]
    assert result.startswith("RESULT") and "held-out accuracy after" not in result
    assert machine == "MACHINE  no difference"
    same = ran("diff", folder / "eta-0", folder / "eta-0")
    assert same.count("no difference") == 3


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
    missing = [f for f in files if not [*root.glob(f"minirl/**/{f}"), *root.glob(f"tests/{f}")]]
    assert not missing


def test_the_reference_is_printed_from_the_config_classes() -> None:
    assert DOCUMENT.read_text() == reference.document()
    rows = [line for line in reference.document().splitlines() if line.startswith("| `")]
    keys = [row.split("`")[1] for row in rows]
    assert [key for key in keys if key in KEYS] == list(KEYS)
