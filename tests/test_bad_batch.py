"""Batches that went bad: training on them again gives the same bits, and what is bad is found.
Nothing that is not finite is published or saved."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import files_up_to
from ranks import CONFIG, FRESH, MIXED, STATE, Data, LocalRank, are_equal
from safetensors.torch import load_file, save_file
from test_config import cut, garble
from typer.testing import CliRunner

from minirl.buffer import History
from minirl.cli import app
from minirl.config import ModelConfig
from minirl.errors import MinirlError, RecipeError
from minirl.messages import CheckpointState, Save
from minirl.resume import find_start
from minirl.run_dir import read_lines
from minirl.shm.ring import TrajectoryRing
from minirl.train import bad_batch
from minirl.train.bad_batch import BatchSaver
from minirl.train.checkpoint import as_one_line, found
from minirl.train.policy import load_policy


@pytest.fixture
def rank(data: Data, tied_folder: Path) -> LocalRank:
    config = replace(CONFIG, model=ModelConfig(path=str(tied_folder)))
    return LocalRank(tied_folder, config, data.ring)


@pytest.fixture
def saver(data: Data, rank: LocalRank, tied_folder: Path, tmp_path: Path) -> BatchSaver:
    return BatchSaver(rank.trainer.config, tmp_path, data.ring, rank.store, tied_folder)


def test_replay_is_exact(data: Data, rank: LocalRank, saver: BatchSaver, tmp_path: Path) -> None:
    first, *rest = data.of(MIXED).groups
    masked = data.of(MIXED)._replace(groups=(first._replace(masked=frozenset({1})), *rest))
    rank.trainer.publish(masked.version)
    saver.save_bad(masked, "low")
    expected = rank.train(masked)
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "bad_batches" / "step-000001")])
    values = [f"step 1: {name} {expected[name]!r}" for name in bad_batch.SHOWN]
    assert expected["train/loss"] != 0 and done.exit_code == 0
    assert done.stdout.splitlines() == ["low", *values]
    error = CliRunner().invoke(app, ["replay", str(tmp_path)]).exception
    assert isinstance(error, RecipeError) and "\n" not in str(error)
    assert "holds no saved batch; name a folder of a run's bad_batches/ or record/" in str(error)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_logprob_of_vllm_that_is_not_finite_costs_the_update_and_is_found(
    value: float, data: Data, rank: LocalRank, saver: BatchSaver, tmp_path: Path
) -> None:
    """Also where the cap on w would hide it from the loss."""
    before, batch = rank.weights(), data.of(FRESH)
    group = batch.groups[1]
    view = data.ring.read(group.trajectories[2].cell, group.id)
    kept = view.logprobs[-3]
    view.logprobs[-3] = value
    try:
        values = rank.train(batch)
        rank.trainer.publish(batch.version)
        saver.save_bad(batch, rank.trainer.problem)
    finally:
        view.logprobs[-3] = kept
    assert values["train/skipped_updates"] == 1
    assert are_equal(rank.weights(), before)
    assert rank.trainer.problem == "vLLM's logprobs were not finite"
    found = bad_batch.replay(tmp_path / "bad_batches" / "step-000001")
    place = f"group {group.id}, trajectory 2, token {len(view.tokens) - 3}"
    assert found.bad[0] == f"{place}: vLLM's logprob is not finite"


def test_infinite_reward(data: Data, rank: LocalRank, saver: BatchSaver, tmp_path: Path) -> None:
    """The command finds it, and only the first few such batches are kept."""
    for step in range(1, 5):
        bad = ranks.with_reward(data.of(FRESH, step), 0, float("inf"))
        assert rank.train(bad)["train/skipped_updates"] == 1
        bad = bad._replace(version=rank.store.latest)
        said = saver.save_bad(bad, rank.trainer.problem, must_save=step == 4)
        folder = tmp_path / "bad_batches" / f"step-00000{step}"
        assert said == ("" if step == 3 else f"; look at its batch with: minirl replay {folder}")
    assert len(list((tmp_path / "bad_batches").iterdir())) == 3
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".pkl", ".bin")]
    done = CliRunner().invoke(app, ["replay", str(folder)])
    assert done.exit_code == 1 and done.stdout.startswith("the loss was not finite"), done
    num = len(bad.groups[0].trajectories)
    assert done.stdout.count("the advantage is not finite") == num
    assert "the gradient of model.model.embed_tokens.weight is not" in done.stdout


def test_spoiled_weights(data: Data, rank: LocalRank, saver: BatchSaver, tmp_path: Path) -> None:
    """They are not published."""
    batch = data.of(FRESH, 2)
    rank.trainer.publish(batch.version - 1)
    rank.train(data.of(FRESH))
    published = rank.weights()
    name, parameter = next(iter(rank.trainer.policy.model.named_parameters()))
    rank.trainer.learner.optimizer.state[parameter]["exp_avg"][0, 0] = float("nan")
    with pytest.raises(MinirlError, match=f"step 2: .*{name} is not finite after the update"):
        rank.train(batch)
    assert rank.store.latest == batch.version and are_equal(rank.weights(), published)
    # The controller saves the batch, if there is one, with the weights that the step began with.
    assert saver.save_bad(batch._replace(groups=()), "spoiled") == ""
    assert "version 3 is no longer" in saver.save_bad(batch._replace(version=3), "spoiled")
    saver.save_bad(batch, "spoiled")
    found = bad_batch.replay(tmp_path / "bad_batches" / "step-000002")
    assert not found.bad and found.lines[0] == "spoiled"


def test_full_disk(data: Data, rank: LocalRank, saver: BatchSaver, tmp_path: Path) -> None:
    """What was there stays whole."""
    rank.train(data.of(FRESH))
    folders = [tmp_path / "checkpoints" / f"step-00000{step}" for step in (1, 2)]
    requests = [Save(str(folder), STATE) for folder in folders]
    assert rank.trainer.save(requests[0]).error == ""
    with files_up_to(3_000):
        error = rank.trainer.save(requests[1]).error
        said = saver.save_bad(data.of(FRESH)._replace(version=rank.store.latest), "")
    assert error.startswith("it could not be written (") and "too large" in error
    assert said.startswith("; its batch could not be saved: ")
    assert list((tmp_path / "checkpoints").iterdir()) == folders[:1]
    assert not [*(tmp_path / "bad_batches").glob("*")]
    assert rank.trainer.save(requests[1]).error == ""


# Files that are not what they should be: one line, and nothing good is lost -----------------------


@pytest.fixture(scope="module")
def made(data: Data, tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints and a batch that went bad."""
    run, batch = tmp_path_factory.mktemp("run"), data.batches[2]
    rank = LocalRank(tied_folder, CONFIG, data.ring)
    saver = bad_batch.BatchSaver(CONFIG, run, data.ring, rank.store, tied_folder)
    assert "minirl replay" in saver.save_bad(batch._replace(version=rank.store.latest), "low")
    rank.train(batch)
    for step in (1, 2):
        state = CheckpointState(step, History(), 8, (9,))
        rank.save(run / "checkpoints" / f"step-{step:06d}", state)
    lines = '{"step": 1, "a": 0.5}\n{"rolled_back_to": 0}\n{"step": 2}\n'
    (run / "metrics.jsonl").write_text(lines)
    return run


