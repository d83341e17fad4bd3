"""Files that are not what they should be: one line, never a traceback, and nothing good is lost."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import CONFIG, Data, LocalRank
from safetensors.torch import load_file, save_file
from test_config import cut, garble

from minirl.buffer import History
from minirl.errors import MinirlError, RecipeError
from minirl.messages import CheckpointState
from minirl.resume import find_start
from minirl.run_dir import read_lines
from minirl.shm.ring import TrajectoryRing
from minirl.train import bad_batch
from minirl.train.checkpoint import as_one_line, found
from minirl.train.policy import load_policy


@pytest.fixture(scope="module")
def made(data: Data, tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints and a batch that went bad."""
    run, batch = tmp_path_factory.mktemp("run"), data.batches[2]
    rank = LocalRank(tied_folder, CONFIG, data.ring)
    saver = bad_batch.BatchSaver(CONFIG, run, data.ring, rank.store, tied_folder)
    assert "minirl replay" in saver.save_bad(batch, rank.store.latest, "low")
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


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
