"""The plan: memory that adds up, shapes that are right, splits, the paper, and a run's balance."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minirl.balance import Balance, balance
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import to_toml
from minirl.tools.plan import (
    GIB,
    GPUS,
    SHAPES,
    Plan,
    gpu_named,
    possible,
    recognise,
    recommended,
    rollout_bill,
    shape_of,
    train_bill,
    usual_lengths,
    with_auto_split,
)
from tests.docs import plan as paper


def config(model: str = "Qwen/Qwen2.5-1.5B-Instruct", **train: Any) -> Config:
    base = Config()
    return replace(
        base,
        model=replace(base.model, path=model, dtype="bfloat16"),
        rollout=replace(base.rollout, max_new_tokens=1024),
        train=replace(base.train, **train),
    )


def test_shapes_have_the_published_number_of_parameters() -> None:
    billions = {
        "Qwen2.5-1.5B": 1.544,
        "Qwen2.5-7B": 7.616,
        "Qwen3-0.6B": 0.596,
        "Qwen3-8B": 8.191,
        "DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
        "tiny": 0.000345,
    }
    found = {name: SHAPES[name].num_parameters / 1e9 for name in billions}
    assert found == pytest.approx(billions, rel=0.005)


def test_a_name_is_found_by_its_family_and_a_folder_by_its_config(tmp_path: Path) -> None:
    assert shape_of(config("Qwen/Qwen2.5-1.5B-Instruct")) == SHAPES["Qwen2.5-1.5B"]
    with pytest.raises(RecipeError, match="neither on this machine nor in the table"):
        shape_of(config("someone/else-3B"))
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    shape = shape_of(config(str(tmp_path)))
    assert (shape.kv_heads, shape.head_dim, shape.is_tied) == (4, 16, False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="no usable sizes"):
        shape_of(config(str(tmp_path)))


def test_gpus_by_name_and_as_drivers_call_them() -> None:
    assert gpu_named("h100") is GPUS["H100"]
    with pytest.raises(RecipeError, match="one of H100"):
        gpu_named("A100-81")
    assert recognise("NVIDIA A100-SXM4-40GB", 39.5 * GIB) is GPUS["A100-40"]
    assert recognise("NVIDIA GeForce RTX 4090", 23.6 * GIB) is GPUS["4090"]
    assert recognise("NVIDIA T4", 15 * GIB) is None


def test_a_rollout_gpu_has_what_is_left_for_kv() -> None:
    bill = rollout_bill(config(), GPUS["H100"], SHAPES["Qwen2.5-1.5B"])
    assert not bill.remedy and sum(bill.items.values()) == pytest.approx(bill.available)
    per_token = 2 * 2 * 28 * 2 * 128  # bytes: K and V, layers, heads, head_dim
    assert bill.kv_tokens == pytest.approx(bill.items["KV cache"] / per_token, rel=1e-6)
    too_big = rollout_bill(config(), GPUS["4090"], replace(SHAPES["Qwen2.5-7B"], layers=100))
    assert "devices.tensor_parallel" in too_big.remedy
    taken = (bill.items["weights"] + bill.items["engine"]) / config().rollout.memory_fraction
    tight = replace(GPUS["4090"], memory_gib=taken / GIB + 0.01)
    remedy = rollout_bill(config(), tight, SHAPES["Qwen2.5-1.5B"]).remedy
    assert remedy.startswith("lower rollout.max_new_tokens: one answer needs 1,280 tokens")


def test_a_training_gpu_holds_what_the_algorithm_needs() -> None:
    shape, card = SHAPES["Qwen3-0.6B"], GPUS["H100"]
    num = shape.num_parameters

    def sizes(num_ranks: int = 1, **train: Any) -> dict[str, float]:
        return train_bill(config(**train), card, shape, num_ranks).items

    plain = sizes()
    assert plain["weights"] + plain["gradients"] + plain["optimizer"] == 16 * num
    assert not plain.keys() & {"DDP buckets", "critic", "reference"}
    assert sizes(2)["DDP buckets"] == 4 * num
    assert sizes(kl_coef=0.1)["reference"] == 4 * num
    assert sizes(estimator="gae")["critic"] == 16 * num
    assert sizes(4, shard_optimizer=True)["optimizer"] == 2 * num
    adapted = sizes(lora_rank=16)
    assert adapted["weights"] == 4 * num
    assert adapted["gradients"] == 4 * shape.num_adapted(16) < 0.02 * 4 * num


def test_the_remedy_of_a_training_gpu_is_one_that_helps() -> None:
    shape, card = SHAPES["Qwen3-0.6B"], GPUS["4090"]
    remedy = train_bill(config(max_tokens=16384), card, shape, 1).remedy
    assert remedy.startswith("lower train.max_tokens to ")
    tokens = int(remedy.rpartition(" ")[2].replace(",", ""))
    assert not train_bill(config(max_tokens=tokens), card, shape, 1).remedy
    assert train_bill(config(max_tokens=tokens + 1024), card, shape, 1).remedy
    # Where one change is not enough, all that are needed come at once, and then it fits.
    two = train_bill(config(max_tokens=16384), replace(card, memory_gib=13), shape, 2).remedy
    assert two.startswith("set train.gradient_checkpointing = true, set train.shard_optimizer")
    large = train_bill(config(), GPUS["A100-40"], SHAPES["Qwen2.5-7B"], 1)
    assert large.remedy.startswith("take a smaller model")


def test_splits_cover_the_box_and_the_recommended_is_the_fastest_or_as_good() -> None:
    small = config(batch_size=8, num_minibatches=1)
    assert possible(small, 4) == [(1, 3), (2, 2), (3, 1)]
    assert len(possible(small, 64)) == 16
    with pytest.raises(RecipeError, match="cannot be split"):
        possible(small, 1)
    found = Plan(small, GPUS["H100"], usual_lengths(small)).splits(4)
    best = recommended(found)
    top = max(split.outcome.tokens_per_s for split in found)
    assert best.outcome.tokens_per_s >= 0.98 * top
    assert all(split.outcome.staleness_max <= 2 for split in found)


def test_a_split_whose_optimizer_does_not_fit_is_not_taken() -> None:
    sharded = config(
        batch_size=8, shard_optimizer=True, gradient_checkpointing=True, max_tokens=32768
    )
    plan = Plan(sharded, GPUS["A100-40"], usual_lengths(sharded, 100))
    found = plan.splits(8)
    # Each holds more of the optimizer the fewer they are.
    assert {split.train for split in found if split.fits} == {5, 6, 7}
    # Training that is quick would have the fewest.
    assert recommended([replace(split, fits=True) for split in found]).train < 5
    assert recommended(found).fits


def test_the_report_has_a_row_for_every_split() -> None:
    small = config(batch_size=4)
    plan = Plan(small, GPUS["H100"], usual_lengths(small, 100))
    rows = list(plan.memory_rows(3))
    assert [row[0] for row in rows] == ["model", "rollout GPU", "", "training GPU"]
    assert plan.max_running == 256  # rollout.max_num_seqs
    rows = list(plan.split_rows(3))
    assert [row[0] for row in rows[1:]] == ["1 + 2", "2 + 1"]
    (advice,) = [row[-1] for row in rows if row[-1].startswith("<-")]
    assert advice.startswith("<- take this, once it fits; ") and "-bound: " in advice


def test_auto_takes_the_planned_split_and_a_resumed_run_keeps_its_own(tmp_path: Path) -> None:
    base = config(batch_size=8, num_minibatches=1)
    auto = replace(base, devices=replace(base.devices, split="auto", rollout=7, train=1))
    assert with_auto_split(auto, None, None) == auto, "a device that is not in the table"
    planned = with_auto_split(auto, GPUS["H100"], None).devices
    best = recommended(Plan(auto, GPUS["H100"], usual_lengths(auto)).splits(8))
    assert (planned.rollout, planned.train) == (best.rollout, best.train) != (7, 1)
    before = replace(auto, devices=replace(auto.devices, rollout=5, train=3))
    (tmp_path / "recipe.toml").write_text(to_toml(before))
    assert with_auto_split(auto, GPUS["H100"], tmp_path) == before
    fewer = replace(auto, devices=replace(auto.devices, rollout=3))
    again = with_auto_split(fewer, GPUS["H100"], tmp_path).devices
    assert again.rollout + again.train == 4, "on other devices it is planned again"


def test_the_simulator_agrees_with_the_papers_table_7() -> None:
    for row in paper.table_7():
        assert abs(row.error) <= 0.10, row


@pytest.mark.slow
def test_the_simulator_agrees_with_the_papers_figures() -> None:
    rates = [row.simulated for row in paper.table_7((0, 1, 2, 4, 8, 16))]  # figure 5c
    assert all(later >= 0.99 * rate for rate, later in pairwise(rates))
    assert rates[1] / rates[0] > 1.5 and rates[-1] / rates[1] < 1.15
    scales = paper.figure_4()
    asynchronous, synchronous, colocated = scales[-1].over(scales[0])
    assert asynchronous > 0.85 * 8 and synchronous < 0.6 * 8 and colocated < 0.6 * 8
    # "Up to 2.77 ×" over synchronous systems of as many GPUs, says the paper.
    gains = [scale.asynchronous / scale.colocated for scale in scales]
    assert max(gains) == pytest.approx(2.77, rel=0.1)


def test_the_balance_names_the_bottleneck_and_what_would_help() -> None:
    assert Balance(rollout=4, train=4, rollout_idle=0.0, train_idle=0.41).sentence() == (
        "generation-bound: trainers idle 41%, one GPU more for rollout would give +25%"
    )
    assert Balance(1, 1, rollout_idle=0.6, train_idle=0.0).sentence("process") == (
        "training-bound: engines idle 60%, one process more for training would give +100%"
    )
    assert Balance(2, 2, 0.01, 0.02).sentence() == "balanced: engines idle 1%, trainers 2%"
    waits = Balance(1, 1, 0.3, 0.7).sentence("process", is_synchronous=True)
    assert waits.startswith("synchronous: engines idle 30%, trainers 70%; buffer.max_staleness = 1")


def test_the_balance_of_a_run_weighs_steps_by_their_time_and_leaves_the_first_out() -> None:
    lines = [
        {"seconds": 100.0, "rollout/idle_frac": 1.0, "train/idle_frac": 1.0},
        {"seconds": 101.0, "rollout/idle_frac": 0.0, "train/idle_frac": 0.8},
        {"seconds": 104.0, "rollout/idle_frac": 0.0, "train/idle_frac": 0.4},
    ]
    assert balance(lines, 1, 1) == Balance(1, 1, 0.0, pytest.approx(0.5))
    assert balance(lines[:1], 1, 1) is None
    before = {**lines[1], "rollout/devices": 2, "train/devices": 1}  # resumed on other devices
    assert balance([before, before, *lines], 1, 1) == balance(lines, 1, 1)
