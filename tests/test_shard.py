"""What makes large models fit: weights, gradients and AdamW's state in slices (FSDP2), a resting
model in model.dtype under LoRA, AdamW's state in 8 bits. Each trains as the plain form does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import varlen_cpu  # noqa: F401  registers the kernel of packed attention
from plain_script import Weights
from ranks import FRESH, MIXED, Data, LocalRank, are_equal, momentum, relative_error, with_train
from test_trainer import in_bfloat16

from minirl import recipe
from minirl.errors import RecipeError
from minirl.messages import Score, Train, Trained
from minirl.resume import check_changes
from minirl.train import attention, optimizer, policy
from minirl.train.attention import boundaries
from minirl.train.checkpoint import read_whole
from minirl.train.optimizer import shares
from minirl.train.policy import load_policy

PPO = {"estimator": "gae", "critic_lr": 1e-3, "loss_norm": "sequence"}
KL = {"kl_coef": 0.1}
LORA = {"lora_rank": 4, "gradient_checkpointing": True}
MANY = {"num_minibatches": 2, "max_tokens": 64, "gradient_checkpointing": True}
COMPARED = {"train/loss", "train/grad_norm", "train/value_loss", "train/kl", "train/logprob_gap"}


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


@pytest.mark.parametrize("options", [MANY, LORA, {**PPO, **KL}], ids=["plain", "lora", "critic"])
def test_slices_train_as_whole_tensors(
    options: dict[str, Any], data: Data, tied_folder: Path, one_sharded: None
) -> None:
    whole, sliced = (
        LocalRank(tied_folder, with_train(shard=shard, **options), data.ring)
        for shard in ("none", "full")
    )
    before = whole.weights()
    assert_same(train_twice(sliced, data), train_twice(whole, data))
    assert relative_error(sliced.weights(), whole.weights(), before) < 1e-4
    states = [rank.trainer.learner.state_by_name() for rank in (sliced, whole)]
    assert relative_error(*states) < 1e-5


def test_in_bfloat16_slices_are_float32_and_products_are_not(
    data: Data, tied_folder: Path, one_sharded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA. What flows from layer to layer is float32. It learns as in float32."""
    exact = LocalRank(tied_folder, with_train(), data.ring)
    assert exact.train(data.of(FRESH))["train/logprob_gap"] < 1e-5
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    found, seen = [], set()
    for shard in ("none", "full"):
        rank = LocalRank(tied_folder, in_bfloat16(with_train(shard=shard)), data.ring)
        layer = rank.trainer.policy.model.model.layers[1]
        layer.mlp.up_proj.register_forward_hook(lambda m, x, out: seen.add(m.weight.dtype))
        layer.register_forward_hook(lambda m, x, out: seen.add(f"flows {out.dtype}"))
        assert {w.dtype for w in rank.trainer.learner.slices.values()} == {torch.float32}
        assert 1e-3 < rank.train(data.of(FRESH))["train/logprob_gap"] < 0.1
        found.append(rank.trainer.learner.state_by_name())
        if shard == "none":
            assert 1e-4 < relative_error(exact.momentum(), rank.momentum()) < 0.1
    assert seen == {torch.float32, torch.bfloat16, "flows torch.float32"}
    assert relative_error(*found) < 0.02  # norms are rounded too


def test_under_ddp_gradients_are_its_buckets_from_the_start(
    data: Data, tied_folder: Path, one_sharded: None
) -> None:
    """Else there would be a second copy of them, also in a micro-batch that does not sync."""
    setup = ranks.setup_of(tied_folder, ranks.CONFIG, data.ring, num_ranks=2)
    replica = optimizer.Replica(load_policy(str(tied_folder)), setup, 1e-3)
    parameters = list(replica.module.parameters())
    before = [parameter.grad.data_ptr() for parameter in parameters]
    for is_last in (False, True, False, True):
        with replica.syncing(is_last):
            replica.parallel(torch.arange(9), boundaries([5, 4]))[0].sum().backward()
        assert [parameter.grad.data_ptr() for parameter in parameters] == before
        assert any(parameter.grad.any() for parameter in parameters)
        replica.zero_grad()
        assert not any(parameter.grad.any() for parameter in parameters)
    assert len({p.grad.untyped_storage().data_ptr() for p in parameters}) < len(parameters)


