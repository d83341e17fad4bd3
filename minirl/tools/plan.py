"""What a recipe needs and what it would do, on GPUs that need not be here: `minirl plan`.

Takes a recipe, a kind of GPU and the lengths of answers; gives the memory bill of a rollout GPU and
of a training GPU with the numbers to change, and every split of the GPUs, simulated, with the one
to take. `devices.split = "auto"` takes that one when a run starts. docs/planning.md says how far to
trust it. Memory is an estimate on the safe side. Leaves out: torch.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from minirl.balance import sentence
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import find_model, read_model_config
from minirl.tools.simulate import Costs, Lengths, Simulation, Throughput, long_tailed

GIB = 2**30
ENGINE_WORK = 1.5 * GIB  # activations and CUDA graphs of an engine, inside its share
# Shares of the data sheet's rates that are reached. TRAIN and STEP_S were fitted on two of the four
# rows of the paper's table 7 (docs/planning.md); the others are round numbers.
TRAIN = 0.4  # of the compute rate, packed sequences
PREFILL = 0.5
DECODE = 0.75  # of the memory bandwidth
STEP_S = 0.0035  # launches, scheduling and sampling of an engine step
STEP_PER_SEQ_S = 10e-6  # bookkeeping of one sequence in a step
HOST_BYTES_S = 20e9  # to and from shared memory
# What makes room on a training GPU, the cheapest first.
REMEDIES = {"gradient_checkpointing": True, "shard_optimizer": True, "lora_rank": 32}


class GpuKind(NamedTuple):  # a row of plan.toml
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    link_gb_s: float


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

    def num_adapted(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers."""
        return self.layers * rank * sum(a + b for a, b in self.linears)


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
GPUS = {name: GpuKind(*row) for name, row in TABLES["gpus"].items()}
SHAPES = {name: Shape(*row) for name, row in TABLES["shapes"].items()}


def gpu_named(name: str) -> GpuKind:
    if gpu := GPUS.get(name.upper()):
        return gpu
    raise RecipeError("--gpu", name, "is not in the table", f"one of {', '.join(GPUS)}")


def recognise(device_name: str, memory_bytes: float) -> GpuKind | None:
    """From what a driver calls it, such as "NVIDIA A100-SXM4-40GB"."""
    named = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in device_name]
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
        return Shape(values["num_hidden_layers"], hidden, *attention, mlp, vocab, is_tied)
    except (KeyError, TypeError):
        rule, remedy = "its config.json has no usable sizes", "plan knows Llama's and Qwen's kind"
        raise RecipeError("model.path", path, rule, remedy) from None


