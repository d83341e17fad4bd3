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

from minirl.balance import sentence
from minirl.config import KEYS, Config, get
from minirl.devices import ENGINE_WORK_BYTES, LIBRARY_BYTES
from minirl.errors import RecipeError, toml_value
from minirl.recipe import find_model, read_model_config, validate
from minirl.shm.weights import ITEM_BYTES
from minirl.tools.simulate import Costs, Lengths, Simulation, Throughput, long_tailed

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
    def linears(self) -> list[tuple[int, int]]:
        """The two sizes of each matrix in a layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        others = (queries, queries, keys, keys, *[self.intermediate] * 3)
        return [(self.hidden, other) for other in others]

    @property
    def num_parameters(self) -> int:
        layer = sum(a * b for a, b in self.linears) + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def widths(self) -> tuple[int, int, int]:
        """Values of a token in the residual stream, in queries and keys, in the MLP."""
        return self.hidden, (self.heads + self.kv_heads) * self.head_dim, self.intermediate

    @property
    def traffic_bytes(self) -> float:
        """What kernels other than products move for one token in a forward; a backward moves twice
        as much. Counted on fake tensors, in eager mode."""
        hidden, heads, mlp = self.widths
        layer = 115 * hidden + (95 if self.norms_heads else 60) * heads + 9 * mlp
        return self.layers * layer + 26.0 * self.vocab

    def num_adapted(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers."""
        return self.layers * rank * sum(a + b for a, b in self.linears)


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
GPUS = {name: GpuKind(*row) for name, row in TABLES["gpus"].items()}
SHAPES = {name: Shape(*row) for name, row in TABLES["shapes"].items()}
CARDS: dict[str, float] = TABLES["cards"]  # GiB that a process can have, by GB


def recognise(device_name: str, memory_bytes: float) -> GpuKind | None:
    """From what a driver calls it, such as "NVIDIA A100-SXM4-40GB"."""
    named = [gpu for name, gpu in GPUS.items() if all(n in device_name for n in name.split("-"))]
    near = (gpu for gpu in named if abs(gpu.memory_gib * GIB / memory_bytes - 1) < 0.15)
    return next(near, None)


def shape_of(config: Config) -> Shape:
    """Of the recipe's model: from its folder or the local cache if it is there."""
    path = config.model.path
    if (folder := find_model(config)) is not None:
        return _from_config_json(path, read_model_config(config, folder))
    for name, shape in SHAPES.items():
        # Qwen2.5-1.5B-Instruct has the shape of Qwen2.5-1.5B.
        if f"{path.rpartition('/')[2]}-".startswith(f"{name}-"):
            return shape
    rule = "is neither on this machine nor in the table of shapes"
    remedy = f"give a folder with its config.json, or one of {', '.join(SHAPES)}"
    raise RecipeError("model.path", path, rule, remedy)


