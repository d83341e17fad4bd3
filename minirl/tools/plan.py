"""What a recipe needs and what it would do, on GPUs that need not be here: `minirl plan`.

Takes a recipe, a kind of GPU and the lengths of answers; gives the memory bill of a rollout GPU and
of a training GPU (or of both pools on one), one set of changes that fits where the recipe does not,
every split of the GPUs, simulated, with the one to take, its hours and their cost. `devices.split =
"auto"` takes that split when a run starts. docs/planning.md says how far to trust it. Leaves out:
torch, and in the hours the start, evaluations and checkpoints.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from minirl.config import KEYS, Config, DevicesConfig, get
from minirl.devices import ENGINE_WORK_BYTES, LIBRARY_BYTES
from minirl.errors import MALFORMED, RecipeError, toml_value
from minirl.metrics import balance
from minirl.recipe import build, find_model, read_model_config, validate
from minirl.shm.weights import ITEM_BYTES
from minirl.tools.simulate import Costs, Lengths, Simulation, Throughput, long_tailed
from minirl.train.packing import Unit, cut

GIB = 2**30
LIBRARIES = {"libraries": LIBRARY_BYTES, "spare": 1.5 * GIB}  # spare: fragments of the allocator
LOGITS = 1024  # rows at once (train/policy.py)
# Shares of the data sheet's rates that are reached. Those of training lie between the trainers of
# two published tables, and STEP_S was fitted on one of them (tests/docs/plan.py); the others are
# round numbers.
MATMUL = 0.6  # of the compute rate, packed sequences
ELEMENTWISE = 0.5  # of the memory bandwidth
PREFILL = 0.5
DECODE = 0.75  # of the memory bandwidth
STEP_S = 0.007  # launches, scheduling and sampling of an engine step
STEP_PER_SEQ_S = 10e-6  # bookkeeping of one sequence in a step
TRUST = (0.6, 1.8)  # a run takes so many times the planned hours: the spread of those tables
MEASURED = Path("gpu.json")  # by `minirl doctor --gpu`
Table = list[tuple[str, ...]]


class GpuKind(NamedTuple):  # a row of plan.toml; the rest only `minirl doctor --gpu` can tell
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    link_gb_s: float
    host_gb_s: float = 20.0  # to and from shared memory
    train_speed: float = 1.0  # of training, over the planned
    decode_speed: float = 1.0


class Shape(NamedTuple):  # a row of plan.toml
    """A decoder of the Llama and Qwen kind: gated MLP, grouped-query attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool
    norms_heads: bool  # queries and keys, as Qwen3 does

    @property
    def widths(self) -> tuple[int, int, int]:
        """Values of a token in the residual stream, in queries and keys, in the MLP."""
        return self.hidden, (self.heads + self.kv_heads) * self.head_dim, self.intermediate

    @property
    def layer(self) -> int:
        """Values in the seven matrices of a layer; one side of each is the hidden size."""
        hidden, heads, mlp = self.widths
        return hidden * (2 * heads + 3 * mlp)

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.layers * (self.layer + 2 * self.hidden) + embeddings + self.hidden


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
GPUS = {name: GpuKind(*row) for name, row in TABLES["gpus"].items()}
SHAPES = {name: Shape(*row) for name, row in TABLES["shapes"].items()}
CARDS: dict[str, float] = TABLES["cards"]  # GiB that a process can have, by GB


def recognise(device_name: str, memory_bytes: float) -> GpuKind | None:
    """From what a driver calls it, such as "NVIDIA A100-SXM4-40GB"."""
    device_name = device_name.upper()
    named = [gpu for name, gpu in GPUS.items() if all(n in device_name for n in name.split("-"))]
    near = (gpu for gpu in named if abs(gpu.memory_gib * GIB / memory_bytes - 1) < 0.15)
    return next(near, None)


