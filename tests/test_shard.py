"""What makes large models fit: weights, gradients and AdamW's state in slices (FSDP2), a resting
model in model.dtype under LoRA, AdamW's state in 8 bits. Each trains as the plain form does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import varlen_cpu  # noqa: F401  registers the kernel of packed attention
from ranks import (
    FIRST_VERSION,
    FRESH,
    MIXED,
    Data,
    LocalRank,
    Ranks,
    are_equal,
    momentum,
    ranks,
    relative_error,
    resumed,
    with_reward,
    with_train,
)

from minirl import recipe
from minirl.config import Config, ModelConfig
from minirl.errors import RecipeError
from minirl.messages import Score, Train, Trained
from minirl.recipe import to_toml
from minirl.resume import check_changes
from minirl.train import attention, optimizer, policy
from minirl.train.checkpoint import Shares, read_whole

PPO = {"estimator": "gae", "critic_lr": 1e-3, "loss_norm": "sequence"}
KL = {"kl_coef": 0.1, "kl_in": "reward"}
LORA = {"lora_rank": 4, "gradient_checkpointing": True}
COMPARED = {"train/loss", "train/grad_norm", "train/value_loss", "train/kl", "train/logprob_gap"}


def in_bfloat16(config: Config) -> Config:
    return replace(config, model=ModelConfig(dtype="bfloat16"))


def train_twice(rank: Any, data: Data) -> list[dict[str, float | None]]:
    return [rank.train(data.of(kind, i)) for i, kind in enumerate((FRESH, MIXED), 1)]


def assert_same(ours: Any, theirs: Any) -> None:
    for values, others in zip(ours, theirs, strict=True):
        for key in COMPARED & {*others}:
            assert values[key] == pytest.approx(others[key], rel=1e-4, abs=1e-6), key


@pytest.fixture
def one_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank whose slices are whole, in this process: all of FSDP2 but the others."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(optimizer, "is_fully_sharded", lambda s: s.config.train.shard == "full")
    join = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=join, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_minibatches": 2, "max_tokens": 64}, {"gradient_checkpointing": True}, LORA]
    + [{**PPO, **KL}],
    ids=["plain", "minibatches", "checkpointing", "lora", "critic"],
)
def test_slices_train_as_whole_tensors(
    options: dict[str, Any], data: Data, tied_folder: Path, one_sharded: None
) -> None:
    found = []
    for shard in ("none", "full"):
        rank = LocalRank(tied_folder, with_train(shard=shard, **options), data.ring)
        before = rank.weights()
        values = train_twice(rank, data)
        found.append((values, rank.weights(), rank.trainer.learner.state_by_name()))
    (theirs, weights, state), (ours, own_weights, own_state) = found
    assert_same(ours, theirs)
    assert relative_error(own_weights, weights, before) < 1e-4
    assert relative_error(own_state, state) < 1e-5


def test_in_bfloat16_slices_are_float32_and_products_are_not(
    data: Data, tied_folder: Path, one_sharded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA."""
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    found, seen = [], set()
    for shard in ("none", "full"):
        rank = LocalRank(tied_folder, in_bfloat16(with_train(shard=shard)), data.ring)
        layer = rank.trainer.policy.model.model.layers[1]
        layer.mlp.up_proj.register_forward_hook(lambda m, x, out: seen.add(m.weight.dtype))
        layer.register_forward_hook(lambda m, x, out: seen.add(out.dtype))
        assert {w.dtype for w in rank.trainer.learner.slices.values()} == {torch.float32}
        values = rank.train(data.of(FRESH))
        assert 1e-3 < values["train/logprob_gap"] < 0.1
        found.append(rank.trainer.learner.state_by_name())
    assert seen == {torch.float32, torch.bfloat16}
    assert relative_error(*found) < 0.02  # norms are rounded too


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {"weight_decay": 0.1}), (3, {**LORA, **PPO, **KL})],
    ids=["two", "three-lora-critic-reference"],
)
def test_several_ranks_give_the_update_of_one(
    num_ranks: int, options: dict[str, Any], data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """Which is DDP's (test_trainer.py); also where an update is left out, and answers are scored
    by rank 0 while all of them train."""
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    alone = LocalRank(tied_folder, with_train(**options), data.ring)
    before = alone.weights()
    expected = train_twice(alone, data)
    config = with_train(shard="full", **options)
    with ranks(tmp_path, tied_folder, config, data.ring, num_ranks) as some:
        assert are_equal(some.weights(), before)
        skipped = some.train(with_reward(data.of(FRESH), 0, float("inf")))
        assert skipped["train/skipped_updates"] > 0 and are_equal(some.weights(), before)
        first, second = data.of(FRESH), data.of(MIXED, 2)
        scored = Score(
            first.version, tuple((t.cell, g.id) for g in first.groups[:2] for t in g.trajectories)
        )
        found = [train_and_score(some, first, scored), some.train(second)]
        some.save(folder)
        weights = some.weights()
        some.stop()
    assert found[0]["train/tokens"] == expected[0]["train/tokens"]
    assert_same(found, expected)
    assert relative_error(momentum(folder), alone.momentum()) < 1e-4
    assert relative_error(weights, alone.weights()) < 1e-6


def train_and_score(some: Ranks, batch: Any, score: Score) -> dict[str, float | None]:
    """The score is there before the other ranks begin the step."""
    for message in (Train(batch), score):
        some.workers[0].send(message)
    for worker in some.workers[1:]:
        worker.send(Train(batch))
    return some.inbox.take(some.workers[0], Trained).values


def shares(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return dict(Shares([*(folder / "trainer").glob(f"{name}*.safetensors")]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_another_number_of_ranks_resumes_from_slices(
    kind: str, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """An 8-bit state only with the same, but then to the bit."""
    if kind == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    config = in_bfloat16(with_train(shard="full", optimizer=kind, lr=1e-4, **PPO))
    folder, *others = (tmp_path / str(i) / "checkpoints" / "step-000001" for i in range(4))
    second = data.of(MIXED, 2)
    with ranks(tmp_path / "0", tied_folder, config, data.ring, 2) as two:
        two.train(data.of(FRESH))
        two.save(folder)
        two.train(second)
        two.save(others[0])
    read_whole(folder)
    names = [path.name for path in (folder / "trainer").glob("*-1-of-2.safetensors")]
    assert {n.partition("-")[0] for n in names} == {
        *("master", "critic", "optimizer", "critic_optimizer")
    }
    again = resumed(folder, second.version)
    for i, num in enumerate([2] if kind == "adamw8bit" else [2, 3], 1):
        with ranks(tmp_path / str(i), tied_folder, config, data.ring, num, **again) as some:
            some.train(second)
            some.save(others[i])
        for name in ("master", "critic", "optimizer"):
            both = shares(others[i], name), shares(others[0], name)
            assert are_equal(*both) or num == 3
            assert relative_error(*both) < 1e-5
    if kind == "adamw":
        whole = replace(config, train=replace(config.train, shard="none"))
        rank = LocalRank(tied_folder, whole, data.ring, **again)
        rank.train(second)
        masters = rank.trainer.learner.slices
        assert relative_error(masters, shares(others[0], "master")) < 1e-5


def test_under_lora_the_model_rests_in_its_dtype_and_is_merged_exactly_to_rounding(
    data: Data, untied_folder: Path
) -> None:
    rank = LocalRank(untied_folder, in_bfloat16(with_train(**LORA)), data.ring)
    wide = LocalRank(untied_folder, with_train(**LORA), data.ring)
    base = rank.weights()
    assert are_equal(base, {n: w.bfloat16() for n, w in wide.weights().items()})
    for trained in (rank, wide):
        assert train_twice(trained, data)[1]["train/skipped_updates"] == 0
    assert relative_error(rank.momentum(), wide.momentum()) < 0.1
    model = rank.trainer.policy.model
    size, wide_size = (
        sum(p.nbytes for n, p in r.trainer.policy.model.named_parameters() if ".lora_" not in n)
        for r in (rank, wide)
    )
    assert size < 0.52 * wide_size
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    for name, weight in rank.weights().items():
        layer, expected = model.get_submodule(name.removesuffix(".weight")), base[name]
        if hasattr(layer, "lora_A"):
            b_a = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            expected = (base[name].float() + 2 * b_a).bfloat16()
            assert not torch.equal(expected, base[name])
        assert torch.equal(weight, expected), name


def test_an_8bit_state_takes_a_quarter_and_resumes_to_the_bit(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    plain, small = (
        LocalRank(tied_folder, with_train(optimizer=kind), data.ring)
        for kind in ("adamw", "adamw8bit")
    )
    before, sizes = plain.weights(), []
    for rank in (plain, small):
        rank.train(data.of(FRESH))
        sizes.append(sum(t.nbytes for t in rank.trainer.learner.state_by_name().values()))
    folder = small.save(tmp_path / "run" / "checkpoints" / "step-000001")
    second = data.of(MIXED, 2)
    again = resumed(folder, second.version)
    other = LocalRank(tied_folder, with_train(optimizer="adamw8bit"), data.ring, **again)
    for rank in (plain, small, other):
        rank.train(second)
    assert sizes[1] < 0.3 * sizes[0]
    assert relative_error(small.weights(), plain.weights(), before) < 0.1
    assert are_equal(small.weights(), other.weights())


def test_what_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_train(shard="full", optimizer="adamw8bit")
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(RecipeError) as refused:
        recipe.check_optimizer(config)
    assert str(refused.value) == (
        'train.optimizer = "adamw8bit": bitsandbytes is not installed; '
        'pip install "minirl[adamw8bit]", or take "adamw"'
    )
    devices = replace(config.devices, train=2)
    (tmp_path / "recipe.toml").write_text(to_toml(replace(config, devices=devices)))
    with pytest.raises(RecipeError, match=r"another recipe: devices\.train 2 → 3; set these"):
        check_changes(replace(config, devices=replace(devices, train=3)), tmp_path)