def _from_config_json(path: str, values: dict[str, Any]) -> Shape:
    try:
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        kv_heads = values.get("num_key_value_heads") or heads
        attention = (heads, kv_heads, values.get("head_dim") or hidden // heads)
        mlp, vocab = values["intermediate_size"], values["vocab_size"]
        is_tied = values.get("tie_word_embeddings", False)
        norms = str(values.get("model_type")).startswith(("qwen3", "gemma3", "olmo2", "olmo3"))
        return Shape(values["num_hidden_layers"], hidden, *attention, mlp, vocab, is_tied, norms)
    except (KeyError, TypeError):
        rule, remedy = "its config.json has no usable sizes", "plan knows Llama's and Qwen's kind"
        raise RecipeError("model.path", path, rule, remedy) from None


def rank_bytes(config: Config, shape: Shape) -> dict[str, float]:
    """What a training rank holds, a micro-batch and libraries apart. All in float32, but for what
    LoRA does not train and for AdamW's state in 8 bits."""
    train, num, part = config.train, shape.num_parameters, 1 / config.devices.train
    adapted = shape.num_adapted(train.lora_rank)
    half, trained = ITEM_BYTES[config.model.dtype], adapted or num
    held = part if train.shard == "full" else 1.0
    state = 2.0 if train.optimizer == "adamw8bit" else 8.0
    state *= 1.0 if train.shard == "none" else part
    # FSDP2 gathers the layer that runs and the next one, and the root: embeddings and head.
    layer = sum(a * b for a, b in shape.linears)
    items = {
        "weights": held * ((half if adapted else 4) * num + 4.0 * adapted),
        "gradients": held * 4.0 * trained,
        "optimizer": state * trained,
        "gathered": half * (num - (shape.layers - 2.0) * layer) if train.shard == "full" else 0.0,
        # Of the same size, and always trained whole.
        "critic": num * (held * 8.0 + state) if train.estimator == "gae" else 0.0,
        "reference": 4.0 * num if train.kl_coef else 0.0,
    }
    return {name: bytes_ for name, bytes_ in items.items() if bytes_}


@dataclass(frozen=True)
class Bill:
    """Of one GPU."""

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
        """With other values of some keys."""
        config = self.config
        for key, value in values.items():
            section, _, name = key.partition(".")
            own = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: own})
        return replace(self, config=config)

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
    def rollout_bill(self) -> Bill:
        """On a shared GPU beside what the trainer keeps meanwhile."""
        own, memory, (weights, kv_bytes) = self.config, self.gpu.memory_gib * GIB, self.engine_bytes
        available, kv = own.rollout.memory_fraction * memory, own.rollout.kv_cache_gib * GIB
        if own.devices.share:
            freed = ("gradients", "micro-batch") if own.takes_turns else ()
            available = memory - sum(n for name, n in self.train_items.items() if name not in freed)
        room = available - weights - ENGINE_WORK_BYTES
        kv = kv if own.devices.share else max(0.0, room)
        items = {"weights": weights, "engine": ENGINE_WORK_BYTES, "KV cache": kv}
        return Bill(items, available, kv_bytes * own.max_tokens_per_trajectory <= kv <= room)

    @property
    def max_running(self) -> int:
        """Sequences of the usual length that one engine decodes at once."""
        fit = self.rollout_bill.items["KV cache"] / self.engine_bytes[1] / self.lengths.mean_tokens
        return min(self.config.rollout.max_num_seqs, int(fit))

    @property
    def train_items(self) -> dict[str, float]:
        peak = max(a + b * self.config.train.max_tokens for a, b in self.peaks)
        return {**rank_bytes(self.config, self.shape), **LIBRARIES, "micro-batch": peak}

    @property
    def train_bill(self) -> Bill:
        """On a shared GPU beside the engine, or what a sleeping one keeps."""
        available = self.gpu.memory_gib * GIB
        if self.config.devices.share:
            awake = self.engine_bytes[0] + self.config.rollout.kv_cache_gib * GIB
            available -= ENGINE_WORK_BYTES + (0.0 if self.config.takes_turns else awake)
        items = self.train_items
        return Bill(items, available, sum(items.values()) <= available)

    @property
    def peaks(self) -> list[tuple[float, float]]:
        """(bytes, bytes per token) of a micro-batch where it may take the most memory. The residual
        stream and the norms are float32. tests/test_plan.py counts the same on fake tensors."""
        shape, train, size = self.shape, self.config.train, ITEM_BYTES[self.config.model.dtype]
        hidden, heads, mlp = shape.widths
        matrix = shape.vocab * hidden
        # In bfloat16 autocast copies what is held in float32; FSDP2 gathers it in bfloat16.
        copies = 2.0 * shape.layers * sum(a * b for a, b in shape.linears) if size == 2 else 0.0
        copies *= train.shard != "full" and not train.lora_rank
        head = 0.0 if train.shard == "full" else 2.0 * matrix
        logits = 6.0 * LOGITS * shape.vocab + head
        d_head = 0.0 if train.lora_rank else 4.0 * matrix  # LoRA does not train it
        held = 0.5 * d_head if train.shard == "full" and size == 2 else d_head  # as gathered
        kept_heads = (5 if shape.norms_heads else 2) * heads
        layer = 16.0 * hidden + size * (5 * hidden + kept_heads + 4 * mlp)
        if not train.gradient_checkpointing:
            return [(copies + logits + d_head, layer * shape.layers + 15.0 * hidden)]
        kept = 4.0 * hidden * shape.layers
        return [
            (copies, kept + 8.0 * hidden + 3.0 * size * mlp),  # the last layer's forward
            (logits + d_head, kept + 15.0 * hidden),  # the head's backward
            (held, kept + layer + 8.0 * hidden + 2.0 * size * mlp),  # the last layer's backward
        ]

    @property
    def remedies(self) -> dict[str, list[Any]]:
        """Keys that make room, and their values, the recipe's own first. To change the last key
        costs least."""
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
        devices, num = self.config.devices, shape.num_parameters
        size = ITEM_BYTES[self.config.model.dtype]
        flops = 1e12 * (gpu.bf16_tflops if size == 2 else gpu.fp32_tflops)
        prefill, bandwidth = flops * PREFILL * devices.tensor_parallel, gpu.bandwidth_gb_s * 1e9
        weights, kv_bytes = self.engine_bytes
        attention = shape.layers * shape.heads * shape.head_dim * self.lengths.mean_tokens
        forward = 2.0 * (num + attention)
        moved = shape.traffic_bytes / (bandwidth * ELEMENTWISE)
        passes = 3.0 + train.gradient_checkpointing  # backward is two
        passes *= 2 if train.estimator == "gae" else 1
        passes += bool(train.kl_coef) + (train.num_minibatches > 1)  # reference, proximal policy
        update_s = 28.0 * num / bandwidth  # the optimizer, and the sum of gradients
        update_s += 8.0 * num / (gpu.link_gb_s * 1e9) if devices.train > 1 else 0.0
        host = gpu.host_gb_s * 1e9
        publish_s = num * size / host
        kv_s = kv_bytes * self.lengths.mean_context / (bandwidth * DECODE)
        return Costs(
            step=STEP_S + weights / (bandwidth * DECODE),
            step_per_seq=STEP_PER_SEQ_S + 2.0 * num / prefill + kv_s,
            prefill=forward / prefill * self.lengths.prompt / self.config.rollout.group_size,
            reload=weights / host,
            reload_per_seq=forward / prefill * self.lengths.mean_context,
            train=train.num_minibatches * update_s + publish_s,
            train_per_token=(forward / (flops * MATMUL) + moved)
            * (passes / devices.train / gpu.train_speed),
        )

    @cached_property
    def outcome(self) -> Throughput:
        """A shared GPU as if its pools took turns: two at once are each as much slower."""
        own = self.changed({"buffer.max_staleness": 0}) if self.config.devices.share else self
        num_warm = min(30, own.config.buffer.max_staleness + 3)
        simulation = Simulation(own.config, self.costs, self.lengths, max(1, self.max_running))
        return simulation.run(min(60, 2 * num_warm + 6), num_warm)

    @property
    def train_tokens_per_s(self) -> float:
        """Of one training GPU that is never idle."""
        return 1 / (self.costs.train_per_token * self.config.devices.train)

    @property
    def hours(self) -> float:
        size = self.config.train.batch_size * self.config.rollout.group_size
        written = self.config.train.steps * size * fmean(self.lengths.answers)
        return written / self.outcome.tokens_per_s / 3600

    @property
    def is_valid(self) -> bool:
        """A recipe may say so."""
        with suppress(RecipeError):
            validate(self.config)
            return self.shape.heads % self.config.devices.tensor_parallel == 0
        return False

    @property
    def fits(self) -> bool:
        return self.is_valid and self.train_bill.fits and self.rollout_bill.fits

    @property
    def row(self) -> tuple[str, ...]:
        """Of the table of splits."""
        devices, o, verdict = self.config.devices, self.outcome, "" if self.fits else "too big"
        rates = f"{o.tokens_per_s:,.0f}", f"{o.engines_idle:.0%}", f"{o.trainer_idle:.0%}"
        return f"{devices.rollout} + {devices.train}", *rates, verdict


