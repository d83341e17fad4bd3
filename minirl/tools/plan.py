"""What a recipe needs and what it would do, on GPUs that need not be here: `minirl plan`.

Takes a recipe, a kind of GPU and the lengths of answers; gives the memory bill of a rollout GPU and
of a training GPU, one set of changes that fits where the recipe does not, every split of the GPUs,
simulated, with the one to take, its hours and their cost. `devices.split = "auto"` takes that split
when a run starts. docs/planning.md says how far to trust it. Leaves out: torch, and in the hours
the start, evaluations and checkpoints.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from minirl.balance import sentence
from minirl.config import KEYS, Config, get
from minirl.errors import RecipeError, toml_value
from minirl.recipe import find_model, read_model_config
from minirl.tools.simulate import Costs, Lengths, Simulation, Throughput, long_tailed

GIB = 2**30
ENGINE_WORK = 1.5 * GIB  # activations and CUDA graphs of an engine, inside its share
# On a training GPU: CUDA context, NCCL and cuBLAS; and fragments of the allocator.
LIBRARIES = {"libraries": 1.5 * GIB, "spare": 1.5 * GIB}
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
# What makes room on a training GPU, the cheapest first.
REMEDIES = {"gradient_checkpointing": True, "shard": "optimizer", "lora_rank": 32}
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

    def changed(self, section: str, **values: Any) -> "Plan":
        """With other values in one section of the recipe."""
        own = replace(getattr(self.config, section), **values)
        return replace(self, config=replace(self.config, **{section: own}))

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.config)

    @property
    def value_bytes(self) -> int:
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def engine_bytes(self) -> tuple[float, float]:
        """The weights, and a token's KV: on each of the devices.tensor_parallel GPUs."""
        shape, size = self.shape, self.value_bytes / self.config.devices.tensor_parallel
        kv_values = 2 * shape.layers * shape.kv_heads * shape.head_dim
        return size * shape.num_parameters, size * kv_values

    @cached_property
    def rollout_bill(self) -> Bill:
        share = self.config.rollout.memory_fraction * self.gpu.memory_gib * GIB
        weights, kv_bytes = self.engine_bytes
        kv = max(0.0, share - weights - ENGINE_WORK)
        items = {"weights": weights, "engine": ENGINE_WORK, "KV cache": kv}
        return Bill(items, share, kv >= kv_bytes * self.config.max_tokens_per_trajectory)

    @property
    def max_running(self) -> int:
        """Sequences of the usual length that one engine decodes at once."""
        fit = self.rollout_bill.items["KV cache"] / self.engine_bytes[1] / self.lengths.mean_tokens
        return min(self.config.rollout.max_num_seqs, int(fit))

    @property
    def train_bill(self) -> Bill:
        num_tokens = self.config.train.max_tokens
        items = {**self.fixed_items, "micro-batch": max(a + b * num_tokens for a, b in self.peaks)}
        return Bill(items, self.gpu.memory_gib * GIB, num_tokens <= self.max_tokens_that_fit)

    @property
    def fixed_items(self) -> dict[str, float]:
        """All but a micro-batch: float32 weights, gradients and AdamW on every rank (DDP)."""
        train, num = self.config.train, self.shape.num_parameters
        trained = self.shape.num_adapted(train.lora_rank) if train.lora_rank else num
        shards = self.config.devices.train if train.shard != "none" else 1
        items = {
            "weights": 4.0 * num,
            "gradients": 4.0 * trained,
            "optimizer": 8.0 * trained / shards,
            # Of the same size, and always trained whole.
            "critic": num * (8.0 + 8.0 / shards) if train.estimator == "gae" else 0.0,
            "reference": 4.0 * num if train.kl_coef else 0.0,
            **LIBRARIES,
        }
        return {name: size for name, size in items.items() if size}

    @property
    def peaks(self) -> list[tuple[float, float]]:
        """(bytes, bytes per token) of a micro-batch where it may take the most memory. The residual
        stream and the norms are float32. tests/test_plan.py counts the same on fake tensors."""
        shape, train, size = self.shape, self.config.train, self.value_bytes
        hidden, heads, mlp = shape.widths
        matrix = shape.vocab * hidden
        copies = 2.0 * shape.layers * sum(a * b for a, b in shape.linears) if size == 2 else 0.0
        logits, d_head = 6.0 * LOGITS * shape.vocab + 2.0 * matrix, 6.0 * matrix
        if train.lora_rank:  # the head is not trained
            d_head = 0.0
        kept_heads = (5 if shape.norms_heads else 2) * heads
        layer = 16.0 * hidden + size * (5 * hidden + kept_heads + 4 * mlp)
        if not train.gradient_checkpointing:
            return [(copies + logits + d_head, layer * shape.layers + 15.0 * hidden)]
        kept = 4.0 * hidden * shape.layers
        return [
            (copies, kept + 8.0 * hidden + 3.0 * size * mlp),  # the last layer's forward
            (logits + d_head, kept + 15.0 * hidden),  # the head's backward
            (d_head, kept + layer + 8.0 * hidden + 2.0 * size * mlp),  # the last layer's backward
        ]

    @property
    def max_tokens_that_fit(self) -> int:
        """Of a micro-batch, beside all else on a training GPU."""
        free = self.gpu.memory_gib * GIB - sum(self.fixed_items.values())
        return int(min((free - fixed) / per_token for fixed, per_token in self.peaks))

    @cached_property
    def mended(self) -> "Plan":
        """With no more changes than it takes to fit, the cheapest first; it may still not fit."""
        longest, tried = self.config.max_tokens_per_trajectory, self
        if not tried.rollout_bill.fits:
            tried = tried.changed("rollout", memory_fraction=0.92)
        width, num_engines = 2 * self.config.devices.tensor_parallel, self.config.devices.rollout
        while not tried.rollout_bill.fits and num_engines % width == self.shape.heads % width == 0:
            tried = tried.changed("devices", tensor_parallel=width)
            width *= 2
        for key, value in REMEDIES.items():
            is_useless = key == "shard" and self.config.devices.train == 1
            is_set = getattr(tried.config.train, key) not in (False, 0, "none")
            if tried.max_tokens_that_fit < longest and not is_set and not is_useless:
                tried = tried.changed("train", **{key: value})
        fit = max(longest, tried.max_tokens_that_fit // 256 * 256)
        return tried.changed("train", max_tokens=min(fit, tried.config.train.max_tokens))

    def changes_from(self, other: Config) -> list[str]:
        """As options of the command line."""
        changed = [key for key in KEYS if get(self.config, key) != get(other, key)]
        return [f"--set {key}={toml_value(get(self.config, key))}" for key in changed]

    @property
    def costs(self) -> Costs:
        gpu, shape, train = self.gpu, self.shape, self.config.train
        devices, num = self.config.devices, shape.num_parameters
        flops = 1e12 * (gpu.bf16_tflops if self.value_bytes == 2 else gpu.fp32_tflops)
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
        publish_s = num * self.value_bytes / host
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
        num_warm = min(30, self.config.buffer.max_staleness + 3)
        simulation = Simulation(self.config, self.costs, self.lengths, max(1, self.max_running))
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
    def fits(self) -> bool:
        return self.train_bill.fits and self.rollout_bill.fits

    @property
    def row(self) -> tuple[str, ...]:
        """Of the table of splits."""
        devices, o, verdict = self.config.devices, self.outcome, "" if self.fits else "too big"
        rates = f"{o.tokens_per_s:,.0f}", f"{o.engines_idle:.0%}", f"{o.trainer_idle:.0%}"
        return f"{devices.rollout} + {devices.train}", *rates, f"{o.staleness:.2f}", verdict


def splits(plan: Plan, num_gpus: int) -> list[Plan]:
    """The same recipe, with each split of the GPUs."""
    config, width = plan.config, plan.config.devices.tensor_parallel
    share = config.train.batch_size // config.train.num_minibatches * config.rollout.group_size
    pairs = [(n, num_gpus - n) for n in range(width, num_gpus, width) if num_gpus - n <= share]
    if not pairs:
        rule = f"{num_gpus} cannot be split into engines of {width} and at least one to train"
        raise RecipeError("--gpus", num_gpus, rule, f"take {width + 1} or more")
    return [plan.changed("devices", rollout=rollout, train=train) for rollout, train in pairs]


def recommended(found: Sequence[Plan]) -> Plan:
    """The freshest within 2 % of the fastest, of those that fit; of all, where none does."""
    usable = [split for split in found if split.fits] or found
    best = max(split.outcome.tokens_per_s for split in usable)
    good = [split for split in usable if split.outcome.tokens_per_s >= 0.98 * best]
    return min(good, key=lambda split: (split.outcome.staleness, split.config.devices.train))


def tables(plan: Plan, num_gpus: int, price: float = 0.0) -> tuple[bool, list[Table]]:
    """Whether the recipe fits; the memory of the recommended split with what to change where it
    does not, its hours and cost, and all splits. `price`: of one GPU for one hour."""
    found = splits(plan, num_gpus)
    usable = [split for split in found if split.fits]
    fitting = usable or [split.mended for split in found if split.mended.fits]
    counts = [sum(bool(getattr(s.config.train, key)) for key in REMEDIES) for s in fitting]
    few = [split for split, count in zip(fitting, counts, strict=True) if count == min(counts)]
    best = recommended(few or found)
    own = next(s for s in found if s.config.devices.train == best.config.devices.train)
    path, num, tokens = best.config.model.path, best.shape.num_parameters, best.lengths.mean_tokens
    memory: Table = [
        ("model", f"{path}: {num / 1e9:.2f} B parameters", ""),
        ("rollout GPU", *own.rollout_bill.row),
        ("training GPU", *own.train_bill.row),
    ]
    if not few:
        rule = "no set of changes fits: take a smaller model, shorter answers or more memory"
        return False, [[*memory, ("to change", rule, "")]]
    if not usable:
        memory.append(("to change", " ".join(best.changes_from(plan.config)), "then it fits"))
    answers = f"KV of {best.max_running:,} answers of the usual {tokens:,.0f} tokens at once"
    memory += [("at once", answers, ""), ("time", _time(best, num_gpus, price), "")]
    idle = sentence(best.config, (best.outcome.engines_idle, best.outcome.trainer_idle))
    advice = f"<- take this{'' if usable else ', with these changes'}; {idle}"
    head = ("split", "tokens/s", "engines idle", "trainers idle", "staleness", "")
    rows = [(*best.row[:-1], advice) if s is own else s.row for s in found]
    return bool(usable), [memory, [head, *rows]]


def _time(plan: Plan, num_gpus: int, price: float) -> str:
    steps = plan.config.train.steps
    least, most = (share * plan.hours for share in TRUST)
    text = f"{steps:,} steps in about {plan.hours:.2g} hours ({least:.2g} to {most:.2g})"
    if price:
        costs = (hours * num_gpus * price for hours in (plan.hours, least, most))
        about, low, high = (f"{cost:,.2f}" for cost in costs)
        text += f", for {about} ({low} to {high}) on {num_gpus} GPUs at {price:g} an hour"
    return text


def gpu_for(name: str, file: Path | None) -> GpuKind:
    """By its name in the table; else as `minirl doctor --gpu` measured it; else an H100."""
    path = file or MEASURED
    if name or (file is None and not path.exists()):
        if (gpu := GPUS.get((name or "H100").upper())) is None:
            raise RecipeError("--gpu", name, "is not in the table", f"one of {', '.join(GPUS)}")
        return gpu
    try:
        found = json.loads(path.read_text())["plan"]
        return GpuKind(**{key: float(value) for key, value in found.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        remedy = "write it again by minirl doctor --gpu, or name a kind by --gpu"
        raise RecipeError("--gpu-json", str(path), "holds no measured GPU", remedy) from None


def checkpoint_bytes(config: Config) -> float:
    """What the checkpoints of a run take on disk: those kept, the best, and one being written."""
    shape, train = shape_of(config), config.train
    num, size = shape.num_parameters, 2 if config.model.dtype == "bfloat16" else 4
    trained = shape.num_adapted(train.lora_rank) if train.lora_rank else num
    masters = 4.0 * trained if train.lora_rank or size == 2 else 0.0
    critic = 12.0 * num if train.estimator == "gae" else 0.0
    each = size * num + masters + 8.0 * trained + critic
    return (config.checkpoint.keep + 2) * each


def with_auto_split(config: Config, gpu: GpuKind | None) -> Config:
    """devices.split = "auto": as planned for the GPU, and the recipe's own on a GPU that is not in
    the table. The same recipe gives the same plan, so a resumed run keeps its split."""
    if gpu is None:
        return config
    num_gpus = config.devices.rollout + config.devices.train
    return recommended(splits(Plan(config, gpu, usual_lengths(config)), num_gpus)).config
