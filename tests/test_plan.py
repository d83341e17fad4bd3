"""The plan: memory that adds up, shapes that are right, splits, the paper, and a run's balance."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minirl.balance import measured, sentence
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import build
from minirl.tools import plan as tool
from minirl.tools.plan import GIB, GPUS, SHAPES, Plan, recommended, shape_of, splits
from tests.docs import plan as paper


def config(model: str = "Qwen3-0.6B", split: tuple[int, int] = (1, 1), **train: Any) -> Config:
    values = {"model.path": model, "model.dtype": "bfloat16", "rollout.max_new_tokens": 1024}
    values |= {"devices.rollout": split[0], "devices.train": split[1]}
    return build(values | {f"train.{name}": value for name, value in train.items()})


def plan(own: Config, gpu: str = "H100", gib: float = 0, mean: float | None = None) -> Plan:
    kind = GPUS[gpu]._replace(memory_gib=gib or GPUS[gpu].memory_gib)
    return Plan(own, kind, tool.usual_lengths(own, mean))


def test_shapes_have_the_published_number_of_parameters() -> None:
    billions = {"Qwen2.5-1.5B": 1.544, "Qwen2.5-7B": 7.616, "Qwen3-0.6B": 0.596}
    billions |= {"Qwen3-8B": 8.191, "DeepSeek-R1-Distill-Qwen-1.5B": 1.777, "tiny": 0.000345}
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


def test_a_rollout_gpu_has_what_is_left_for_kv() -> None:
    own = plan(config("Qwen2.5-1.5B"), mean=100)
    bill = own.rollout_bill
    assert not bill.remedy and sum(bill.items.values()) == pytest.approx(bill.available)
    assert own.engine_bytes[1] == 2 * 2 * 28 * 2 * 128  # K and V, layers, heads, head_dim
    assert own.max_running == 256  # rollout.max_num_seqs
    too_big = plan(config("Qwen2.5-7B"), gib=15)
    assert "devices.tensor_parallel" in too_big.rollout_bill.remedy and not too_big.fits
    taken = (bill.items["weights"] + bill.items["engine"]) / own.config.rollout.memory_fraction
    remedy = plan(own.config, gib=taken / GIB + 0.01).rollout_bill.remedy
    assert remedy.startswith("lower rollout.max_new_tokens: one answer needs 1,280 tokens")


def test_a_training_gpu_holds_what_the_algorithm_needs() -> None:
    shape = SHAPES["Qwen3-0.6B"]
    num, adapted = shape.num_parameters, shape.num_adapted(16)
    plain = plan(config()).train_bill.items
    assert plain["weights"] + plain["gradients"] + plain["optimizer"] == 16 * num
    assert not plain.keys() & {"DDP buckets", "critic", "reference"}
    assert adapted < 0.02 * num
    for num_ranks, given, item, expected in (
        (2, {}, "DDP buckets", 4 * num),
        (1, {"kl_coef": 0.1}, "reference", 4 * num),
        (1, {"estimator": "gae"}, "critic", 16 * num),
        (4, {"shard_optimizer": True}, "optimizer", 2 * num),
        (1, {"lora_rank": 16}, "weights", 4 * num),
        (1, {"lora_rank": 16}, "gradients", 4 * adapted),
    ):
        own = config(split=(1, num_ranks), **given)
        assert plan(own).train_bill.items[item] == expected, item


def test_the_remedy_of_a_training_gpu_is_one_that_helps() -> None:
    def remedy(gpu: str = "4090", gib: float = 0, **given: Any) -> str:
        return plan(config(**given), gpu, gib).train_bill.remedy

    lower = remedy(max_tokens=16384)
    assert lower.startswith("lower train.max_tokens to ")
    tokens = int(lower.rpartition(" ")[2].replace(",", ""))
    assert not remedy(max_tokens=tokens) and remedy(max_tokens=tokens + 1024)
    # Where one change is not enough, all that are needed come at once.
    two = remedy(gib=13, split=(1, 2), max_tokens=16384)
    assert two.startswith("set train.gradient_checkpointing = true, set train.shard_optimizer")
    assert remedy("A100-40", model="Qwen2.5-7B").startswith("take a smaller model")


def test_splits_cover_the_box_and_the_recommended_is_the_fastest_or_as_good() -> None:
    own = plan(config(batch_size=4), mean=100)
    found = splits(own, 3)
    best = recommended(found)
    assert best.outcome.tokens_per_s >= 0.98 * max(s.outcome.tokens_per_s for s in found)
    _, rows = tool.tables(own, 3)
    assert [row[0] for row in rows] == ["split", "1 + 2", "2 + 1"]


def test_auto_takes_the_planned_split() -> None:
    own = config(split=(7, 1), batch_size=8, num_minibatches=1)
    assert tool.with_auto_split(own, None) == own, "a device that is not in the table"
    planned = tool.with_auto_split(own, tool.recognise("NVIDIA H100 80GB HBM3", 79.6 * GIB))
    assert planned == recommended(splits(plan(own), 8)).config != own
    assert tool.with_auto_split(planned, GPUS["H100"]) == planned, "a resumed run keeps its split"


def test_the_simulator_agrees_with_the_papers_table_7_and_figure_5c() -> None:
    rows = paper.table_7((0, 1, 2, 4, 8, 16))
    assert all(abs(row.error) <= 0.10 for row in rows if row.eta in paper.PAPER)
    rates = [row.simulated for row in rows]
    assert all(later >= 0.99 * rate for rate, later in pairwise(rates))
    assert rates[1] / rates[0] > 1.5 and rates[-1] / rates[1] < 1.15


def test_the_balance_names_the_bottleneck_and_what_would_help() -> None:
    assert sentence(config(split=(4, 4)), (0.0, 0.41)) == (
        "generation-bound: trainers idle 41%, one GPU more for rollout would give +25%"
    )
    assert sentence(config(), (0.6, 0.0), "process") == (
        "training-bound: engines idle 60%, one process more for training would give +100%"
    )
    assert sentence(config(), (0.01, 0.02)) == "balanced: engines idle 1%, trainers 2%"


def test_the_balance_of_a_run_weighs_steps_by_their_time_and_leaves_the_first_out() -> None:
    lines = [
        {"seconds": seconds, "rollout/idle_frac": engines, "train/idle_frac": trainers}
        for seconds, engines, trainers in ((100.0, 1.0, 1.0), (101.0, 0.0, 0.8), (104.0, 0.0, 0.4))
    ]
    found = measured(config(), lines, "GPU")
    assert found.startswith("generation-bound: trainers idle 50%, ")
    assert measured(config(), lines[:1], "GPU") == ""
    before = {**lines[1], "rollout/devices": 2, "train/devices": 1}  # resumed on other devices
    assert measured(config(), [before, before, *lines], "GPU") == found