def on_one_gpu(plan: Plan) -> Plan:
    """Both pools on it, with KV for all sequences that may run at once."""
    alone = dict.fromkeys(("devices.rollout", "devices.train", "devices.tensor_parallel"), 1)
    own = plan.changed({**alone, "devices.share": True})
    kv = own.engine_bytes[1] * own.lengths.mean_tokens * own.config.rollout.max_num_seqs / GIB
    return own.changed({"rollout.kv_cache_gib": max(0.1, round(kv, 1))})


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
        best = next(own for own in fit if own.config.train.lora_rank == lora_rank)
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
    path, num = best.config.model.path, best.shape.num_parameters
    memory: Table = [
        ("model", f"{path}: {num / 1e9:.2f} B parameters", ""),
        ("rollout GPU", *own.rollout_bill.row),
        ("training GPU", *own.train_bill.row),
    ]
    more = [cards(plan)] if num_gpus == 1 else []
    if not best.fits:
        rule = "no set of changes fits: take a smaller model, shorter answers or more memory"
        return False, [[*memory, ("to change", rule, "")], *more]
    if not own.fits or best.config.devices.share != plan.config.devices.share:
        changes = " ".join(f"--set {change}" for change in best.changes_from(plan.config))
        memory.append(("to change", changes, "then it fits"))
    memory.append(("time", _time(best, num_gpus, price), ""))
    idle = sentence(best.config, (best.outcome.engines_idle, best.outcome.trainer_idle))
    advice = f"<- take this{'' if own.fits else ', with these changes'}; {idle}"
    head = ("split", "tokens/s", "engines idle", "trainers idle", "")
    rows = [(*best.row[:-1], advice) if s is own else s.row for s in found]
    return own.fits, [memory, [head, *rows], *more]