ALL = {**LORA, **PPO, **KL}


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {"shard": "full"}), (3, {"shard": "full", **ALL}), (2, {"num_minibatches": 2, **ALL})],
    ids=["sliced", "sliced with all", "whole with all"],
)
def test_several_ranks_give_the_update_of_one(
    num_ranks: int, options: dict[str, Any], data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """With all that ranks must tell each other: values, adapters, what blew up; and where answers
    are scored by rank 0 while all of them train."""
    folder, config = tmp_path / "checkpoints" / "step-000001", with_train(**options)
    alone = LocalRank(tied_folder, with_train(**{**options, "shard": "none"}), data.ring)
    before, expected = alone.weights(), train_twice(alone, data)
    with ranks.ranks(tmp_path, tied_folder, config, data.ring, num_ranks) as some:
        assert are_equal(some.weights(), before)
        skipped = some.train(ranks.with_reward(data.of(FRESH), 0, float("inf")))
        assert skipped["train/skipped_updates"] > 0 and are_equal(some.weights(), before)
        found = [train_and_score(some, data), some.train(data.of(MIXED, 2))]
        some.save(folder)
        weights = some.weights()
    assert_same(found, expected)
    assert relative_error(momentum(folder), alone.momentum()) < 1e-4
    assert relative_error(weights, alone.weights()) < 1e-6


def train_and_score(some: ranks.Ranks, data: Data) -> dict[str, float | None]:
    """The answers to score are there before the other ranks begin the step."""
    batch = data.of(FRESH)
    cells = tuple((t.cell, g.id) for g in batch.groups[:2] for t in g.trajectories)
    for message in (Train(batch), Score(batch.version, cells)):
        some.workers[0].send(message)
    for worker in some.workers[1:]:
        worker.send(Train(batch))
    return some.inbox.take(some.workers[0], Trained).values


def saved(folder: Path, name: str) -> Weights:
    return {key: read() for key, read in shares(folder / "trainer", name).items()}


@pytest.mark.slow
def test_any_number_of_ranks_resumes_from_slices(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    config = in_bfloat16(with_train(shard="full", lr=1e-4, **PPO))
    folder, *others = (tmp_path / str(i) / "checkpoints" / "step-000001" for i in range(4))
    second = data.of(MIXED, 2)
    with ranks.ranks(tmp_path / "0", tied_folder, config, data.ring, 2) as two:
        two.train(data.of(FRESH))
        two.save(folder)
        two.train(second)
        two.save(others[0])
    read_whole(folder)
    again = ranks.resumed(folder, second.version)
    for num, other in zip((2, 3), others[1:], strict=True):
        with ranks.ranks(tmp_path / str(num), tied_folder, config, data.ring, num, **again) as some:
            some.train(second)
            some.save(other)
        for name in ("master", "critic", "optimizer", "critic_optimizer"):
            both = saved(other, name), saved(others[0], name)
            assert are_equal(*both) or num == 3
            assert relative_error(*both) < 1e-5
    whole = replace(config, train=replace(config.train, shard="none"))
    (rank := LocalRank(tied_folder, whole, data.ring, **again)).train(second)
    assert relative_error(rank.trainer.learner.slices, saved(others[0], "master")) < 1e-5


def test_under_lora_the_model_rests_in_its_dtype_and_is_merged_exactly_to_rounding(
    data: Data, untied_folder: Path
) -> None:
    wide = LocalRank(untied_folder, with_train(**LORA), data.ring)
    rank = LocalRank(untied_folder, in_bfloat16(with_train(**LORA)), data.ring)
    model, base = rank.trainer.policy.model, rank.weights()
    assert are_equal(base, {n: w.bfloat16() for n, w in wide.weights().items()})
    assert train_twice(rank, data) != train_twice(wide, data)  # rounded
    assert relative_error(rank.momentum(), wide.momentum()) < 0.1
    resting = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.nbytes for p in resting) < 0.52 * sum(4 * p.numel() for p in resting)
    for name, weight in rank.weights().items():
        layer, expected = model.get_submodule(name.removesuffix(".weight")), base[name]
        if hasattr(layer, "lora_A"):
            a, b = (own["default"].weight for own in (layer.lora_A, layer.lora_B))
            expected = (base[name].float() + 2 * (b @ a)).bfloat16()
            assert a.dtype == torch.float32 and not torch.equal(expected, base[name])
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("shard", ["none", "full"])
def test_an_8bit_state_takes_a_quarter_and_resumes_to_the_bit(
    shard: str, data: Data, tied_folder: Path, tmp_path: Path, one_sharded: None
) -> None:
    pytest.importorskip("bitsandbytes")
    config, second = with_train(optimizer="adamw8bit", shard=shard), data.of(MIXED, 2)
    plain = LocalRank(tied_folder, with_train(), data.ring)
    small, before = LocalRank(tied_folder, config, data.ring), plain.weights()
    for rank in (plain, small):
        rank.train(data.of(FRESH))
    folder = small.save(tmp_path / "run" / "checkpoints" / "step-000001")
    other = LocalRank(tied_folder, config, data.ring, **ranks.resumed(folder, second.version))
    for rank in (plain, small, other):
        rank.train(second)
    states = [rank.trainer.learner.state_by_name() for rank in (small, plain)]
    sizes = [sum(tensor.nbytes for tensor in state.values()) for state in states]
    assert sizes[0] < 0.3 * sizes[1]
    assert relative_error(small.weights(), plain.weights(), before) < 0.1
    assert are_equal(small.weights(), other.weights())


def test_what_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_train(shard="full", optimizer="adamw8bit")
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    rule, remedy = "bitsandbytes is not installed", r'pip install "minirl\[adamw8bit\]", or take it'
    with pytest.raises(RecipeError, match=f'train.optimizer = "adamw8bit": {rule}; {remedy}'):
        recipe.check_packages(config)
    two, three = (replace(config, devices=replace(config.devices, train=n)) for n in (2, 3))
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(two))
    with pytest.raises(RecipeError, match=r"another recipe: devices\.train 2 → 3; set these"):
        check_changes(three, tmp_path)
