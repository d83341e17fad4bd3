"""The plan: memory that adds up, shapes that are right, splits, the paper, and a run's balance."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.tools.plan import report
from minirl.tools.plan.balance import Balance, balance
from minirl.tools.plan.gpus import GIB, GPUS, gpu_named, recognise
from minirl.tools.plan.memory import rollout_bill, train_bill
from minirl.tools.plan.shapes import TABLE, shape_of
from minirl.tools.plan.split import ladder, possible, recommended, splits, usual_lengths, with_split
from tests.docs import plan as paper


def config(model: str = "Qwen/Qwen2.5-1.5B-Instruct", **train: Any) -> Config:
    base = Config()
    return replace(
        base,
        model=replace(base.model, path=model, dtype="bfloat16"),
        rollout=replace(base.rollout, max_new_tokens=1024),
        train=replace(base.train, **train),
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-1.5B", 1.544),
        ("Qwen2.5-7B", 7.616),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1.777),
        ("Llama-3.1-8B", 8.030),
        ("SmolLM2-135M", 0.1345),
        ("tiny", 0.000345),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert TABLE[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_name_is_found_by_its_family_and_a_folder_by_its_config(tmp_path: Path) -> None:
    assert shape_of(config("Qwen/Qwen2.5-Math-1.5B-Instruct")) == TABLE["Qwen2.5-1.5B"]
    assert shape_of(config("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")).layers == 28
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
    with pytest.raises(RecipeError, match="did you mean A100-80"):
        gpu_named("A100-81")
    assert recognise("NVIDIA A100-SXM4-40GB", 39.5 * GIB) is GPUS["A100-40"]
    assert recognise("NVIDIA H100 80GB HBM3", 79.1 * GIB) is GPUS["H100"]
    assert recognise("NVIDIA GeForce RTX 4090", 23.6 * GIB) is GPUS["4090"]
    assert recognise("NVIDIA T4", 15 * GIB) is None


def test_a_rollout_gpu_has_what_is_left_for_kv() -> None:
    bill = rollout_bill(config(), GPUS["H100"], TABLE["Qwen2.5-1.5B"], usual_tokens=600)
    assert bill.is_ok and bill.total == pytest.approx(bill.available)
    per_token = 2 * 2 * 28 * 2 * 128  # bytes: K and V, layers, heads, head_dim
    assert bill.kv_tokens == pytest.approx(bill.items[-1][1] / per_token, rel=1e-6)
    assert bill.num_longest == bill.kv_tokens // 1280
    assert bill.num_usual == 256  # max_num_seqs
    too_big = rollout_bill(config(), GPUS["4090"], TABLE["Qwen2.5-32B"], 600)
    assert not too_big.is_ok and "devices.tensor_parallel" in too_big.remedy


def test_a_training_gpu_holds_sixteen_bytes_a_parameter_and_more() -> None:
    shape = TABLE["Qwen3-0.6B"]
    bill = train_bill(config(max_tokens=4096), GPUS["H100"], shape, num_ranks=1)
    sizes = dict(bill.items)
    masters = sizes["weights"] + sizes["gradients"] + sizes["optimizer"]
    assert bill.is_ok and masters == pytest.approx(16 * shape.num_parameters)
    assert "DDP buckets" in dict(train_bill(config(), GPUS["H100"], shape, 2).items)


def test_the_remedy_of_a_training_gpu_is_one_that_helps() -> None:
    shape, card = TABLE["Qwen3-0.6B"], GPUS["4090"]
    bill = train_bill(config(max_tokens=16384), card, shape, 1)
    assert bill.remedy.startswith("lower train.max_tokens to ")
    tokens = int(bill.remedy.rpartition(" ")[2].replace(",", ""))
    assert train_bill(config(max_tokens=tokens), card, shape, 1).is_ok
    assert not train_bill(config(max_tokens=tokens + 1024), card, shape, 1).is_ok
    large = TABLE["Qwen2.5-7B"]
    hopeless = train_bill(config(lora_rank=32), card, large, 1)
    assert hopeless.remedy.startswith("take a smaller model")
    assert "train.lora_rank = 32" in train_bill(config(), card, large, 1).remedy
    assert "train.shard_optimizer" in train_bill(config(), card, large, 2).remedy


def test_a_training_gpu_also_holds_what_the_algorithm_needs() -> None:
    shape, card = TABLE["Qwen3-0.6B"], GPUS["H100"]
    num = shape.num_parameters

    def sizes(num_ranks: int = 1, **train: Any) -> dict[str, float]:
        return dict(train_bill(config(**train), card, shape, num_ranks).items)

    assert sizes(kl_coef=0.1)["reference"] == 4 * num
    assert sizes(estimator="gae")["critic"] == 16 * num
    assert sizes(4, shard_optimizer=True)["optimizer"] == 2 * num
    adapted = sizes(lora_rank=16)
    assert adapted["weights"] == 4 * num
    assert adapted["gradients"] == 4 * shape.num_adapted(16) < 0.02 * 4 * num


def test_splits_cover_the_box_and_the_recommended_is_the_fastest_or_as_good() -> None:
    small = config(batch_size=8, num_minibatches=1)
    assert possible(small, 4) == [(1, 3), (2, 2), (3, 1)]
    assert len(possible(small, 64)) == 17
    with pytest.raises(RecipeError, match="cannot be split"):
        possible(small, 1)
    found = splits(small, GPUS["H100"], shape_of(small), usual_lengths(small), 4)
    best = recommended(found)
    top = max(split.outcome.tokens_per_s for split in found)
    assert best.outcome.tokens_per_s >= 0.98 * top
    assert all(split.outcome.staleness_max <= 2 for split in found)
    assert with_split(small, 3, 1).devices.rollout == 3
    assert list(ladder(8, 100)) == [8, 16, 32, 64, 100]


def test_a_split_whose_optimizer_does_not_fit_is_not_taken() -> None:
    sharded = config(
        batch_size=8, shard_optimizer=True, gradient_checkpointing=True, max_tokens=32768
    )
    shape, card = shape_of(sharded), GPUS["A100-40"]
    found = splits(sharded, card, shape, usual_lengths(sharded, 100), 8)
    # Each holds more of the optimizer the fewer they are.
    assert {split.train for split in found if split.fits} == {5, 6, 7}
    # Training that is quick would have the fewest.
    assert recommended([replace(split, fits=True) for split in found]).train < 5
    assert recommended(found).fits
    assert recommended([split for split in found if not split.fits]).train < 5, "there is no other"
    rows = list(report.split_rows(report.Question(sharded, card, 8, mean_tokens=100)))
    assert [row[-1] for row in rows].count("too big") == 4


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
    assert len(list(paper.paper_rows([], scales))) == 2 + len(scales)


def test_the_report_has_a_row_for_every_split(tmp_path: Path) -> None:
    asked = report.Question(config(batch_size=4), GPUS["H100"], 3, mean_tokens=100)
    rows = list(report.memory_rows(asked))
    assert [row[0] for row in rows] == ["model", "rollout GPU", "", "training GPU"]
    rows = list(report.split_rows(asked))
    assert [row[0] for row in rows[1:]] == ["1 + 2", "2 + 1"]
    assert [row[-1] for row in rows].count("<- take this, once it fits") == 1
    assert [row[0] for row in report.scale_rows(asked, 2, 4)] == ["GPUs", "2", "4"]
    assert report.parse_range("8..512") == (8, 512)
    for bad in ("8", "8..", "1..4", "9..8", "x..y"):
        with pytest.raises(RecipeError, match="--gpus"):
            report.parse_range(bad)


def test_the_balance_names_the_bottleneck_and_what_would_help() -> None:
    found = Balance(rollout=4, train=4, rollout_idle=0.0, train_idle=0.41)
    assert found.sentence().startswith(
        "generation-bound: trainers idle 41%, one GPU more for rollout would give +25%"
    )
    assert found.best() == (5, 3) and "5 + 3 would give +25%" in found.sentence()
    other = Balance(rollout=1, train=1, rollout_idle=0.6, train_idle=0.0)
    assert other.sentence("process") == (
        "training-bound: engines idle 60%, one process more for training would give +100%"
    )
    assert Balance(2, 2, 0.01, 0.02).sentence() == "balanced: engines idle 1%, trainers 2%"
    waits = Balance(1, 1, 0.3, 0.7).sentence("process", is_synchronous=True)
    assert waits.startswith("synchronous: engines idle 30%, trainers 70%; buffer.max_staleness = 1")
    assert Balance(2, 6, 0.5, 0.0).best([(2, 6), (4, 4)]) == (2, 6)
    assert Balance(4, 4, 0.0, 0.6).best([(2, 6), (4, 4)]) == (4, 4)


def test_the_balance_of_a_run_weighs_steps_by_their_time_and_leaves_the_first_out() -> None:
    lines = [
        {"seconds": 100.0, "rollout/idle_frac": 1.0, "train/idle_frac": 1.0},
        {"seconds": 101.0, "rollout/idle_frac": 0.0, "train/idle_frac": 0.8},
        {"seconds": 104.0, "rollout/idle_frac": 0.0, "train/idle_frac": 0.4},
    ]
    assert balance(lines, 1, 1) == Balance(1, 1, 0.0, pytest.approx(0.5))
    assert balance(lines[:1], 1, 1) is None
    before = {**lines[1], "rollout/devices": 2, "train/devices": 1}  # before it was split anew
    assert balance([before, before, *lines], 1, 1) == balance(lines, 1, 1)
