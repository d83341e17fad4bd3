"""Resuming a run: what may change, which checkpoint is taken, and which are kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_bodies import write_checkpoint

from minirl.buffer import History
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.messages import CheckpointState
from minirl.recipe import to_toml
from minirl.resume import check_changes, check_steps
from minirl.train import checkpoint
from minirl.train.checkpoint import read_whole


def begun(run_dir: Path, **train: Any) -> Config:
    config = replace(Config(), train=replace(Config().train, **train))
    (run_dir / "recipe.toml").write_text(to_toml(config))
    return config


def save(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    write_checkpoint(folder, CheckpointState(step, History(version=step), 4, (6,)), updates=0)
    return folder


def test_changes_that_cannot_change_what_is_learned_are_accepted_and_listed(tmp_path: Path) -> None:
    config = begun(tmp_path)
    assert check_changes(config, tmp_path) == []
    devices = replace(config.devices, train=2, rollout=3)
    train = replace(config.train, steps=80, shard_optimizer=True)
    assert check_changes(replace(config, devices=devices, train=train), tmp_path) == [
        "devices.rollout 1 → 3",
        "devices.train 1 → 2",
        "train.steps 40 → 80",
        "train.shard_optimizer False → True",
    ]


def test_all_changes_that_are_refused_are_named_at_once(tmp_path: Path) -> None:
    config = begun(tmp_path)
    train = replace(config.train, objective="/a/my_loss.py:my_loss", steps=50)
    with pytest.raises(RecipeError) as refused:
        check_changes(replace(config, seed=3, train=train), tmp_path)
    assert str(refused.value) == (
        f'--resume = "{tmp_path}": the run was begun with another recipe: seed 0 → 3, '
        "train.objective decoupled → /a/my_loss.py:my_loss; set these back, or start a new run"
    )
    with pytest.raises(RecipeError, match=r"train\.steps = 40: the run is at step 41 already"):
        check_steps(config, 41)
    config = begun(tmp_path, schedule="cosine")  # which ends with the steps
    with pytest.raises(RecipeError, match=r"another recipe: train\.steps 40 → 50"):
        check_changes(replace(config, train=replace(config.train, steps=50)), tmp_path)


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
    for step in range(1, 7):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, accuracies)
    assert [path.name for path in checkpoint.found(tmp_path)] == [f"step-{i:06d}" for i in kept]