def _time(plan: Plan, num_gpus: int, price: float) -> str:
    steps = plan.config.train.steps
    least, most = (share * plan.hours for share in TRUST)
    text = f"{steps:,} steps in about {plan.hours:.2g} hours ({least:.2g} to {most:.2g})"
    if price:
        num_gpus += (plan.config.num_nodes - 1) * plan.config.devices.rollout
        costs = (hours * num_gpus * price for hours in (plan.hours, least, most))
        about, low, high = (f"{cost:,.2f}" for cost in costs)
        text += f", for {about} ({low} to {high}) at {price:g} per GPU and hour"
    return text


def gpu_for(name: str) -> GpuKind:
    """By its name in the table; else as `minirl doctor --gpu` measured it; else an H100."""
    if name or not MEASURED.exists():
        if (gpu := GPUS.get((name or "H100").upper())) is None:
            raise RecipeError("--gpu", name, "is not in the table", f"one of {', '.join(GPUS)}")
        return gpu
    try:
        found = json.loads(MEASURED.read_text())["plan"]
        return GpuKind(**{key: float(value) for key, value in found.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        remedy = "write it again by minirl doctor --gpu, or name a kind by --gpu"
        raise RecipeError("gpu.json", str(MEASURED), "holds no measured GPU", remedy) from None


def checkpoint_bytes(config: Config) -> float:
    """What the checkpoints of a run take on disk: those kept, the best, and one being written."""
    shape, train, size = shape_of(config), config.train, ITEM_BYTES[config.model.dtype]
    num, state = shape.num_parameters, 2.0 if train.optimizer == "adamw8bit" else 8.0
    trained = shape.num_adapted(train.lora_rank) or num
    masters = 4.0 * trained if train.lora_rank or size == 2 else 0.0
    critic = (4.0 + state) * num if train.estimator == "gae" else 0.0
    each = size * num + masters + state * trained + critic
    return (config.checkpoint.keep + 2) * each


def with_auto_split(config: Config, gpu: GpuKind | None) -> Config:
    """devices.split = "auto": as planned for the GPU, and the recipe's own on a GPU that is not in
    the table. The same recipe gives the same plan, so a resumed run keeps its split."""
    if gpu is None:
        return config
    plan = Plan(config, gpu, usual_lengths(config))
    return recommended(splits(plan, config.num_devices)).config
