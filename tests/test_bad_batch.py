"""Batches on disk: they come back as they were, training on them again gives the same bits, and
what went bad is found. Nothing that is not finite is published or saved."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disks import files_up_to
from ranks import (
    CONFIG,
    FIRST_VERSION,
    FRESH,
    RECIPES,
    Data,
    LocalRank,
    are_equal,
    make_data,
    with_reward,
)
from typer.testing import CliRunner

from minirl.cli import app
from minirl.config import Config, LogConfig, ModelConfig
from minirl.errors import MinirlError
from minirl.recipe import to_toml
from minirl.records import Batch
from minirl.train import bad_batch
from minirl.train.bad_batch import COLUMNS, BatchSaver, Replayed, path_of
from minirl.train.messages import Save
from minirl.train.policy import load_policy

STATE = {"history": {}, "consumed_below": 0, "consumed_above": []}


@pytest.fixture(scope="module")
def data(tied_folder: Path) -> Data:
    return make_data(tied_folder)


@pytest.fixture
def config(tied_folder: Path) -> Config:
    model, log = ModelConfig(path=str(tied_folder)), LogConfig(record=True)
    return replace(CONFIG, model=model, log=log)


def fresh(data: Data, step: int = 1) -> Batch:
    return replace(data.batches[RECIPES.index(FRESH)], step=step)


def saver_of(config: Config, run_dir: Path, rank: LocalRank, data: Data) -> BatchSaver:
    return BatchSaver(config, run_dir, data.ring, rank.store, Path(config.model.path))


def looked_into(path: Path) -> Replayed:
    (found,) = bad_batch.replay(bad_batch.plan(path))
    return found


def test_a_batch_comes_back_whole(data: Data, tmp_path: Path) -> None:
    first, *rest = data.batches[3].groups
    batch = replace(data.batches[3], groups=(first._replace(masked=frozenset({1})), *rest))
    values = {"train/loss": 0.1 + 0.2, "train/kl": None}
    saved = bad_batch.take(batch, data.ring, values=values, threads=2)
    bad_batch.write(path_of(tmp_path, batch.step), saved)
    found = bad_batch.read(path_of(tmp_path, batch.step))
    assert (found.batch, found.values, found.threads) == (saved.batch, values, 2)
    assert found.batch.groups[0].masked == {1} and found.batch.groups[0].rewards == first.rewards
    assert all(np.array_equal(found.columns[name], saved.columns[name]) for name in COLUMNS)


def test_training_again_gives_the_same_losses_to_the_bit_and_a_difference_is_found(
    data: Data, config: Config, tied_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    rank = LocalRank(tied_folder, config, data.ring)
    saver, losses = saver_of(config, tmp_path, rank, data), []
    for batch in data.batches:
        values = rank.train(batch)
        assert saver.record(batch, values) == ""
        losses.append(values["train/loss"])
        if batch.step == 2:
            folder = tmp_path / "checkpoints" / "step-000002"
            rank.trainer.save(Save(str(folder), {"step": 2, **STATE}))
    assert len(set(losses)) > 3  # they are not all alike
    found = list(bad_batch.replay(bad_batch.plan(tmp_path)))
    assert [f.values["train/loss"] for f in found] == losses
    assert [f.difference for f in found] == [0.0] * 5

    one = list(bad_batch.replay(bad_batch.plan(path_of(tmp_path, 4))))
    assert [f.saved.batch.step for f in one] == [3, 4], "from the checkpoint before it"
    assert one[-1].difference == 0 and one[-1].is_good

    for wrong, answer in ((np.nextafter(losses[4], 1), "close ("), (9.0, "DIFFERENT")):
        saved = bad_batch.read(path_of(tmp_path, 5))
        saved.values["train/loss"] = float(wrong)
        bad_batch.write(path_of(tmp_path, 5), saved)
        done = CliRunner().invoke(app, ["replay", str(tmp_path), "--from", "2"])
        assert done.exit_code == (answer == "DIFFERENT"), done
        rows = done.stdout.splitlines()
        assert [row.split()[1] for row in rows] == ["3:", "4:", "5:"]
        assert rows[0].endswith("equal") and repr(losses[2]) in rows[0] and answer in rows[2]

    saver.forget_after(3)  # as on resume
    assert sorted(int(p.name[5:11]) for p in (tmp_path / "record").iterdir()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN", "--from", "1"], "--from = 1: the run kept no checkpoint of this step; there are"),
        (["RUN/checkpoints"], "holds no saved batch; name a folder of a run's bad_batches/, or"),
        (["RUN/nowhere"], "does not exist; "),
        (["RUN/gap"], "lacks recorded batches after step 0"),
        (["RUN/bad"], "has no weights: their version was gone when it was saved"),
    ],
)
def test_a_wrong_path_is_one_line(
    arguments: list[str], said: str, data: Data, config: Config, tmp_path: Path
) -> None:
    taken = bad_batch.take(data.batches[0], data.ring)
    for run, steps in ((tmp_path, (1,)), (tmp_path / "gap", (1, 3))):
        (run / "checkpoints" / "step-000003").mkdir(parents=True)
        (run / "recipe.toml").write_text(to_toml(config))
        for step in steps:
            bad_batch.write(path_of(run, step), taken)
    bad_batch.write(tmp_path / "bad" / bad_batch.FILE, taken)
    (tmp_path / "bad" / "recipe.toml").write_text(to_toml(config))
    given = [argument.replace("RUN", str(tmp_path)) for argument in arguments]
    result = CliRunner().invoke(app, ["replay", *given])
    assert isinstance(result.exception, MinirlError), result
    assert said.replace("RUN", str(tmp_path)) in str(result.exception)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_logprob_of_vllm_that_is_not_finite_costs_the_update_and_is_found(
    value: float, data: Data, config: Config, tied_folder: Path, tmp_path: Path
) -> None:
    """Also where the cap on w would hide it from the loss."""
    rank = LocalRank(tied_folder, config, data.ring)
    before, batch = rank.weights(), fresh(data)
    group = batch.groups[1]
    view = data.ring.read(group.trajectories[2].cell, group.id)
    kept = view.logprobs[-3]
    view.logprobs[-3] = value
    try:
        values = rank.train(batch)
        saver = saver_of(config, tmp_path, rank, data)
        saver.save_bad(batch, FIRST_VERSION, rank.trainer.problem)
    finally:
        view.logprobs[-3] = kept
    assert values["train/skipped_updates"] == 1
    assert are_equal(rank.weights(), before)
    assert rank.trainer.problem == "vLLM's logprobs were not finite"
    (bad,) = looked_into(tmp_path / "bad_batches" / "step-000001").bad_tokens
    place = f"group {group.id}, trajectory 2, token {len(view.tokens) - 3}"
    assert bad == f"{place}: vLLM's logprob is not finite"


def test_an_infinite_reward_is_found_by_the_command_and_only_the_first_few_are_kept(
    data: Data, config: Config, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, config, data.ring)
    saver = saver_of(config, tmp_path, rank, data)
    for step in range(1, 5):
        bad = with_reward(fresh(data, step), 0, float("inf"))
        assert rank.train(bad)["train/skipped_updates"] == 1
        told = saver.save_bad(bad, rank.store.latest, rank.trainer.problem, must_save=step == 4)
        folder = tmp_path / "bad_batches" / f"step-00000{step}"
        assert told == ("" if step == 3 else f"; look at its batch with: minirl replay {folder}")
    assert len(list((tmp_path / "bad_batches").iterdir())) == 3
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".pkl", ".bin")]
    done = CliRunner().invoke(app, ["replay", str(folder)])
    assert done.exit_code == 1 and done.stdout.startswith("the loss was not finite"), done
    num = len(bad.groups[0].trajectories)
    assert done.stdout.count("the advantage is not finite") == num
    assert "gradients that are not finite: " in done.stdout


def test_weights_that_are_not_finite_are_neither_published_nor_saved(
    data: Data, config: Config, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, config, data.ring)
    rank.train(fresh(data))
    published = rank.weights()
    name, parameter = next(iter(rank.trainer.policy.model.named_parameters()))
    rank.trainer.learner.optimizer.state[parameter]["exp_avg"][0, 0] = float("nan")
    with pytest.raises(MinirlError, match="exp_avg of an optimizer is not finite, and was not"):
        rank.save(tmp_path / "checkpoints" / "step-000001")
    batch = replace(fresh(data, step=2), version=FIRST_VERSION + 1)
    with pytest.raises(MinirlError, match=f"step 2: .*{name} is not finite after the update"):
        rank.train(batch)
    assert rank.store.latest == FIRST_VERSION + 1 and are_equal(rank.weights(), published)
    with pytest.raises(MinirlError, match="is not finite, and was not saved"):
        rank.save(tmp_path / "checkpoints" / "step-000002")
    assert not (tmp_path / "checkpoints").exists()
    # The controller saves the batch, if there is one, with the weights that the step began with.
    saver = saver_of(config, tmp_path, rank, data)
    assert saver.save_bad(Batch(2, batch.version, ()), batch.version, "spoiled") == ""
    saver.save_bad(fresh(data, 2), batch.version, "spoiled")
    found = looked_into(tmp_path / "bad_batches" / "step-000002")
    assert found.is_good and found.lines[0] == "spoiled"


def test_readable_answers_have_their_tokens_versions_and_gaps(
    data: Data, config: Config, tied_folder: Path
) -> None:
    config = replace(config, log=LogConfig(samples=3))
    rank = LocalRank(tied_folder, config, data.ring)
    batch = fresh(data)
    rank.train(batch)
    assert len(rank.trainer.samples) == 3
    for group, shown in zip(batch.groups, rank.trainer.samples, strict=False):
        view = data.ring.read(group.trajectories[0].cell, group.id)
        assert shown.token_versions == view.versions[view.mask == 1].tolist()
        assert len(shown.tokens) == len(shown.token_gaps) == len(shown.token_versions)
        assert all(gap is not None and gap < 1 for gap in shown.token_gaps)


def test_a_checkpoint_or_batch_that_cannot_be_written_leaves_what_was_there(
    data: Data, config: Config, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, config, data.ring)
    rank.train(fresh(data))
    saver = saver_of(config, tmp_path, rank, data)
    folders = [tmp_path / "checkpoints" / f"step-00000{step}" for step in (1, 2)]
    requests = [Save(str(folder), {"step": 1, **STATE}) for folder in folders]
    assert rank.trainer.try_to_save(requests[0]).error == ""
    with files_up_to(3_000):
        error = rank.trainer.try_to_save(requests[1]).error
        told = saver.save_bad(fresh(data), rank.store.latest, "")
        notes = [saver.record(batch, {}) for batch in data.batches[:3]]
    assert error.startswith("it could not be written (") and "too large" in error
    assert told.startswith("; its batch could not be saved: ")
    assert notes[0].startswith("step 1 was not recorded: ") and notes[1:] == ["", ""]
    assert saver.num_missing == 3
    assert list((tmp_path / "checkpoints").iterdir()) == folders[:1]
    assert not [*(tmp_path / "bad_batches").glob("*"), *(tmp_path / "record").glob("*")]
    assert rank.trainer.try_to_save(requests[1]).error == ""


def test_a_model_whose_only_weights_are_a_pickle_is_refused(
    tmp_path: Path, tied_folder: Path
) -> None:
    shutil.copytree(tied_folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_policy(str(tmp_path / "m"))
