"""Recorded batches come back as they were, and training on them again gives the same bits."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import CONFIG, Data, make_data, ranks
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from minirl import record
from minirl.cli import app
from minirl.config import LogConfig, ModelConfig
from minirl.errors import MinirlError
from minirl.recipe import to_toml
from minirl.record import COLUMNS, Recorded, Recorder
from minirl.replay import Replay

MADE_BY = {"ranks": 1, "threads": 1}
HISTORY = {"history": {}, "consumed_below": 0, "consumed_above": []}


@pytest.fixture(scope="module")
def data(tied_folder: Path) -> Data:
    return make_data(tied_folder)


def test_a_batch_comes_back_whole_in_another_ring(data: Data, tmp_path: Path) -> None:
    batch = replace(data.batches[3], groups=data.batches[3].groups[1:])
    batch = replace(batch, groups=(batch.groups[0]._replace(masked=frozenset({1})), *batch.groups))
    values = {"train/loss": 0.1 + 0.2, "train/grad_norm": float("nan"), "train/kl": None}
    path = record.path_of(tmp_path, batch.step)
    record.write(path, record.take(batch, data.ring, values, MADE_BY))
    found = record.read(path)
    assert found.values == {"train/loss": 0.1 + 0.2, "train/grad_norm": None, "train/kl": None}
    assert found.made_by == MADE_BY and record.steps_of(tmp_path) == [4]
    ring = record.ring_for([found])
    again = record.put(found, ring)
    assert (again.step, again.version) == (batch.step, batch.version)
    for old, new in zip(batch.groups, again.groups, strict=True):
        assert (old.id, old.prompt_index, old.rewards, old.masked) == (
            (new.id, new.prompt_index, new.rewards, new.masked)
        )
        for a, b in zip(old.trajectories, new.trajectories, strict=True):
            assert a._replace(cell=0) == b._replace(cell=0)
            for name in COLUMNS:
                views = data.ring.read(a.cell, old.id), ring.read(b.cell, new.id)
                assert np.array_equal(getattr(views[0], name), getattr(views[1], name))


def test_the_recorder_writes_behind_and_takes_later_steps_back(data: Data, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, data.ring, MADE_BY, last_step=0)
    for batch in data.batches:
        recorder.keep(batch, {"train/loss": 1.0})
    recorder.close()
    assert recorder.problems() == [] and record.steps_of(tmp_path) == [1, 2, 3, 4, 5]
    Recorder(tmp_path, data.ring, MADE_BY, last_step=3).close()  # as on resume
    assert record.steps_of(tmp_path) == [1, 2, 3]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_what_cannot_be_recorded_is_told_of_and_the_rest_goes_on(
    data: Data, tmp_path: Path
) -> None:
    (tmp_path / "record").write_text("a file is in the way")
    recorder = Recorder(tmp_path, data.ring, MADE_BY, last_step=0)
    recorder.keep(data.batches[0], {})
    recorder.close()
    (problem,) = recorder.problems()
    assert problem.startswith("step 1 was not recorded: ") and recorder.num_missing == 1


def retold(path: Path, loss: float) -> None:
    """The same batch with another loss in its record."""
    with safe_open(path, framework="np") as file:
        header = json.loads(file.metadata()["batch"])
        columns = {name: file.get_tensor(name) for name in COLUMNS}
    header["values"]["train/loss"] = loss
    save_file(columns, path, {"batch": json.dumps(header)})


def test_training_again_gives_the_same_losses_to_the_bit_and_a_difference_is_found(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    model = ModelConfig(path=str(tied_folder))
    config = replace(CONFIG, model=model, log=LogConfig(record=True))
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    recorder = Recorder(tmp_path, data.ring, MADE_BY, last_step=0)
    losses = []
    with ranks(tmp_path, tied_folder, config, data.ring) as trainer:
        for batch in data.batches:
            trained = trainer.train(batch)
            recorder.keep(batch, trained.values)
            losses.append(trained.values["train/loss"])
            if batch.step == 2:
                folder = tmp_path / "checkpoints" / "step-000002"
                trainer.save(folder, {"step": 2, **HISTORY})
    recorder.close()
    found = list(Replay(tmp_path, 0).run())
    assert [f.replayed for f in found] == losses and all(f.is_equal for f in found)
    assert len(set(losses)) > 3  # they are not all alike

    retold(record.path_of(tmp_path, 5), float(np.nextafter(losses[4], 1)))  # by one bit
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "--from", "2"])
    assert done.exit_code == 1, done
    rows = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [(row[0], row[-1]) for row in rows] == [("3", "yes"), ("4", "yes"), ("5", "NO")]
    assert rows[0][1] == rows[0][2] == repr(losses[2])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN", "--from", "1"], "--from = 1: the run kept no checkpoint of this step; there are"),
        (["RUN", "--from", "9"], "--from = 9: the run kept no checkpoint of this step; there are"),
        (["RUN/checkpoints"], "holds no recorded batches; name a run that was trained with log."),
        (["RUN/nowhere"], "is no folder; "),
        (["RUN/gap"], "step 2 of RUN/gap was not recorded"),
    ],
)
def test_a_wrong_path_is_one_line(
    arguments: list[str], said: str, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    for run, steps in ((tmp_path, (1,)), (tmp_path / "gap", (1, 3))):
        recipe = replace(CONFIG, model=ModelConfig(path=str(tied_folder)))
        (run / "checkpoints" / "step-000003").mkdir(parents=True)
        (run / "recipe.toml").write_text(to_toml(recipe))
        for step in steps:
            batch = replace(data.batches[0], step=step)
            taken: Recorded = record.take(batch, data.ring, {})
            record.write(record.path_of(run, step), taken)
    given = [argument.replace("RUN", str(tmp_path)) for argument in arguments]
    result = CliRunner().invoke(app, ["replay", *given])
    assert isinstance(result.exception, MinirlError), result
    assert said.replace("RUN", str(tmp_path)) in str(result.exception)
