"""Resuming a run: what may change, which checkpoint is taken, and which are kept."""

from pathlib import Path
from typing import Any

import pytest
from fault_bodies import write_checkpoint

from minirl import launch
from minirl.buffer import History
from minirl.config import Config
from minirl.errors import Interrupted, MinirlError, RecipeError
from minirl.messages import CheckpointState
from minirl.recipe import build, load, to_toml
from minirl.resume import check_changes, check_steps
from minirl.run_dir import choose_run_dir, holds_run, open_run
from minirl.train import checkpoint
from minirl.train.checkpoint import read_whole

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"


def save(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    write_checkpoint(folder, CheckpointState(step, History(version=step), 4, (6,)), updates=0)
    return folder


def test_changes_that_cannot_change_what_is_learned_are_accepted(tmp_path: Path) -> None:
    def changes(values: dict[str, Any]) -> list[str]:
        return check_changes(build(values), tmp_path)

    (tmp_path / "recipe.toml").write_text(to_toml(Config()))
    values = {"devices.train": 2, "devices.rollout": 3, "train.steps": 80}
    values |= {"train.shard": "optimizer", "buffer.max_faults": 9.0}
    assert changes({}) == [] and changes(values) == [
        "devices.rollout 1 → 3",
        "devices.train 1 → 2",
        "buffer.max_faults 3.0 → 9.0",
        "train.steps 40 → 80",
        "train.shard none → optimizer",
    ]
    with pytest.raises(RecipeError) as refused:  # all are named at once
        changes({"train.objective": "/a/my_loss.py:my_loss", "train.steps": 50, "seed": 3})
    assert str(refused.value) == (
        f'--resume = "{tmp_path}": the run was begun with another recipe: seed 0 → 3, '
        "train.objective decoupled → /a/my_loss.py:my_loss; set these back, or start a new run"
    )
    check_steps(Config(), 40)
    with pytest.raises(RecipeError, match=r"train\.steps = 40: the run is at step 41 already"):
        check_steps(Config(), 41)
    cosine = {"train.schedule": "cosine"}  # which ends with the steps
    (tmp_path / "recipe.toml").write_text(to_toml(build(cosine)))
    with pytest.raises(RecipeError, match=r"another recipe: train\.steps 40 → 50"):
        changes({**cosine, "train.steps": 50})


def test_a_refused_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(run_dir: Path, error: BaseException, *overrides: str) -> int:
        """`minirl train`, up to where workers start."""

        def run(*_: object) -> int:
            (run_dir / "logs" / "rollout-0.log").touch()
            raise error

        monkeypatch.setattr(launch.Job, "run", run)
        loaded, resume = load(SMOKE, overrides), holds_run(run_dir)
        return launch.train(loaded, SMOKE, choose_run_dir(SMOKE, run_dir, False), resume, True)

    refused, died = RecipeError("tasks.kind", "a", "b", "c"), MinirlError("rollout-0 died")
    (tmp_path / "empty").mkdir()
    for run_dir in (tmp_path / "new" / "run", tmp_path / "empty"):
        with pytest.raises(RecipeError):
            begin(run_dir, refused)
        assert not run_dir.exists()
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)  # a full disk left no more
    for error in (died, refused):
        with pytest.raises(type(error)):
            begin(run_dir, error)
        assert open_run(run_dir).state == "failed", "it was there before"
    assert begin(run_dir, Interrupted(), "train.lr=0.5", "seed=3") == launch.INTERRUPTED
    assert open_run(run_dir).state == "stopped" and open_run(run_dir).recipe["seed"] == 3
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RecipeError, match="begun with another recipe: seed 3 → 0"):
        begin(run_dir, died)


def test_what_a_killed_save_left_is_swept_and_a_replaced_one_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    torn = folder.with_name(".step-000006.tmp")
    torn.mkdir()
    folder.rename(folder.with_name(".step-000005.old"))  # killed between two renames
    checkpoint.sweep(tmp_path)
    assert checkpoint.found(tmp_path) == [folder] and not torn.exists()
    assert read_whole(folder).step == 5


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [
        ([], [5, 6]),
        ([(2, 0.5), (3, 0.5)], [3, 5, 6]),  # of equals the later
        ([(99, 1.0), (1, 0.1)], [1, 5, 6]),  # 99 was evaluated but not saved
    ],
)
def test_the_last_and_the_best_stay(
    accuracies: list[tuple[int, float]], kept: list[int], tmp_path: Path
) -> None:
    folders = [save(tmp_path, step) for step in range(1, 7)]
    checkpoint.prune(tmp_path, 2, accuracies)
    assert checkpoint.found(tmp_path) == [folders[step - 1] for step in kept]
