"""Resuming a run: what may change, which checkpoint is taken, and which are kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_bodies import write_checkpoint
from run_dirs import evaluate, log_of, make_config

from minirl import launch
from minirl.buffer import History
from minirl.config import Config
from minirl.errors import Interrupted, MinirlError, RecipeError
from minirl.messages import CheckpointState
from minirl.recipe import load, to_toml
from minirl.resume import Start, check_changes, check_steps, find_start
from minirl.run_dir import RunDir, choose_run_dir, holds_run, open_run
from minirl.train import checkpoint
from minirl.train.checkpoint import read_whole

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"


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
    train = replace(config.train, steps=80, shard="optimizer")
    buffer = replace(config.buffer, max_faults=9.0)  # as the run that it stopped advises
    assert check_changes(
        replace(config, devices=devices, train=train, buffer=buffer), tmp_path
    ) == [
        "devices.rollout 1 → 3",
        "devices.train 1 → 2",
        "buffer.max_faults 3.0 → 9.0",
        "train.steps 40 → 80",
        "train.shard none → optimizer",
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


def test_what_another_recipe_evaluated_before_the_first_step_is_forgotten(tmp_path: Path) -> None:
    log = log_of(tmp_path, make_config())
    evaluate(log, version=0, right=1)
    log.close()
    again = log_of(tmp_path, make_config(), 0, Start().state.evaluating)
    assert again.wants_evaluation and not again.evals and not RunDir(tmp_path).evals
    again.close()


def test_a_refused_start_leaves_no_directory_and_a_mended_one_takes_an_untrained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(run_dir: Path, error: BaseException, *overrides: str) -> int:
        """`minirl train`, up to where workers start."""

        def run(*_: object) -> int:
            (run_dir / "logs" / "rollout-0.log").touch()
            raise error

        monkeypatch.setattr(launch, "_run", run)
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


def test_a_run_does_not_end_before_where_it_is() -> None:
    check_steps(Config(), 40)
    with pytest.raises(RecipeError, match=r"train\.steps = 40: the run is at step 41 already"):
        check_steps(Config(), 41)


def test_a_run_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    assert find_start(tmp_path).folder is None
    save(tmp_path, 9)
    newest = save(tmp_path, 10)
    start = find_start(tmp_path)
    assert (start.folder, start.state.step, start.state.history.version) == (newest, 10, 10)
    assert (start.state.consumed_below, start.state.consumed_above) == (4, (6,))
    assert start.notes == (f"going on from {newest}",)


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
