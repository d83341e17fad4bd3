"""The plan: memory, shapes, splits, published figures; a run's balance; the simulator."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

from minirl import devices
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.launch import Job
from minirl.metrics import balance, measured_balance
from minirl.recipe import build, load
from minirl.tools import plan as tool
from minirl.tools.plan import GIB, GPUS, SHAPES, Plan, recommended, shape_of, splits
from minirl.tools.simulate import Costs, Lengths, SimulatedEngine, Simulation
from minirl.train.packing import Unit
from tests.bench.shard import HF_NAMES, counted_bytes
from tests.docs import plan as paper
from tests.fake_memory import peak_bytes

RECIPES = Path(__file__).parents[1] / "recipes"


def config(model: str = "Qwen3-0.6B", split: tuple[int, int] = (1, 1), **train: Any) -> Config:
    values = {"model.path": model, "model.dtype": "bfloat16", "rollout.max_new_tokens": 1024}
    values |= {"devices.rollout": split[0], "devices.train": split[1]}
    return build(values | {f"train.{name}": value for name, value in train.items()})


def plan(own: Config, gpu: str = "H100", gib: float = 0, mean: float | None = None) -> Plan:
    kind = GPUS[gpu]._replace(memory_gib=gib or GPUS[gpu].memory_gib)
    return Plan(own, kind, tool.usual_lengths(own, mean))


def test_shapes_are_the_published_ones_and_those_of_a_folder(tmp_path: Path) -> None:
    billions = {"Qwen2.5-1.5B": 1.544, "Qwen2.5-7B": 7.616, "Qwen3-0.6B": 0.596}
    billions |= {"Qwen3-8B": 8.191, "DeepSeek-R1-Distill-Qwen-1.5B": 1.777, "tiny": 0.000345}
    found = {name: SHAPES[name].num_parameters / 1e9 for name in billions}
    assert found == pytest.approx(billions, rel=0.005)
    assert shape_of(config("Qwen/Qwen2.5-1.5B-Instruct")) == SHAPES["Qwen2.5-1.5B"]
    with pytest.raises(RecipeError, match="neither on this machine nor in the table"):
        shape_of(config("someone/else-3B"))
    names = (*HF_NAMES[:3], *HF_NAMES[5:7])
    sizes = json.dumps(dict(zip(names, (2, 64, 4, 128, 100), strict=True)))
    (tmp_path / "config.json").write_text(sizes)
    assert shape_of(config(str(tmp_path))) == (2, 64, 4, 4, 16, 128, 100, False, False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="no usable sizes"):
        shape_of(config(str(tmp_path)))


def test_gpus_by_name_as_drivers_call_them_and_as_measured(here: Path) -> None:
    assert tool.gpu_for("h100") is GPUS["H100"]
    with pytest.raises(RecipeError, match="is not in the table"):
        tool.gpu_for("H1")
    for called, gib, name in (case.values() for case in cases("gpu_names")):
        assert tool.recognise(f"NVIDIA {called}", gib * GIB) is GPUS.get(name)
    file, kind = here / "gpu.json", GPUS["4090"]._replace(memory_gib=20.0)
    kind = kind._replace(train_speed=0.5, decode_speed=0.25)
    file.write_text(json.dumps({"plan": kind._asdict()}))
    assert tool.gpu_for("") == kind and tool.gpu_for("H200") == GPUS["H200"]
    slow, fast = (replace(plan(config()), gpu=gpu).costs for gpu in (kind, GPUS["4090"]))
    assert slow.train_per_token == pytest.approx(2 * fast.train_per_token)
    assert slow.step + slow.step_per_seq == pytest.approx(4 * (fast.step + fast.step_per_seq))
    for broken in ("{}", "[]", "no", '{"plan": {"memory_gib": 1}}'):
        file.write_text(broken)
        with pytest.raises(RecipeError, match="holds no measured GPU"):
            tool.gpu_for("")


def test_a_rollout_gpu_has_what_is_left_for_kv() -> None:
    own = plan(config("Qwen2.5-1.5B"), mean=100)
    bill = own.bills[0]
    assert bill.fits and sum(bill.items.values()) == pytest.approx(bill.available)
    assert own.engine_bytes[1] == 2 * 2 * 28 * 2 * 128  # K and V, layers, heads, head_dim
    taken = (bill.items["weights"] + bill.items["engine"]) / own.config.rollout.memory_fraction
    assert not plan(own.config, gib=taken / GIB + 0.01).bills[0].fits, "one answer's KV"


def test_a_training_gpu_holds_what_the_algorithm_needs() -> None:
    num, adapted = SHAPES["Qwen3-0.6B"].num_parameters, 28 * 16 * (7 * 1024 + 2 * 3072 + 3 * 3072)
    plain = plan(config()).bills[1].items
    assert plain["weights"] + plain["gradients"] + plain["optimizer"] == 16 * num
    assert not plain.keys() & {"critic", "reference"}
    for num_ranks, given, item, expected in (
        (1, {"kl_coef": 0.1}, "reference", 4 * num),
        (1, {"estimator": "gae"}, "critic", 12 * num),
        (1, {"estimator": "gae"}, "gradients", 8 * num),
        (4, {"shard": "optimizer"}, "optimizer", 2 * num),
        (4, {"shard": "full"}, "weights", num),
        (4, {"shard": "full", "kl_coef": 0.1}, "reference", num),
        (4, {"shard": "full", "optimizer": "adamw8bit"}, "optimizer", num / 2),
        (1, {"lora_rank": 16}, "weights", 2 * num + 4 * adapted),
        (1, {"lora_rank": 16}, "gradients", 4 * adapted),
    ):
        own = config(split=(1, num_ranks), **given)
        assert plan(own).bills[1].items[item] == expected, item
    assert tool.checkpoint_bytes(config()) == 4 * 14 * num  # two, the best, and the next
    assert tool.checkpoint_bytes(config(estimator="gae")) == 4 * 26 * num
    assert 4 * 2 * num < tool.checkpoint_bytes(config(lora_rank=8)) < 4 * 2.5 * num


GPU_RECIPES = {"gsm8k": "H100", "gsm8k-2gpu": "4090", "gsm8k-1gpu": "4090", "smoke-gpu": "4090"}
GPU_RECIPES["gsm8k-2gpu train.lora_rank=32"] = "4090"


def sizes_of(shape: tool.Shape) -> PretrainedConfig:
    sizes = dict(zip(HF_NAMES, shape[:-1], strict=True))
    kind = Qwen3Config if shape.norms_heads else Qwen2Config
    return kind(**sizes, max_position_embeddings=4096, pad_token_id=0)


@pytest.mark.parametrize("recipe", GPU_RECIPES)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_bill_is_what_fake_tensors_count(recipe: str, is_checkpointed: bool) -> None:
    """And recipes fit with room."""
    text, (name, *more) = str(is_checkpointed).lower(), recipe.split()
    given = [f"train.gradient_checkpointing={text}", *more]
    own = plan(load(RECIPES / f"{name}.toml", given).config, GPU_RECIPES[recipe])
    model, num = sizes_of(own.shape), own.config.rollout.group_size
    counted = peak_bytes(own.config, model)
    total = sum(own.bills[1].items.values()) - sum(tool.LIBRARIES.values())
    near = 0.05 * counted if recipe != "smoke-gpu" else 0.1 * GIB  # 0.3 GiB in all
    assert total == pytest.approx(counted, abs=near)
    if recipe == "gsm8k":  # prompts that are trained once
        group = Unit([*range(num)], own.lengths.prompt, [256] * num)
        units = [group] * (own.config.train.max_tokens // group.size)
        assert total == pytest.approx(peak_bytes(own.config, model, units), rel=0.05)
    assert counted + 3 * GIB < own.gpu.memory_gib * GIB
    assert own.fits or (recipe == "gsm8k-1gpu" and not is_checkpointed)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("Qwen2.5-7B", 4), pytest.param("Qwen3-14B", 6, marks=pytest.mark.slow)],
)
def test_the_bill_of_slices_is_what_fake_tensors_count(name: str, num_ranks: int) -> None:
    sliced = {"shard": "full", "gradient_checkpointing": True, "max_tokens": 4096}
    own = plan(config(name, (1, num_ranks), **sliced))
    total = sum(own.bills[1].items.values()) - sum(tool.LIBRARIES.values())
    assert total == pytest.approx(counted_bytes(own.config, sizes_of(own.shape)), rel=0.05)


def test_one_set_of_changes_fits_with_no_more_of_them_than_it_takes() -> None:
    def changes(gpu: str = "4090", gib: float = 0, **given: Any) -> list[str]:
        own = plan(config(**given), gpu, gib)
        found = tool.fitting([own])
        return found[0].changes_from(own.config) if found else ["nothing fits"]

    assert changes(max_tokens=16384) == ["train.max_tokens=4096"]
    assert not changes(max_tokens=4096) and changes(max_tokens=8192)
    two = changes(gib=13, split=(1, 2), max_tokens=16384)
    assert two[1:] == ["train.gradient_checkpointing=true", 'train.shard="optimizer"']
    full = {"model": "Qwen2.5-7B", "max_tokens": 4096}
    for model, split in (("Qwen2.5-7B", (4, 4)), ("Qwen3-14B", (2, 6))):
        given = full | {"model": model, "split": split}
        assert changes("H100", **given, gradient_checkpointing=True) == ['train.shard="full"']
    assert changes("A100-40", **full)[-1] == "train.lora_rank=32"
    assert "devices.tensor_parallel=2" in changes("H100", 15, **full, split=(2, 2))
    assert changes("4090", **full | {"model": "Qwen2.5-14B"}) == ["nothing fits"]


def test_one_gpu_pays_both_bills_or_the_larger_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    both = plan(load(RECIPES / "gsm8k-1gpu.toml").config, "4090")
    memory, (engine, rank) = both.gpu.memory_gib * GIB, both.bills
    assert rank.available == pytest.approx(memory - sum(engine.items.values()))
    assert engine.available == pytest.approx(memory - sum(rank.items.values()))
    in_turns = both.changed({"buffer.max_staleness": 0}).bills
    assert in_turns[1].available == memory - engine.items["engine"]
    freed = rank.items["gradients"] + rank.items["micro-batch"]
    assert in_turns[0].available == pytest.approx(engine.available + freed)
    is_fitting, (_, (_, row), cards) = tool.tables(both, 1)
    assert is_fitting and "both on the same GPU" in row[-1]
    best = [row[2] for row in cards if row[0] == "24 GB"]
    assert best == ["Qwen3-1.7B", "Qwen3-4B"], "full, LoRA"
    large = plan(config("Qwen2.5-1.5B", max_tokens=4096), "4090")
    changes = tool.tables(large, 1)[1][0][3][1]
    assert "devices.share=true" in changes and "buffer.max_staleness=0" in changes
    sliced = plan(config("Qwen2.5-1.5B", max_tokens=4096, shard="full", split=(1, 4)), "4090")
    assert 'train.shard="none"' in tool.tables(sliced, 1)[1][0][3][1]
    monkeypatch.setattr(tool, "CARDS", {"2": 1.9})
    assert len(tool.cards(large)) == 1, "nothing fits"


def test_training_counts_shared_prompts_once_and_gathers_what_fsdp2_slices() -> None:
    own = plan(config(split=(1, 2), max_tokens=16384))
    short = replace(own, lengths=Lengths((400,), 2))
    alone = paper.PlanApart(own.config, own.gpu, own.lengths)
    assert [p.costs.prompts_per_answer for p in (own, short, alone)] == [1 / 8, 1, 1]
    assert alone.outcome.tokens_per_s < own.outcome.tokens_per_s
    moved_s = 8 * own.shape.num_parameters / 450e9  # two gathers in bfloat16, one sum in float32
    for num in (8192, 16384):
        ddp, full = (
            own.changed({"train.max_tokens": num, "train.shard": shard}).costs
            for shard in ("none", "full")
        )
        assert ddp.train - full.train == pytest.approx(moved_s), "DDP sums once per step"
        each = full.train_per_token - ddp.train_per_token
        assert each == pytest.approx(moved_s / num / 2), "of two ranks"


def test_splits_cover_the_box_and_the_recommended_is_the_fastest() -> None:
    own = plan(config(batch_size=4), mean=100)
    best = recommended(found := splits(own, 3))
    assert best.outcome.tokens_per_s == max(s.outcome.tokens_per_s for s in found)
    is_fitting, (memory, rows) = tool.tables(own, 3, price=2.0)
    assert is_fitting and [row[0] for row in memory[1:]] == ["rollout GPU", "training GPU", "time"]
    hours, (low, high) = best.hours, (share * best.hours for share in tool.TRUST)
    time = f"about {hours:.2g} hours ({low:.2g} to {high:.2g}), "
    assert f"{time}for {hours * 6:,.2f} ({low * 6:,.2f} to {high * 6:,.2f}) at 2" in memory[-1][1]
    assert [row[0] for row in rows] == ["split", "1 + 2", "2 + 1"]
    (advice,) = [row[-1] for row in rows if row[-1].startswith("<- take this; ")]
    assert "-bound: " in advice
    own = own.changed({"devices.nodes": 4, "devices.rollout": 7})
    best = recommended(splits(own, 8))
    num_gpus, time = 8 + 3 * best.config.devices.rollout, tool.tables(own, 8, price=1.0)[1][0][-1]
    assert f", for {best.hours * num_gpus:,.2f} (" in time[1] and best.config.devices.rollout < 7


def test_nothing_is_recommended_that_does_not_fit() -> None:
    own = plan(config(batch_size=4, max_tokens=16384), "4090", mean=100)
    is_fitting, (memory, rows) = tool.tables(own, 3)
    (change,) = [row[1] for row in memory if row[0] == "to change"]
    (taken,) = [row for row in rows if row[-1].startswith("<- take this, with these changes")]
    values = dict(part.split("=") for part in change.split() if part != "--set")
    mended = own.changed({key: int(value) for key, value in values.items()})
    assert not is_fitting and mended.fits and mended.row[0] == taken[0]
    huge = tool.tables(plan(config("Qwen2.5-14B", batch_size=4), "4090"), 3)
    assert not huge[0] and len(huge[1]) == 1 and huge[1][0][-1][1].startswith("no set of changes")
    sharded = {"shard": "optimizer", "gradient_checkpointing": True, "max_tokens": 32768}
    own = plan(config("Qwen2.5-1.5B", batch_size=8, **sharded), "A100-40", 80, mean=100)
    gib = sum(own.changed({"devices.train": 6}).bills[1].items.values()) / GIB + 0.01
    found = splits(plan(own.config, "A100-40", gib, 100), 8)
    # Each holds more of the optimizer the fewer they are, and training that is quick wants few.
    assert {s.config.devices.train for s in found if s.fits} == {6, 7}
    assert recommended(found).fits and recommended(splits(own, 8)).config.devices.train < 6


def test_auto_takes_the_planned_split(monkeypatch: pytest.MonkeyPatch) -> None:
    own = plan(config(split=(7, 1), batch_size=8)).changed({"devices.split": "auto"})
    planned = recommended(splits(own, 8)).config
    monkeypatch.setattr(devices, "find_devices", lambda kind: ("cuda", 8))
    for name, given in (("X1", own.config), ("H100", own.config), ("H100", planned)):
        gpu = devices.Gpu(f"NVIDIA {name}", int(79.6 * GIB), (9, 0))
        monkeypatch.setattr(devices, "gpus", lambda gpu=gpu: [gpu])
        expected = planned if name in GPUS else own.config
        assert Job(given, Path(), Path()).config == expected, "resumed or not"
    assert planned != own.config
    monkeypatch.setattr(devices, "find_devices", lambda kind: ("cuda", 1))
    monkeypatch.setattr(devices, "gpus", lambda: [devices.Gpu("RTX 4090", int(24 * GIB), (8, 9))])
    with pytest.raises(RecipeError, match=r"do not fit 23\.6 GiB; .*--set train\.max_tokens=2048"):
        Job(load(RECIPES / "gsm8k-2gpu.toml").config, Path(), Path())
    tool.check_shared(config("someone/else-3B"), GPUS["4090"])  # of unknown size


def test_the_plan_agrees_with_the_papers_table_7_and_figure_5c_and_with_prime_rl() -> None:
    rates = {eta: paper.tokens_per_s(eta) for eta in (0, 1, 2, 4, 8, 16)}
    for eta, published in paper.PAPER.items():
        assert rates[eta] / rates[0] == pytest.approx(published / paper.PAPER[0], rel=0.1)
        assert rates[16] / published > tool.TRUST[0]
    assert all(later >= 0.99 * rate for rate, later in pairwise(rates.values()))
    assert rates[1] / rates[0] > 1.5 and rates[16] / rates[1] < 1.15
    for case, error in paper.prime_rl_errors().items():
        assert -0.15 < error < (0.15 if case[-1] == 65_536 else tool.TRUST[1] - 0.98), case
    assert paper.memory_table() in (RECIPES.parent / "docs/planning.md").read_text()


def test_the_balance_names_the_bottleneck_and_what_would_help() -> None:
    assert balance(config(split=(4, 4)), (0.0, 0.41)) == (
        "generation-bound: trainers idle 41%, one GPU more for rollout would give +25%"
    )
    held_back = "admission control holds the engines back"
    assert balance(config(), (0.98, 0.0), "cores", is_held=True, rate=300) == (
        f"training-bound: engines idle 98%, {held_back}; all cores in turn "
        "(devices.share, max_staleness 0) would give +47%"
    )
    assert held_back not in balance(config(), (0.0, 0.9), is_held=True)
    assert balance(config(), (0.6, 0.0), "cores") == "training-bound: engines idle 60%"
    assert balance(config(), (0.6, 0.0), "") == "training-bound: engines idle 60%"  # no room
    assert balance(config(), (0.01, 0.02)) == "balanced: engines idle 1%, trainers 2%"
    # Of a run: steps weigh by their time, and the first is left out.
    names, steps = ("seconds", "rollout/idle_frac", "train/idle_frac"), [(100.0, 1.0, 1.0)]
    steps += [(101.0, 0.0, 0.8), (104.0, 0.0, 0.4)]
    lines = [dict(zip(names, step, strict=True)) for step in steps]
    found = measured_balance(config(), lines, "GPU")
    assert found.startswith("generation-bound: trainers idle 50%, ")
    assert measured_balance(config(), lines[:1], "GPU") == ""
    for rate, is_advised in ((300.0, True), (9000.0, False)):
        waits = {"rollout/idle_frac": 0.9, "train/tokens_per_s": rate}
        own = [{"seconds": float(i), **waits} for i in range(3)]
        assert ("all cores in turn" in measured_balance(config(), own, "cores")) == is_advised
    before = {**lines[1], "rollout/devices": 2, "train/devices": 1}  # resumed on other devices
    assert measured_balance(config(), [before, before, *lines], "GPU") == found


def test_a_step_gives_every_running_sequence_a_token() -> None:
    slow = Costs(1.0, step_per_seq=0.5, prefill=0.1)
    for costs, max_running, lengths, expected in (
        (Costs(step=1.0), 8, (3, 5, 5, 9), [(3.0, 0), (5.0, 1), (5.0, 2), (9.0, 3)]),
        (Costs(step=1.0), 1, (3, 5), [(3.0, 0), (8.0, 1)]),  # the others wait
        (slow, 8, (4, 8), [(8.2, 0), (8.2 + 4 * 1.5, 1)]),
    ):
        engine, found = SimulatedEngine(costs, max_running), []
        engine.submit(enumerate(lengths), now=1.0)
        while (at := engine.next_end_s) < math.inf:
            found += [(round(at - 1.0, 6), group_id) for group_id, _ in engine.take_done(at)]
        engine.advance(engine.now + 2.0)
        assert found == expected and engine.idle_s == pytest.approx(1.0 + 2.0)


def test_synchronous_is_the_sum_and_asynchronous_the_slower_of_the_two() -> None:
    # 16 sequences at once: 100 s for a batch, whose trajectories have 100 tokens each.
    for train_s, eta, batch_s in ((50, 0, 150), (50, 2, 100), (300, 2, 300)):
        values = {"buffer.max_staleness": eta, "buffer.target_staleness": eta}
        values |= {"devices.rollout": 2, "rollout.group_size": 2, "train.batch_size": 8}
        costs, lengths = Costs(step=1.0, train=train_s), Lengths((100,), 10)
        outcome = Simulation(build(values), costs, lengths, max_running=8).run(60, num_warm=8)
        assert outcome.tokens_per_s == pytest.approx(8 * 2 * 100 / batch_s, rel=0.01 * eta)
        if not eta:
            idle = outcome.trainer_idle, outcome.engines_idle
            assert idle == pytest.approx((100 / 150, 50 / 150), abs=0.01)
