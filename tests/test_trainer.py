"""Trainer ranks as real processes: the update is a plain script's, however it is split; what is too
stale trains nothing; a checkpoint is an ordinary folder, and going on from it changes no bit.
"""

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
    RECIPES,
    STALE,
    Data,
    Recipe,
    are_equal,
    make_data,
    masters,
    momentum,
    ranks,
    relative_error,
)

from minirl.config import ModelConfig
from minirl.records import Batch
from minirl.rollout.worker import Stop
from minirl.shm.ring import TrajectoryRing
from minirl.train.checkpoint import read_state
from minirl.train.messages import Trained
from minirl.workers import Died

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip


@pytest.fixture(scope="module")
def data(tied_folder: Path) -> Data:
    return make_data(tied_folder)


# Tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens", "num_minibatches"),
    [
        (1, 4096, 1),
        pytest.param(1, LONGEST, 2, marks=pytest.mark.slow),
        pytest.param(2, LONGEST, 1, marks=pytest.mark.slow),
        (3, 100, 2),
    ],
)
def test_the_update_is_a_plain_scripts_however_it_is_split(
    num_ranks: int,
    max_tokens: int,
    num_minibatches: int,
    data: Data,
    tied_folder: Path,
    tmp_path: Path,
) -> None:
    train = replace(CONFIG.train, max_tokens=max_tokens, num_minibatches=num_minibatches)
    config = replace(CONFIG, train=train)
    plain = PlainScript(tied_folder, config)
    initial = plain.weights()
    with ranks(tmp_path, tied_folder, config, data.ring, num_ranks) as trainer:
        assert trainer.store.latest == FIRST_VERSION
        assert are_equal(trainer.weights(), initial)
        for recipe, batch in zip(RECIPES, data.batches, strict=True):
            before = plain.weights()
            trained = trainer.train(batch)
            assert trained.version == trainer.store.latest == batch.version + 1
            expected = plain.train(batch, data.ring)
            for name, value in expected.items():
                assert trained.values[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            check_staleness(recipe, batch, trained, data.ring)
            if recipe in (EQUAL, STALE):  # nothing to learn: nothing moves, not by a bit
                assert trained.values["train/grad_norm"] == 0
                assert are_equal(trainer.weights(), initial)
                continue
            folder = tmp_path / "run" / "checkpoints" / f"step-{batch.step:06d}"
            trainer.save(folder, {})
            assert relative_error(momentum(folder), plain.momentum()) < 1e-4
            # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
            assert relative_error(trainer.weights(), plain.weights(), before) < 1e-3
            if recipe is FRESH:  # sampled by the very weights that the step starts from
                assert trained.values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
                assert trained.values["train/logprob_gap"] == pytest.approx(0, abs=1e-5)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005"]  # checkpoint.keep is 2


def check_staleness(recipe: Recipe, batch: Batch, trained: Trained, ring: TrajectoryRing) -> None:
    versions = np.concatenate(
        [
            ring.read(t.cell, g.id).versions[ring.read(t.cell, g.id).mask == 1]
            for g in batch.groups
            for t in g.trajectories
        ]
    )
    ages = batch.version - versions
    values = trained.values
    assert values["buffer/masked_frac"] == pytest.approx((ages > ETA).mean())
    assert values["buffer/staleness_max"] == max(ages[ages <= ETA], default=0)
    assert values["buffer/versions_per_trajectory"] == len(recipe.versions)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_checkpoint_is_an_ordinary_folder_and_going_on_from_it_changes_no_bit(
    dtype: str, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    # In bfloat16 an update this small is lost on every weight: only masters can add them up.
    train = replace(CONFIG.train, lr=1e-3 if dtype == "float32" else 1e-6, num_minibatches=2)
    config = replace(CONFIG, model=ModelConfig(dtype=dtype), train=train)
    first, second = (replace(data.batches[i], step=i - 1) for i in (2, 3))
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    with ranks(tmp_path / "one", tied_folder, config, data.ring) as trainer:
        trainer.train(first)
        published = trainer.weights()
        trainer.save(folders[0], {"version": second.version})
        trainer.train(second)
        uninterrupted = trainer.weights()
        trainer.save(folders[1], {"version": second.version + 1})
        trainer.workers[0].send(Stop())
        assert trainer.inbox.take(trainer.workers[0], Died).how == "ended with exit code 0"
    # Nothing that was written aside is left.
    assert sorted((tmp_path / "one" / "checkpoints").iterdir()) == folders
    assert read_state(folders[0]) == {"version": second.version}
    check_ordinary(folders[0], published, tied_folder)

    again = tmp_path / "two" / "checkpoints" / "step-000002"
    with ranks(
        tmp_path / "two", folders[0], config, data.ring, resumed_at=second.version
    ) as trainer:
        assert trainer.store.latest == second.version
        assert are_equal(trainer.weights(), published)
        assert trainer.train(second).version == second.version + 1
        assert are_equal(trainer.weights(), uninterrupted)
        trainer.save(again, {})
    assert are_equal(masters(again), masters(folders[1]))
    assert are_equal(momentum(again), momentum(folders[1]))
    assert not are_equal(masters(folders[1]), masters(folders[0]))
    if dtype == "bfloat16":
        assert {w.dtype for w in uninterrupted.values()} == {torch.bfloat16}
        rounded = {name: w.bfloat16() for name, w in masters(folders[1]).items()}
        assert are_equal(rounded, uninterrupted)


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
def test_a_rank_on_cuda_learns_the_same_and_goes_on_from_its_checkpoint(
    dtype: str, bound: float, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, model=ModelConfig(dtype=dtype))
    first, second = (replace(data.batches[i], step=i - 1) for i in (2, 3))
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    plain = PlainScript(tied_folder, config)
    with ranks(tmp_path / "one", tied_folder, config, data.ring, place=CUDA_TRAINER_PLACE) as one:
        trained, expected = one.train(first), plain.train(first, data.ring)
        for name in ("train/grad_norm", "train/entropy"):
            assert trained.values[name] == pytest.approx(expected[name], rel=bound), name
        one.save(folders[0], {})
        assert relative_error(momentum(folders[0]), plain.momentum()) < bound
        one.train(second)
        one.save(folders[1], {})
    again = tmp_path / "two" / "checkpoints" / "step-000002"
    with ranks(
        tmp_path / "two",
        folders[0],
        config,
        data.ring,
        resumed_at=second.version,
        place=CUDA_TRAINER_PLACE,
    ) as two:
        two.train(second)
        two.save(again, {})
    assert relative_error(momentum(again), momentum(folders[1])) < 1e-3
    assert relative_error(masters(again), masters(folders[1]), masters(folders[0])) < 1e-2
