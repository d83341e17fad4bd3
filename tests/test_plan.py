"""The plan: memory that adds up, shapes that are right, splits, the paper, and a run's balance."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen3Config

from minirl.balance import measured, sentence
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import build, load
from minirl.tools import plan as tool
from minirl.tools.plan import GIB, GPUS, SHAPES, Plan, recommended, shape_of, splits
from tests.docs import plan as paper
from tests.fake_memory import peak_bytes

RECIPES = Path(__file__).parents[1] / "recipes"
HF_NAMES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings"),
)


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


def test_gpus_by_name_and_as_drivers_call_them() -> None:
    assert tool.gpu_for("h100", None) is GPUS["H100"]
    with pytest.raises(RecipeError, match="is not in the table"):
        tool.gpu_for("H1", None)
    for called, gib, name in (
        ("NVIDIA A100-SXM4-40GB", 39.5, "A100-40"),
        ("NVIDIA GeForce RTX 4090", 23.6, "4090"),
        ("NVIDIA L4", 22.5, "L4"),
        ("NVIDIA L40S", 45, "L40S"),
        ("NVIDIA RTX A6000", 48, "A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 48, ""),
        ("NVIDIA GB10", 119.7, "GB10"),
        ("NVIDIA T4", 15, ""),
    ):
        assert tool.recognise(called, gib * GIB) is GPUS.get(name)


def test_a_rollout_gpu_has_what_is_left_for_kv() -> None:
    own = plan(config("Qwen2.5-1.5B"), mean=100)
    bill = own.rollout_bill
    assert bill.fits and sum(bill.items.values()) == pytest.approx(bill.available)
    assert own.engine_bytes[1] == 2 * 2 * 28 * 2 * 128  # K and V, layers, heads, head_dim
    assert own.max_running == 256  # rollout.max_num_seqs
    taken = (bill.items["weights"] + bill.items["engine"]) / own.config.rollout.memory_fraction
    assert not plan(own.config, gib=taken / GIB + 0.01).rollout_bill.fits, "one answer's KV"
    too_big = plan(config("Qwen2.5-7B", split=(2, 2)), gib=15)
    assert not too_big.rollout_bill.fits and too_big.mended.rollout_bill.fits
    assert too_big.mended.config.devices.tensor_parallel == 2


def test_a_training_gpu_holds_what_the_algorithm_needs() -> None:
    shape = SHAPES["Qwen3-0.6B"]
    num, adapted = shape.num_parameters, shape.num_adapted(16)
    plain = plan(config()).train_bill.items
    assert plain["weights"] + plain["gradients"] + plain["optimizer"] == 16 * num
    assert not plain.keys() & {"critic", "reference"}
    assert adapted < 0.02 * num
    for num_ranks, given, item, expected in (
        (1, {"kl_coef": 0.1}, "reference", 4 * num),
        (1, {"estimator": "gae"}, "critic", 16 * num),
        (4, {"shard": "optimizer"}, "optimizer", 2 * num),
        (1, {"lora_rank": 16}, "weights", 4 * num),
        (1, {"lora_rank": 16}, "gradients", 4 * adapted),
    ):
        own = config(split=(1, num_ranks), **given)
        assert plan(own).train_bill.items[item] == expected, item


GPU_RECIPES = {"gsm8k": "H100", "gsm8k-2gpu": "4090", "smoke-gpu": "4090"}


@pytest.mark.parametrize("recipe", GPU_RECIPES)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_bill_is_what_fake_tensors_count_and_recipes_fit_with_room(
    recipe: str, is_checkpointed: bool
) -> None:
    text = f"train.gradient_checkpointing={str(is_checkpointed).lower()}"
    own = plan(load(RECIPES / f"{recipe}.toml", [text]).config, GPU_RECIPES[recipe])
    shape, billed = own.shape, own.train_bill.items
    kind = Qwen3Config if shape.norms_heads else Qwen2Config
    sizes = kind(
        **dict(zip(HF_NAMES, shape[:-1], strict=True)), max_position_embeddings=4096, pad_token_id=0
    )
    counted = peak_bytes(own.config, sizes)
    total = sum(billed.values()) - sum(tool.LIBRARIES.values())
    near = 0.05 * counted if recipe != "smoke-gpu" else 0.1 * GIB  # 0.3 GiB in all
    assert total == pytest.approx(counted, abs=near)
    assert counted + 3 * GIB < own.gpu.memory_gib * GIB and own.fits


def test_one_set_of_changes_fits_with_no_more_of_them_than_it_takes() -> None:
    def changes(gpu: str = "4090", gib: float = 0, **given: Any) -> list[str]:
        own = plan(config(**given), gpu, gib)
        return own.mended.changes_from(own.config) if own.mended.fits else ["nothing fits"]

    (lower,) = changes(max_tokens=16384)
    tokens = int(lower.removeprefix("--set train.max_tokens="))
    assert not changes(max_tokens=tokens) and changes(max_tokens=tokens + 1024)
    two = changes(gib=13, split=(1, 2), max_tokens=16384)
    assert two[1:] == [
        "--set train.gradient_checkpointing=true",
        '--set train.shard="optimizer"',
    ]
    assert changes("A100-40", model="Qwen2.5-7B") == ["nothing fits"]


def test_splits_cover_the_box_and_the_recommended_is_the_fastest_or_as_good() -> None:
    own = plan(config(batch_size=4), mean=100)
    found = splits(own, 3)
    best = recommended(found)
    assert best.outcome.tokens_per_s >= 0.98 * max(s.outcome.tokens_per_s for s in found)
    is_fitting, (memory, rows) = tool.tables(own, 3, price=2.0)
    names = ["model", "rollout GPU", "training GPU", "at once", "time"]
    assert is_fitting and [row[0] for row in memory] == names
    low, high = (share * best.hours for share in tool.TRUST)
    assert f"about {best.hours:.2g} hours ({low:.2g} to {high:.2g})" in memory[-1][1]
    assert f"for {best.hours * 3 * 2:,.2f} ({low * 6:,.2f} to {high * 6:,.2f})" in memory[-1][1]
    assert [row[0] for row in rows] == ["split", "1 + 2", "2 + 1"]
    (advice,) = [row[-1] for row in rows if row[-1].startswith("<-")]
    assert advice.startswith("<- take this; ") and "-bound: " in advice


def test_nothing_is_recommended_that_does_not_fit() -> None:
    own = plan(config(batch_size=4, max_tokens=16384), "4090", mean=100)
    is_fitting, (memory, rows) = tool.tables(own, 3)
    (change,) = [row[1] for row in memory if row[0] == "to change"]
    (taken,) = [row for row in rows if row[-1].startswith("<- take this, with these changes")]
    given = [part for part in change.split() if part != "--set"]
    values = dict(part.split("=") for part in given)
    mended = own.changed("train", max_tokens=int(values["train.max_tokens"]))
    rollout, train = (int(n) for n in taken[0].split(" + "))
    assert not is_fitting and mended.changed("devices", rollout=rollout, train=train).fits
    huge = tool.tables(plan(config("Qwen2.5-7B", batch_size=4), "4090"), 3)
    assert not huge[0] and len(huge[1]) == 1 and huge[1][0][-1][1].startswith("no set of changes")


def test_a_measured_gpu_takes_the_place_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    kind = GPUS["4090"]._replace(memory_gib=20.0, train_speed=0.5)
    file.write_text(json.dumps({"plan": kind._asdict()}))
    assert tool.gpu_for("", file) == kind and tool.gpu_for("H200", file) == GPUS["H200"]
    slow, fast = (Plan(config(), gpu, tool.usual_lengths(config())) for gpu in (kind, GPUS["4090"]))
    assert slow.train_tokens_per_s == pytest.approx(fast.train_tokens_per_s / 2)
    for broken in ("{}", "[]", "no", '{"plan": {"memory_gib": 1}}'):
        file.write_text(broken)
        with pytest.raises(RecipeError, match="holds no measured GPU"):
            tool.gpu_for("", file)


def test_the_disk_that_checkpoints_take() -> None:
    num = SHAPES["Qwen3-0.6B"].num_parameters
    assert tool.checkpoint_bytes(config()) == 4 * 14 * num  # two, the best, and the next
    assert tool.checkpoint_bytes(config(estimator="gae")) == 4 * 26 * num
    assert 4 * 2 * num < tool.checkpoint_bytes(config(lora_rank=8)) < 4 * 2.5 * num


def test_a_split_whose_optimizer_does_not_fit_is_not_taken() -> None:
    sharded = {"shard": "optimizer", "gradient_checkpointing": True, "max_tokens": 32768}
    own = config("Qwen2.5-1.5B", batch_size=8, **sharded)
    six = plan(own, mean=100).changed("devices", train=6).train_bill
    gib = sum(six.items.values()) / GIB + 0.01
    found = splits(plan(own, "A100-40", gib, 100), 8)
    # Each holds more of the optimizer the fewer they are, and training that is quick wants few.
    assert {s.config.devices.train for s in found if s.fits} == {6, 7}
    assert recommended(found).fits
    assert recommended(splits(plan(own, "A100-40", 80, 100), 8)).config.devices.train < 6


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
    assert all(rates[-1] / paper.PAPER[eta] > tool.TRUST[0] for eta in paper.PAPER)


def test_planned_training_lies_near_prime_rls_published_rates() -> None:
    errors = {row.case: row.error for row in paper.prime_rl()}
    assert all(-0.15 < error < tool.TRUST[1] - 0.98 for error in errors.values()), errors
    long = [error for case, error in errors.items() if case[-1] == 65_536]
    assert max(map(abs, long)) < 0.15


def test_the_balance_names_the_bottleneck_and_what_would_help() -> None:
    assert sentence(config(split=(4, 4)), (0.0, 0.41)) == (
        "generation-bound: trainers idle 41%, one GPU more for rollout would give +25%"
    )
    assert sentence(config(), (0.6, 0.0), "process") == (
        "training-bound: engines idle 60%, one process more for training would give +100%"
    )
    assert sentence(config(), (0.6, 0.0), "") == "training-bound: engines idle 60%"  # no room
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
