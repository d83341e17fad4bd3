"""Trainer ranks: the update is a plain script's, however it is split; what is too stale trains
nothing; a checkpoint is an ordinary folder, and training that resumes from it changes no bit.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from crew import CUDA_TRAINER_PLACE
from plain_script import PlainScript, Weights
from ranks import (
    CONFIG,
    EQUAL,
    ETA,
    FIRST_VERSION,
    FRESH,
    LONGEST,
    MIXED,
    RECIPES,
    STALE,
    Data,
    LocalRank,
    Ranks,
    Recipe,
    are_equal,
    masters,
    momentum,
    ranks,
    relative_error,
    resumed,
)

from minirl.buffer import History
from minirl.config import ModelConfig
from minirl.messages import CheckpointState
from minirl.records import Batch
from minirl.shm.ring import TrajectoryRing
from minirl.train.checkpoint import read_state

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens", "num_minibatches"),
    [(1, 4096, 1), (1, LONGEST, 2), (2, LONGEST, 2)],
)
def test_the_update_is_a_plain_scripts_however_it_is_split(
    num_ranks: int,
    max_tokens: int,
    num_minibatches: int,
    data: Data,
    tied_folder: Path,
    tmp_path: Path,
) -> None:
    """One rank in this process, several in processes of their own."""
    train = replace(CONFIG.train, max_tokens=max_tokens, num_minibatches=num_minibatches)
    config = replace(CONFIG, train=train)
    started = ranks(tmp_path, tied_folder, config, data.ring, num_ranks)
    if num_ranks == 1:
        started = nullcontext(LocalRank(tied_folder, config, data.ring))
    plain = PlainScript(tied_folder, config)
    initial = plain.weights()
    checkpoints = tmp_path / "run" / "checkpoints"
    with started as trainer:
        assert trainer.store.latest == FIRST_VERSION
        assert are_equal(trainer.weights(), initial)
        for recipe, batch in zip(RECIPES, data.batches, strict=True):
            before = plain.weights()
            values = trainer.train(batch)
            assert trainer.store.latest == batch.version + 1
            for name, value in plain.train(batch, data.ring).items():
                assert values[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            check_staleness(recipe, batch, values, data.ring)
            if recipe in (EQUAL, STALE):  # nothing to learn: nothing moves, not by a bit
                assert values["train/grad_norm"] == 0
                assert are_equal(trainer.weights(), initial)
                continue
            folder = checkpoints / f"step-{batch.step:06d}"
            trainer.save(folder)
            assert relative_error(momentum(folder), plain.momentum()) < 1e-4
            # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
            assert relative_error(trainer.weights(), plain.weights(), before) < 1e-3
            if recipe is FRESH:  # sampled by the very weights that the step starts from
                assert values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
                assert values["train/logprob_gap"] == pytest.approx(0, abs=1e-5)
        if isinstance(trainer, Ranks):
            trainer.stop()
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == ["step-000004", "step-000005"]  # checkpoint.keep is 2


def check_staleness(
    recipe: Recipe, batch: Batch, values: dict[str, float | None], ring: TrajectoryRing
) -> None:
    views = [ring.read(t.cell, g.id) for g in batch.groups for t in g.trajectories]
    stale = batch.version - np.concatenate([view.versions[view.mask == 1] for view in views])
    assert values["buffer/masked_frac"] == pytest.approx((stale > ETA).mean())
    assert values["buffer/staleness_max"] == max(stale[stale <= ETA], default=0)
    assert values["buffer/versions_per_trajectory"] == len(recipe.versions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_an_ordinary_folder_and_resuming_from_it_changes_no_bit(
    dtype: str, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    # In bfloat16 an update this small is lost on every weight: only masters can add them up.
    train = replace(CONFIG.train, lr=1e-3 if dtype == "float32" else 1e-6, num_minibatches=2)
    config = replace(CONFIG, model=ModelConfig(dtype=dtype), train=train)
    first, second = data.of(FRESH), data.of(MIXED, 2)
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    one = LocalRank(tied_folder, config, data.ring)
    one.train(first)
    published = one.weights()
    state = CheckpointState(1, History(second.version), 0)
    one.save(folders[0], state)
    one.train(second)
    one.save(folders[1])
    assert sorted((tmp_path / "one" / "checkpoints").iterdir()) == folders  # and no temporary file
    assert read_state(folders[0]) == state
    check_ordinary(folders[0], published, tied_folder)

    two = LocalRank(tied_folder, config, data.ring, **resumed(folders[0], second.version))
    assert two.store.latest == second.version
    assert are_equal(two.weights(), published)
    two.train(second)
    assert are_equal(two.weights(), one.weights())
    again = two.save(tmp_path / "two" / "checkpoints" / "step-000002")
    assert are_equal(masters(again), masters(folders[1]))
    assert are_equal(momentum(again), momentum(folders[1]))
    assert not are_equal(masters(folders[1]), masters(folders[0]))
    if dtype == "bfloat16":
        assert {w.dtype for w in one.weights().values()} == {torch.bfloat16}
        rounded = {name: w.bfloat16() for name, w in masters(folders[1]).items()}
        assert are_equal(rounded, one.weights())


def check_ordinary(checkpoint: Path, published: Weights, source: Path) -> None:
    """transformers loads it as it is, and finds the weights that were published."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    found = dict(model.named_parameters())
    assert are_equal({name: p.detach() for name, p in found.items()}, published)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "3 plus 4 is 7\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(source).encode(text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_rank_on_cuda_learns_the_same_and_resumes_from_its_checkpoint(
    dtype: str, bound: float, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, model=ModelConfig(dtype=dtype))
    first, second = data.of(FRESH), data.of(MIXED, 2)
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    plain, place = PlainScript(tied_folder, config), {"placement": CUDA_TRAINER_PLACE}
    with ranks(tmp_path / "one", tied_folder, config, data.ring, **place) as one:
        values, expected = one.train(first), plain.train(first, data.ring)
        for name in ("train/grad_norm", "train/entropy"):
            assert values[name] == pytest.approx(expected[name], rel=bound), name
        one.save(folders[0])
        assert relative_error(momentum(folders[0]), plain.momentum()) < bound
        one.train(second)
        one.save(folders[1])
    again = tmp_path / "two" / "checkpoints" / "step-000002"
    place |= resumed(folders[0], second.version)
    with ranks(tmp_path / "two", tied_folder, config, data.ring, **place) as two:
        two.train(second)
        two.save(again)
    assert relative_error(momentum(again), momentum(folders[1])) < 1e-3
    assert relative_error(masters(again), masters(folders[1]), masters(folders[0])) < 1e-2