@dataclass(frozen=True)
class Bill:
    """Of one GPU."""

    items: dict[str, float]  # bytes
    available: float
    remedy: str  # empty: it fits

    @property
    def row(self) -> tuple[str, str]:
        parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in self.items.items())
        total, available = sum(self.items.values()) / GIB, self.available / GIB
        verdict = f"TOO BIG: {self.remedy}" if self.remedy else "ok"
        return f"{parts} = {total:.1f} of {available:.1f} GiB", verdict


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
        longest, remedy = self.config.max_tokens_per_trajectory, ""
        if not kv:
            remedy = "raise devices.tensor_parallel or rollout.memory_fraction; or a smaller model"
        elif kv < longest * kv_bytes:
            remedy = f"lower rollout.max_new_tokens: one answer needs {longest:,} tokens of KV"
        items = {"weights": weights, "engine": ENGINE_WORK, "KV cache": kv}
        return Bill(items, share, remedy)

    @property
    def max_running(self) -> int:
        """Sequences of the usual length that one engine decodes at once."""
        fit = self.rollout_bill.items["KV cache"] / self.engine_bytes[1] / self.lengths.mean_tokens
        return min(self.config.rollout.max_num_seqs, int(fit))

    @property
    def train_bill(self) -> Bill:
        activations = self.config.train.max_tokens * self.activation_bytes
        items = {**self.fixed_items, "activations": activations}
        return Bill(items, self.gpu.memory_gib * GIB, self._train_remedy)

    @property
    def fixed_items(self) -> dict[str, float]:
        """All but activations: float32 weights, gradients and AdamW on every rank (DDP)."""
        shape, train, num_ranks = self.shape, self.config.train, self.config.devices.train
        num, logits = shape.num_parameters, 1024  # rows at once (train/policy.py)
        trained = shape.num_adapted(train.lora_rank) if train.lora_rank else num
        shards = num_ranks if train.shard_optimizer else 1
        bucket = 4.0 if num_ranks > 1 else 0.0
        items = {
            "weights": 4.0 * num,
            "gradients": 4.0 * trained,
            "optimizer": 8.0 * trained / shards,
            "DDP buckets": bucket * trained,
            # Of the same size, and always trained whole.
            "critic": num * (8.0 + 8.0 / shards + bucket) if train.estimator == "gae" else 0.0,
            "reference": 4.0 * num if train.kl_coef else 0.0,
            "bfloat16 copies": 2.0 * num if self.value_bytes == 2 else 0.0,
            "logits chunk": 4.0 * shape.vocab * (3 * logits + shape.hidden),
            "libraries": 1.5 * GIB,  # CUDA context, NCCL, cuBLAS
        }
        return {name: size for name, size in items.items() if size}

    @property
    def activation_bytes(self) -> float:
        """Of one token, kept for backward. The residual stream and the norms are float32."""
        shape, train = self.shape, self.config.train
        heads = (3 * shape.heads + 4 * shape.kv_heads) * shape.head_dim
        values = 3 * shape.hidden + heads + 4 * shape.intermediate
        layer = 16.0 * shape.hidden + self.value_bytes * values
        if train.gradient_checkpointing:
            return 4.0 * shape.hidden * shape.layers + 2 * layer
        return layer * shape.layers

    @property
    def max_tokens_that_fit(self) -> int:
        """Of a micro-batch, beside all else on a training GPU."""
        free = self.gpu.memory_gib * GIB - sum(self.fixed_items.values())
        return int(free / self.activation_bytes)

    @property
    def _train_remedy(self) -> str:
        """One set of changes that fits, with no more of them than it takes; empty: it fits."""
        longest, train = self.config.max_tokens_per_trajectory, self.config.train
        tried, texts = self, []
        for key, value in REMEDIES.items():
            is_useless = key == "shard_optimizer" and self.config.devices.train == 1
            if tried.max_tokens_that_fit >= longest or getattr(train, key) or is_useless:
                continue
            tried = tried.changed("train", **{key: value})
            texts.append(f"set train.{key} = {str(value).lower()}")
        fit = tried.max_tokens_that_fit
        if fit < longest:
            return "take a smaller model or shorter answers: every training GPU holds all of it"
        if fit < train.max_tokens:
            texts.append(f"lower train.max_tokens to {max(longest, fit // 256 * 256):,}")
        return ", ".join(texts)

    @property
    def costs(self) -> Costs:
        gpu, shape, train = self.gpu, self.shape, self.config.train
        devices, num = self.config.devices, shape.num_parameters
        flops = 1e12 * (gpu.bf16_tflops if self.value_bytes == 2 else gpu.fp32_tflops)
        prefill, bandwidth = flops * PREFILL * devices.tensor_parallel, gpu.bandwidth_gb_s * 1e9
        weights, kv_bytes = self.engine_bytes
        attention = shape.layers * shape.heads * shape.head_dim * self.lengths.mean_tokens
        forward = 2.0 * (num + attention)
        passes = 3.0 + train.gradient_checkpointing  # backward is two
        passes *= 2 if train.estimator == "gae" else 1
        passes += bool(train.kl_coef) + (train.num_minibatches > 1)  # reference, proximal policy
        update_s = 28.0 * num / bandwidth  # the optimizer, and the sum of gradients
        update_s += 8.0 * num / (gpu.link_gb_s * 1e9) if devices.train > 1 else 0.0
        publish_s = num * self.value_bytes / HOST_BYTES_S
        kv_s = kv_bytes * self.lengths.mean_context / (bandwidth * DECODE)
        return Costs(
            step=STEP_S + weights / (bandwidth * DECODE),
            step_per_seq=STEP_PER_SEQ_S + 2.0 * num / prefill + kv_s,
            prefill=forward / prefill * self.lengths.prompt / self.config.rollout.group_size,
            reload=weights / HOST_BYTES_S,
            reload_per_seq=forward / prefill * self.lengths.mean_context,
            train=train.num_minibatches * update_s + publish_s,
            train_per_token=forward * passes / (flops * TRAIN * devices.train),
        )

    @cached_property
    def outcome(self) -> Throughput:
        num_warm = min(30, self.config.buffer.max_staleness + 3)
        simulation = Simulation(self.config, self.costs, self.lengths, max(1, self.max_running))
        return simulation.run(min(60, 2 * num_warm + 6), num_warm)

    @property
    def fits(self) -> bool:
        return not self.train_bill.remedy and not self.rollout_bill.remedy

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


def tables(plan: Plan, num_gpus: int) -> Iterator[list[tuple[str, ...]]]:
    """The memory of the recommended split, and all splits."""
    found = splits(plan, num_gpus)
    best = recommended(found)
    path, num, tokens = best.config.model.path, best.shape.num_parameters, best.lengths.mean_tokens
    yield [
        ("model", f"{path}: {num / 1e9:.2f} B parameters", ""),
        ("rollout GPU", *best.rollout_bill.row),
        ("", f"KV of {best.max_running:,} answers of the usual {tokens:,.0f} tokens at once", ""),
        ("training GPU", *best.train_bill.row),
    ]
    idle = sentence(best.config, (best.outcome.engines_idle, best.outcome.trainer_idle))
    advice = f"<- take this{'' if best.fits else ', once it fits'}; {idle}"
    head = ("split", "tokens/s", "engines idle", "trainers idle", "staleness", "")
    yield [head, *((*s.row[:-1], advice) if s is best else s.row for s in found)]


def with_auto_split(config: Config, gpu: GpuKind | None) -> Config:
    """devices.split = "auto": as planned for the GPU, and the recipe's own on a GPU that is not in
    the table. The same recipe gives the same plan, so a resumed run keeps its split."""
    if gpu is None:
        return config
    num_gpus = config.devices.rollout + config.devices.train
    return recommended(splits(Plan(config, gpu, usual_lengths(config)), num_gpus)).config
