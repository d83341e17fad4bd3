"""What a recipe may ask of a trainer: algorithms, LoRA, a critic, shards; a batch that blows up.

Most run in this process with one rank; what ranks must agree on runs in real processes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_script
import pytest
import torch
from plain_script import Weights
from ranks import (
    CONFIG,
    FRESH,
    LONGEST,
    MIXED,
    Data,
    LocalRank,
    are_equal,
    momentum,
    ranks,
    relative_error,
    resumed,
    with_reward,
    with_train,
)

from minirl.config import ALGORITHMS, Config

from transformers import AutoModelForCausalLM  # isort: skip


def of_algorithm(name: str, **values: Any) -> Config:
    parts = {key.removeprefix("train."): value for key, value in ALGORITHMS[name].items()}
    return with_train(algorithm=name, **{**parts, "num_minibatches": 2, **values})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_and_the_split_changes_nothing(
    name: str, data: Data, tied_folder: Path
) -> None:
    batch, found = data.of(MIXED), []
    for max_tokens in (4096, LONGEST):
        config = of_algorithm(name, max_tokens=max_tokens, kl_coef=0.05, critic_lr=1e-3)
        rank = LocalRank(tied_folder, config, data.ring)
        before = rank.weights()
        values = rank.train(batch)
        assert values["train/skipped_updates"] == 0
        assert values["train/grad_norm"] > 0 and values["train/kl"] > 0
        assert ("train/value_loss" in values) == (name == "ppo")
        assert not are_equal(rank.weights(), before)
        found.append((values, rank.momentum()))
    assert relative_error(found[0][1], found[1][1]) < 1e-5
    for key in ("train/loss", "train/kl", "train/clip_frac", "train/behav_ratio_mean"):
        assert found[0][0][key] == pytest.approx(found[1][0][key], rel=1e-4, abs=1e-6), key


def test_two_ranks_give_the_update_of_one_and_leave_one_out_together(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """With all that ranks must tell each other: values, penalties, adapters, what blew up."""
    kl = {"kl_coef": 0.1, "kl_in": "reward"}
    config = of_algorithm("ppo", critic_lr=1e-3, lora_rank=4, loss_norm="sequence", **kl)
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    alone = LocalRank(tied_folder, config, data.ring)
    expected = alone.train(data.of(MIXED))
    with ranks(tmp_path, tied_folder, config, data.ring, 2) as two:
        before = two.weights()
        skipped = two.train(with_reward(data.of(FRESH), 0, float("inf")))
        assert skipped["train/skipped_updates"] == 2  # GAE is normalised over the batch
        assert are_equal(two.weights(), before)
        found = two.train(data.of(MIXED))
        two.save(folder)
        weights = two.weights()
    for key in ("train/loss", "train/grad_norm", "train/value_loss", "train/kl"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    assert relative_error(momentum(folder), alone.momentum()) < 1e-4
    assert relative_error(weights, alone.weights()) < 1e-5


@pytest.mark.slow
def test_a_sharded_optimizer_trains_as_a_whole_one_and_resumes_to_the_bit(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """Under a learning rate that changes every step, which each rank's share must follow."""
    options = {"weight_decay": 0.1, "warmup_steps": 1, "schedule": "linear", "steps": 3}
    config = with_train(shard_optimizer=True, **options)
    first, second = data.of(FRESH), data.of(MIXED, 2)
    folder = tmp_path / "one" / "checkpoints" / "step-000001"
    with ranks(tmp_path / "one", tied_folder, config, data.ring, 2) as one:
        one.train(first)
        one.save(folder)
        one.train(second)
        uninterrupted = one.weights()
    again = resumed(folder, second.version)
    with ranks(tmp_path / "two", tied_folder, config, data.ring, 2, **again) as two:
        two.train(second)
        assert are_equal(two.weights(), uninterrupted)
    alone = LocalRank(tied_folder, with_train(**options), data.ring)
    rates = [alone.train(batch)["train/lr"] for batch in (first, second)]
    assert rates[0] != rates[1]
    assert relative_error(alone.weights(), uninterrupted) < 1e-6


@pytest.mark.parametrize(
    "config",
    [
        of_algorithm("ppo", critic_lr=3e-3),
        replace(with_train(lora_rank=4), model=replace(CONFIG.model, dtype="bfloat16")),
    ],
    ids=["critic", "lora"],
)
def test_a_critic_and_adapters_resume_to_the_bit(
    config: Config, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    rank = LocalRank(tied_folder, config, data.ring)
    rank.train(data.of(FRESH))
    folder = rank.save(tmp_path / "run" / "checkpoints" / "step-000001")
    again = LocalRank(tied_folder, config, data.ring, **resumed(folder))
    for each in (rank, again):
        each.train(data.of(MIXED, 2))
    assert are_equal(again.momentum(), rank.momentum())
    for ours, theirs in zip(rank.trainer.replicas, again.trainer.replicas, strict=True):
        assert are_equal(*(dict(r.module.named_parameters()) for r in (ours, theirs)))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_lora_publishes_and_saves_merged_weights(
    gradient_checkpointing: bool, data: Data, untied_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    config = with_train(lora_rank=4, gradient_checkpointing=gradient_checkpointing)
    rank = LocalRank(untied_folder, config, data.ring)
    base = plain_script.load(untied_folder)
    assert are_equal(rank.weights(), _parameters(base))  # B is 0: nothing has changed yet
    rank.train(data.of(FRESH))
    folder = rank.save(tmp_path / "run" / "checkpoints" / "step-000001")
    published = rank.weights()
    changed = {name for name, w in published.items() if not torch.equal(w, _parameters(base)[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    # peft itself merges the saved adapter to the same, and the checkpoint is an ordinary folder.
    theirs = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
    assert relative_error(published, _parameters(theirs)) < 1e-7
    assert are_equal(_parameters(AutoModelForCausalLM.from_pretrained(folder)), published)


def _parameters(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_an_update_that_is_not_finite_is_left_out(data: Data, tied_folder: Path) -> None:
    batch = data.of(MIXED)
    rank = LocalRank(tied_folder, with_train(num_minibatches=2), data.ring)
    values = rank.train(with_reward(batch, 3, float("inf")))  # in the second minibatch
    assert values["train/skipped_updates"] == 1 and values["train/grad_norm"] > 0
    assert rank.trainer.problem == "the loss was not finite" and rank.trainer.bad_gradients
    # The first minibatch was trained, and only it.
    half = LocalRank(tied_folder, with_train(num_minibatches=1), data.ring)
    half.train(replace(batch, groups=batch.groups[:2]))
    assert are_equal(rank.weights(), half.weights())
    assert rank.train(batch)["train/skipped_updates"] == 0 and not rank.trainer.problem
    assert all(w.isfinite().all() for w in rank.weights().values())


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(data: Data, tied_folder: Path) -> None:
    found = []
    for is_compiled in (False, True):
        rank = LocalRank(tied_folder, with_train(compile=is_compiled), data.ring)
        for step, recipe in enumerate((FRESH, MIXED), start=1):
            rank.train(data.of(recipe, step))
        found.append(rank.momentum())
    assert relative_error(*found) < 1e-4