HARMS = [(cut, "model.safetensors"), (cut, "trainer/state.json"), (garble, "config.json")]
HARMS += [(garble, "trainer/optimizer.safetensors"), (Path.unlink, "model.safetensors")]


@pytest.mark.parametrize(("harm", "name"), HARMS)
def test_a_broken_checkpoint_is_passed_over_with_a_note(
    harm: Callable[[Path], None], name: str, made: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "checkpoints", run / "checkpoints")
    before, last = found(run)
    start = find_start(run)
    assert (start.folder, start.notes) == (last, (f"going on from {last}",))
    harm(last / name)
    start = find_start(run)
    assert (start.folder, start.state) == (before, CheckpointState(1, History(), 8, (9,)))
    passed, going_on = start.notes
    assert passed.startswith(f"passed over: {last}") and "\n" not in passed
    assert name in passed and going_on == f"going on from {before}"
    assert last.is_dir()  # a person may want to look at it

    harm(before / name)
    with pytest.raises(MinirlError, match=f"no checkpoint of {run} is whole; start a new run"):
        find_start(run)


def test_other_shapes_missing_and_extra_tensors(tied_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied_folder, tmp_path / "model"))
    config, file = folder / "config.json", folder / "model.safetensors"
    sizes, weights = json.loads(config.read_text()), load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    more = {**weights, "model.layers.7.mlp.up_proj.weight": weights[name].clone()}
    fewer = {key: tensor for key, tensor in weights.items() if key != name}
    for width, tensors, said in (
        (512, weights, r"mlp.*is \[.*256.*\], and config.json makes it \[.*512"),
        (256, more, "has, for no layer, model.layers.7"),
        (256, fewer, f"lacks {name}"),
    ):
        config.write_text(json.dumps({**sizes, "intermediate_size": width}))
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(RecipeError, match=said):
            load_policy(str(folder))


WORDS = [b"null", b"-1", b"1e999", b"[]", b"{}", b'"x"', b"9" * 30, b"true", b"\xff", b""]
FILES = ("metrics.jsonl", "trainer/state.json", "config.json", bad_batch.FILE)


def harmed(data: bytes, seed: int) -> bytes:
    """Some bytes of a good file changed, cut out or doubled: nearer to the edge than noise is."""
    rng, found = random.Random(seed), bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(found) + 1)
        word = rng.choice(WORDS) or bytes(found[at - 40 : at])
        found[at : at + rng.choice([0, 1, len(word), 40])] = word
    return bytes(found)


@settings(max_examples=100)
@given(st.integers(0, 10**9) | st.binary(max_size=60), st.sampled_from(FILES))
def test_any_file_is_read(made: Path, tmp_path: Path, harm: int | bytes, name: str) -> None:
    """Lines, a checkpoint, a saved batch: whatever the bytes are, a MinirlError or a value."""
    run = tmp_path / "run"
    if not run.exists():
        shutil.copytree(made, run)
    bad = run / "bad_batches" / "step-000003"
    path = next(f / name for f in (run, found(run)[-1], bad) if (f / name).is_file())
    good = path.read_bytes()
    path.write_bytes(harm if isinstance(harm, bytes) else harmed(good, harm))
    try:
        assert all(type(line["step"]) is int for line in read_lines(run / "metrics.jsonl"))
        start = find_start(run)
        assert type(start.state.step) is int and start.state.consumed_below >= 0
        saved = bad_batch.read(bad / bad_batch.FILE)
        with as_one_line(bad):  # as `replay` does
            bad_batch.put(saved, TrajectoryRing(len(saved.lengths), max(saved.lengths)))
    except MinirlError as error:
        assert "\n" not in str(error)
    path.write_bytes(good)