def shape_of(config: Config) -> Shape:
    """Of the recipe's model: from its folder or the local cache if it is there."""
    path, folder = config.model.path, find_model(config)
    if folder is None:
        name = f"{path.rpartition('/')[2]}-"  # Qwen2.5-1.5B-Instruct has the shape of Qwen2.5-1.5B
        if found := [shape for start, shape in SHAPES.items() if name.startswith(f"{start}-")]:
            return found[0]
        rule = "is neither on this machine nor in the table of shapes"
        remedy = f"give a folder with its config.json, or one of {', '.join(SHAPES)}"
        raise RecipeError("model.path", path, rule, remedy)
    values = read_model_config(config, folder)
    with suppress(KeyError, TypeError):
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        kv_heads = values.get("num_key_value_heads") or heads
        attention = (heads, kv_heads, values.get("head_dim") or hidden // heads)
        mlp, vocab = values["intermediate_size"], values["vocab_size"]
        is_tied = values.get("tie_word_embeddings", False)
        norms = str(values.get("model_type")).startswith(("qwen3", "gemma3", "olmo2", "olmo3"))
        return Shape(values["num_hidden_layers"], hidden, *attention, mlp, vocab, is_tied, norms)
    rule, remedy = "its config.json has no usable sizes", "plan knows Llama's and Qwen's kind"
    raise RecipeError("model.path", path, rule, remedy)


def rank_bytes(config: Config, shape: Shape) -> dict[str, float]:
    """What a training rank holds, a micro-batch and libraries apart. All in float32, but for what
    LoRA does not train and for AdamW's state in 8 bits."""
    train, num, part = config.train, shape.num_parameters, 1 / config.devices.train
    adapted = shape.layers * train.lora_rank * (7 * shape.hidden + shape.layer // shape.hidden)
    half, trained = ITEM_BYTES[config.model.dtype], adapted or num
    critic = num if train.estimator == "gae" else 0  # of the same size, and always trained whole
    is_full = train.shard == "full"
    held, slices = part if is_full else 1.0, 1.0 if train.shard == "none" else part
    state = slices * (2.0 if train.optimizer == "adamw8bit" else 8.0)
    items = {
        "weights": held * ((half if adapted else 4) * num + 4.0 * adapted),
        "gradients": held * 4.0 * (trained + critic),
        "optimizer": state * trained,
        # FSDP2 gathers the layer that runs and the next one, and the root: embeddings and head.
        "gathered": half * (num - (shape.layers - 2.0) * shape.layer) if is_full else 0.0,
        "critic": critic * (held * 4.0 + state),
        "reference": held * 4.0 * num if train.kl_coef else 0.0,
    }
    return {name: bytes_ for name, bytes_ in items.items() if bytes_}


def checkpoint_bytes(config: Config) -> float:
    """What the checkpoints of a run take on disk: those kept, the best, and one being written."""
    alone, shape = replace(config, devices=DevicesConfig()), shape_of(config)
    num, items = shape.num_parameters, rank_bytes(alone, shape)
    each = items["weights"] + items["optimizer"] + items.get("critic", 0.0)
    if config.model.dtype == "bfloat16" and not config.train.lora_rank:
        each += 2.0 * num  # the model, beside the float32 weights that are trained
    return (config.checkpoint.keep + 2) * each


class Bill(NamedTuple):  # of one GPU
    items: dict[str, float]  # bytes
    available: float
    fits: bool

    @property
    def row(self) -> tuple[str, str]:
        parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in self.items.items())
        total, available = sum(self.items.values()) / GIB, self.available / GIB
        return f"{parts} = {total:.1f} of {available:.1f} GiB", "ok" if self.fits else "TOO BIG"


def usual_lengths(config: Config, mean: float | None = None) -> Lengths:
    limit = config.rollout.max_new_tokens
    return long_tailed(mean or 0.4 * limit, limit, config.tasks.max_prompt_tokens // 2)


@dataclass(frozen=True)
class Plan:
    """A recipe on GPUs of one kind, with answers of these lengths."""

    config: Config
    gpu: GpuKind
    lengths: Lengths

    def changed(self, values: Mapping[str, Any]) -> "Plan":
        own = {key: get(self.config, key) for key in KEYS}
        return replace(self, config=build({**own, **values}))

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.config)

    @property
    def engine_bytes(self) -> tuple[float, float]:
        """The weights, and a token's KV: on each of the devices.tensor_parallel GPUs."""
        size = ITEM_BYTES[self.config.model.dtype] / self.config.devices.tensor_parallel
        kv_values = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim
        return size * self.shape.num_parameters, size * kv_values

    @cached_property
    def bills(self) -> tuple[Bill, Bill]:
        """Of a rollout GPU and of a training GPU. On a shared one each pool has what the other one
        leaves: in turns that is more, as each frees what it does not need meanwhile."""
        own, memory, (weights, kv_bytes) = self.config, self.gpu.memory_gib * GIB, self.engine_bytes
        rank = rank_bytes(own, self.shape) | LIBRARIES | {"micro-batch": self.micro_batch_bytes}
        for_engine, for_rank = own.rollout.memory_fraction * memory, memory
        kv = max(0.0, for_engine - weights - ENGINE_WORK_BYTES)
        if own.devices.share:
            kv = own.rollout.kv_cache_gib * GIB
            freed = ("gradients", "micro-batch") if own.takes_turns else ()
            for_engine = memory - sum(size for name, size in rank.items() if name not in freed)
            for_rank -= ENGINE_WORK_BYTES + (0.0 if own.takes_turns else weights + kv)
        engine = {"weights": weights, "engine": ENGINE_WORK_BYTES, "KV cache": kv}
        room, rank_fits = for_engine - weights - ENGINE_WORK_BYTES, sum(rank.values()) <= for_rank
        engine_fits = kv_bytes * own.max_tokens_per_trajectory <= kv <= room
        return Bill(engine, for_engine, engine_fits), Bill(rank, for_rank, rank_fits)

    @property
    def micro_batch_bytes(self) -> float:
        """Where it takes the most memory. The residual stream and the norms are float32.
        tests/test_plan.py counts the same on fake tensors."""
        shape, train, size = self.shape, self.config.train, ITEM_BYTES[self.config.model.dtype]
        (hidden, heads, mlp), num, is_full = shape.widths, train.max_tokens, train.shard == "full"
        matrix = shape.vocab * hidden
        # In bfloat16 autocast copies what is held in float32; FSDP2 gathers it in bfloat16.
        is_copied = size == 2 and not is_full and not train.lora_rank
        copies = 2.0 * shape.layers * shape.layer if is_copied else 0.0
        logits = 6.0 * LOGITS * shape.vocab + (0.0 if is_full else 2.0 * matrix)
        d_head = 0.0 if train.lora_rank else 4.0 * matrix  # LoRA does not train it
        held = 0.5 * d_head if is_full and size == 2 else d_head  # as gathered
        kept_heads = (5 if shape.norms_heads else 2) * heads
        wide = 8.0 if train.lora_rank else 16.0  # norms that are not trained keep less
        layer = wide * hidden + size * (5 * hidden + kept_heads + 4 * mlp)
        if not train.gradient_checkpointing:
            return copies + logits + d_head + num * (layer * shape.layers + 15.0 * hidden)
        kept = 4.0 * hidden * shape.layers
        return max(
            copies + num * (kept + 8.0 * hidden + 3.0 * size * mlp),  # the last layer's forward
            logits + d_head + num * (kept + 15.0 * hidden),  # the head's backward
            held + num * (kept + layer + 8.0 * hidden + 2.0 * size * mlp),  # that layer's backward
        )

    @property
    def remedies(self) -> dict[str, list[Any]]:
        """Keys that make room, and their values, the recipe's own first. The last costs least."""
        longest, own = self.config.max_tokens_per_trajectory, self.config.rollout
        half, kv = self.config.train.max_tokens // 2, self.engine_bytes[1] * longest / GIB
        kv_sizes = own.kv_cache_gib / 2, ceil(10 * kv * own.group_size) / 10
        is_shared = self.config.devices.share  # then there is one rank; turns and KV count
        others = {
            "train.lora_rank": (32,),
            "buffer.max_staleness": (0,) if is_shared else (),
            "train.optimizer": ("adamw8bit",),
            "train.shard": () if is_shared else ("optimizer", "full"),
            "train.gradient_checkpointing": (True,),
            "devices.tensor_parallel": () if is_shared else (2, 4, 8),
            "rollout.kv_cache_gib": kv_sizes if is_shared else (),
            "train.max_tokens": (half, half // 2, longest),
        }
        return {k: [*dict.fromkeys((get(self.config, k), *others[k]))] for k in others}

    def changes_from(self, other: Config, keys: Iterable[str] = KEYS) -> list[str]:
        """As --set takes them."""
        changed = [key for key in keys if get(self.config, key) != get(other, key)]
        return [f"{key}={toml_value(get(self.config, key))}" for key in changed]

    @property
    def costs(self) -> Costs:
        gpu, shape, train = self.gpu, self.shape, self.config.train
        num, size = shape.num_parameters, ITEM_BYTES[self.config.model.dtype]
        (answers, prompt), num_answers = self.lengths, self.config.rollout.group_size
        (weights, kv_bytes), num_ranks = self.engine_bytes, self.config.devices.train
        bandwidth, link, host = gpu.bandwidth_gb_s * 1e9, gpu.link_gb_s * 1e9, gpu.host_gb_s * 1e9
        flops = 1e12 * (gpu.bf16_tflops if size == 2 else gpu.fp32_tflops)
        prefill = flops * PREFILL * self.config.devices.tensor_parallel
        attention = shape.layers * shape.heads * shape.head_dim * self.lengths.mean_tokens
        forward = 2.0 * (num + attention)
        # What kernels other than products move for one token, counted on fake tensors.
        hidden, heads, mlp = shape.widths
        layer = 115 * hidden + (95 if shape.norms_heads else 60) * heads + 9 * mlp
        moved = (shape.layers * layer + 26.0 * shape.vocab) / (bandwidth * ELEMENTWISE)
        models = 2 if train.estimator == "gae" else 1
        others = bool(train.kl_coef) + (train.num_minibatches > 1)  # reference, proximal policy
        passes = models * (3.0 + train.gradient_checkpointing) + others  # backward is two
        token_s = passes * (forward / (flops * MATMUL) + moved) / gpu.train_speed
        update_s = 28.0 * num / bandwidth  # the optimizer, and the sum of gradients
        if train.shard == "full":  # a micro-batch gathers each layer twice, and sums its gradients
            gathered = size * (2 * models + others) + 4 * models
            token_s += num * gathered / link / train.max_tokens
        elif num_ranks > 1:
            update_s += 8.0 * num / link
        group = Unit([*range(num_answers)], prompt, [round(fmean(answers))] * num_answers)
        units = self.split(group)
        kv_s = kv_bytes * self.lengths.mean_context / (bandwidth * DECODE)
        return Costs(
            step=(STEP_S + weights / (bandwidth * DECODE)) / gpu.decode_speed,
            step_per_seq=(STEP_PER_SEQ_S + 2.0 * num / prefill + kv_s) / gpu.decode_speed,
            prefill=forward / prefill * prompt / num_answers,
            reload=weights / host,
            reload_per_seq=forward / prefill * self.lengths.mean_context,
            train=train.num_minibatches * update_s + num * size / host,
            train_per_token=token_s / num_ranks,
            prompts_per_answer=len(units) / num_answers,
        )

    def split(self, group: Unit) -> list[Unit]:
        """As a trainer computes a group: its prompt once, where that fits."""
        return cut(group, self.config.train.max_tokens, 1)

    @cached_property
    def outcome(self) -> Throughput:
        """A shared GPU as if its pools took turns: two at once are each as much slower."""
        own = self.changed({"buffer.max_staleness": 0}) if self.config.devices.share else self
        num_warm = min(30, own.config.buffer.max_staleness + 3)
        fit = self.bills[0].items["KV cache"] / self.engine_bytes[1] / self.lengths.mean_tokens
        num_running = max(1, min(own.config.rollout.max_num_seqs, int(fit)))  # by one engine
        simulation = Simulation(own.config, self.costs, self.lengths, num_running)
        return simulation.run(min(60, 2 * num_warm + 6), num_warm)

    @property
    def hours(self) -> float:
        size = self.config.train.batch_size * self.config.rollout.group_size
        written = self.config.train.steps * size * fmean(self.lengths.answers)
        return written / self.outcome.tokens_per_s / 3600

    @property
    def is_valid(self) -> bool:
        with suppress(RecipeError):
            validate(self.config)
            return self.shape.heads % self.config.devices.tensor_parallel == 0
        return False

    @property
    def fits(self) -> bool:
        return self.is_valid and all(bill.fits for bill in self.bills)

    @property
    def row(self) -> tuple[str, ...]:
        """Of the table of splits."""
        devices, o, verdict = self.config.devices, self.outcome, "" if self.fits else "too big"
        rates = f"{o.tokens_per_s:,.0f}", f"{o.engines_idle:.0%}", f"{o.trainer_idle:.0%}"
        return f"{devices.rollout} + {devices.train}", *rates, verdict


def on_one_gpu(plan: Plan) -> Plan:
    """Both pools on it, with KV for all sequences that may run at once."""
    alone = dict.fromkeys(("devices.rollout", "devices.train", "devices.tensor_parallel"), 1)
    own = plan.changed({**alone, "devices.share": True, "train.shard": "none"})
    kv = own.engine_bytes[1] * own.lengths.mean_tokens * own.config.rollout.max_num_seqs / GIB
    return own.changed({"rollout.kv_cache_gib": max(0.1, round(kv, 1))})


def check_shared(config: Config, gpu: GpuKind) -> None:
    """Both pools fit on one GPU by the bill, where the plan knows the model's kind."""
    try:
        own = Plan(config, gpu, usual_lengths(config))
        found = [own] if own.fits else fitting([on_one_gpu(own)])
    except RecipeError:
        return
    if found != [own]:
        rule = f"by `minirl plan` engine and trainer do not fit {gpu.memory_gib:g} GiB"
        changes = " ".join(f"--set {c}" for plan in found for c in plan.changes_from(config))
        raise RecipeError("devices.share", True, rule, changes or "take a smaller model")


def fitting(found: Sequence[Plan]) -> list[Plan]:
    """Those that fit, all with the cheapest set of changes with which one does."""
    remedies = found[0].remedies
    for values in product(*remedies.values()):  # the last key varies fastest
        tried = [plan.changed(dict(zip(remedies, values, strict=True))) for plan in found]
        if fit := [plan for plan in tried if plan.fits]:
            return fit
    return []


def cards(plan: Plan) -> Table:
    """The largest model that fits both pools on one card, trained whole and by LoRA."""
    rows: Table = [("one card", "method", "largest model", "max_tokens", "KV GiB", "with")]
    paths = sorted(SHAPES, key=lambda name: SHAPES[name].num_parameters, reverse=True)
    shown = ("buffer.max_staleness", "train.optimizer", "train.gradient_checkpointing")
    for (size, gib), lora_rank in product(CARDS.items(), (0, 32)):
        card = replace(plan, gpu=plan.gpu._replace(memory_gib=gib))
        tried = [{"model.path": path, "train.lora_rank": lora_rank} for path in paths]
        fit = (own for given in tried for own in fitting([on_one_gpu(card.changed(given))]))
        if best := next((own for own in fit if own.config.train.lora_rank == lora_rank), None):
            own, changes = best.config, " ".join(best.changes_from(plan.config, shown))
            sizes = own.model.path, f"{own.train.max_tokens:,}", f"{own.rollout.kv_cache_gib:g}"
            rows.append((f"{size} GB", "LoRA" if lora_rank else "full", *sizes, changes))
    return rows


def splits(plan: Plan, num_gpus: int) -> list[Plan]:
    """The same recipe, with each split of the GPUs that it may have; one GPU is shared."""
    if num_gpus == 1:
        return [plan if plan.config.devices.share else on_one_gpu(plan)]
    pairs = [(n, num_gpus - n) for n in range(1, num_gpus)]
    tried = [plan.changed({"devices.rollout": n, "devices.train": m}) for n, m in pairs]
    if not (found := [own for own in tried if own.is_valid]):
        rule = "no split of them keeps to devices.tensor_parallel and train.shard"
        raise RecipeError("--gpus", num_gpus, rule, "take more, or change these keys")
    return found


def recommended(found: Sequence[Plan]) -> Plan:
    """The fastest of those that fit; of all, where none does."""
    usable = [split for split in found if split.fits] or found
    return max(usable, key=lambda split: split.outcome.tokens_per_s)


def tables(plan: Plan, num_gpus: int, price: float = 0.0) -> tuple[bool, list[Table]]:
    """Whether the recipe fits; the memory of the recommended split with what to change where it
    does not, its hours and cost, and all splits of `num_gpus`, the head's. `price`: by the hour."""
    found = splits(plan, num_gpus)
    best = recommended(fitting(found) or found)
    own = next(s for s in found if s.config.devices.train == best.config.devices.train)
    path, num = plan.config.model.path, plan.shape.num_parameters
    memory: Table = [
        ("model", f"{path}: {num / 1e9:.2f} B parameters", ""),
        ("rollout GPU", *own.bills[0].row),
        ("training GPU", *own.bills[1].row),
    ]
    more = [cards(plan)] if num_gpus == 1 else []
    if not best.fits:
        rule = "no set of changes fits: take a smaller model, shorter answers or more memory"
        return False, [[*memory, ("to change", rule, "")], *more]
    if not own.fits or best.config.devices.share != plan.config.devices.share:
        changes = " ".join(f"--set {change}" for change in best.changes_from(plan.config))
        memory.append(("to change", changes, "then it fits"))
    about, least, most = hours = [best.hours * share for share in (1.0, *TRUST)]
    between = f"{least:.2g} to {most:.2g}"
    time = f"{plan.config.train.steps:,} steps in about {about:.2g} hours ({between})"
    if price:
        num_gpus += (plan.config.num_nodes - 1) * best.config.devices.rollout
        cost, low, high = (f"{each * num_gpus * price:,.2f}" for each in hours)
        time += f", for {cost} ({low} to {high}) at {price:g} per GPU and hour"
    memory.append(("time", time, ""))
    idle = balance(best.config, (best.outcome.engines_idle, best.outcome.trainer_idle))
    advice = f"<- take this{'' if own.fits else ', with these changes'}; {idle}"
    head = ("split", "tokens/s", "engines idle", "trainers idle", "")
    rows = [(*best.row[:-1], advice) if s is own else s.row for s in found]
    return own.fits, [memory, [head, *rows], *more]


def gpu_for(name: str) -> GpuKind:
    """By its name in the table; else as `minirl doctor --gpu` measured it; else an H100."""
    if name or not MEASURED.exists():
        if (gpu := GPUS.get((name or "H100").upper())) is None:
            raise RecipeError("--gpu", name, "is not in the table", f"one of {', '.join(GPUS)}")
        return gpu
    with suppress(OSError, *MALFORMED):
        return GpuKind(**json.loads(MEASURED.read_text())["plan"])
    remedy = "write it again by minirl doctor --gpu, or name a kind by --gpu"
    raise RecipeError("gpu.json", str(MEASURED), "holds no measured GPU", remedy)
