"""What a recipe needs and what it would do, on GPUs that need not be here: `minirl plan`.

Takes a recipe, a kind of GPU and the lengths of answers; gives the memory bill of a rollout GPU and
of a training GPU with the numbers to change, and every split of the GPUs, simulated, with the one
to take. `devices.split = "auto"` takes that one when a run starts. docs/planning.md says how far to
trust it. Memory is an estimate on the safe side: what the libraries keep is a round number.

Leaves out: torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minirl.balance import Balance
from minirl.buffer import Buffer, OnStale
from minirl.config import TINY, Config
from minirl.errors import RecipeError
from minirl.recipe import find_model, load, read_model_config
from minirl.tools.simulate import Costs, Lengths, Outcome, Setup, Simulation, with_mean

GIB = 2**30
LIBRARIES = 1.5 * GIB  # CUDA context, NCCL, cuBLAS
ENGINE_WORK = 1.5 * GIB  # activations and CUDA graphs of an engine, inside its share
LOGITS_CHUNK = 1024  # rows (train/policy.py)

# Shares of the data sheet's rates that are reached. TRAIN and STEP_S were fitted on two of the four
# rows of the paper's table 7 (docs/planning.md); the others are round numbers.
TRAIN = 0.4  # of the compute rate, packed sequences
PREFILL = 0.5
DECODE = 0.75  # of the memory bandwidth
STEP_S = 0.0035  # launches, scheduling and sampling of an engine step
STEP_PER_SEQ_S = 10e-6  # bookkeeping of one sequence in a step
HOST_GB_S = 20.0  # to and from shared memory
BETWEEN_BOXES_GB_S = 40.0  # of one GPU, 8 to a box

USUAL_SHARE = 0.4  # of max_new_tokens that an answer has, where nothing is known
AS_GOOD = 0.98  # of the best throughput: then the freshest data wins
MAX_STEPS = 60  # simulated
MAX_SPLITS = 16  # of one number of GPUs
# What makes room on a training GPU.
CHEAPEST_FIRST: dict[str, Any] = {
    "gradient_checkpointing": True,
    "shard_optimizer": True,
    "lora_rank": 32,
}


@dataclass(frozen=True)
class Gpu:
    """From its maker's data sheet. Dense rates, no sparsity."""

    name: str
    memory_gib: float  # as the driver reports it
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    link_gb_s: float  # to the other GPUs of the box, one way


GPUS = {
    "H100": Gpu("H100", 79.6, 989, 67, 3350, 450),
    "H800": Gpu("H800", 79.6, 989, 67, 3350, 200),
    "A100-80": Gpu("A100-80", 79.3, 312, 19.5, 2039, 300),
    "A100-40": Gpu("A100-40", 39.4, 312, 19.5, 1555, 300),
    "L40S": Gpu("L40S", 44.9, 362, 91.6, 864, 25),
    "4090": Gpu("4090", 24.0, 165, 82.6, 1008, 25),
    "3090": Gpu("3090", 24.0, 71, 35.6, 936, 25),
}


def gpu_named(name: str) -> Gpu:
    if gpu := GPUS.get(name.upper()):
        return gpu
    raise RecipeError("--gpu", name, "is not in the table", f"one of {', '.join(GPUS)}")


def recognise(device_name: str, memory_bytes: float) -> Gpu | None:
    """From what a driver calls it, such as "NVIDIA A100-SXM4-40GB"."""
    near = [gpu for gpu in GPUS.values() if abs(gpu.memory_gib * GIB / memory_bytes - 1) < 0.15]
    return next((gpu for gpu in near if gpu.name.partition("-")[0] in device_name), None)


@dataclass(frozen=True)
class Shape:
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
    def num_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def num_adapted(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    TINY: Shape(2, 128, 4, 2, 32, 256, 384, True),
    "Qwen2.5-0.5B": Shape(24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": Shape(28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": Shape(28, 1536, 12, 2, 128, 8960, 151936, False),
}


def shape_of(config: Config) -> Shape:
    """Of the recipe's model: from its folder or the local cache if it is there."""
    path = config.model.path
    if path != TINY and (folder := find_model(config)) is not None:
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
    remedy: str = ""  # empty: it fits
    kv_tokens: int = 0  # of one engine

    @property
    def row(self) -> tuple[str, str]:
        parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in self.items.items())
        total, available = sum(self.items.values()) / GIB, self.available / GIB
        verdict = f"TOO BIG: {self.remedy}" if self.remedy else "ok"
        return f"{parts} = {total:.1f} of {available:.1f} GiB", verdict


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def rollout_bill(config: Config, gpu: Gpu, shape: Shape) -> Bill:
    """An engine has devices.tensor_parallel GPUs."""
    width, size = config.devices.tensor_parallel, bytes_of(config.model.dtype)
    share = config.rollout.memory_fraction * gpu.memory_gib * GIB
    weights = shape.num_parameters * size / width
    kv = max(0.0, share - weights - ENGINE_WORK)
    tokens = int(kv * width / (shape.kv_values_per_token * size))
    longest, remedy = config.max_tokens_per_trajectory, ""
    if not kv:
        remedy = "raise devices.tensor_parallel or rollout.memory_fraction, or take a smaller model"
    elif tokens < longest:
        remedy = f"lower rollout.max_new_tokens: one answer needs {longest:,} tokens of KV"
    return Bill({"weights": weights, "engine": ENGINE_WORK, "KV cache": kv}, share, remedy, tokens)


def train_bill(config: Config, gpu: Gpu, shape: Shape, num_ranks: int) -> Bill:
    activations = config.train.max_tokens * activation_bytes(config, shape)
    items = {**fixed_items(config, shape, num_ranks), "activations": activations}
    is_too_big = sum(items.values()) > gpu.memory_gib * GIB
    remedy = _train_remedy(config, gpu, shape, num_ranks) if is_too_big else ""
    return Bill(items, gpu.memory_gib * GIB, remedy)


def fixed_items(config: Config, shape: Shape, num_ranks: int) -> dict[str, float]:
    """All but activations: float32 weights, gradients and AdamW on every rank (DDP)."""
    num, train = shape.num_parameters, config.train
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
        "bfloat16 copies": 2.0 * num if bytes_of(config.model.dtype) == 2 else 0.0,
        "logits chunk": 3 * 4.0 * LOGITS_CHUNK * shape.vocab + 4.0 * shape.vocab * shape.hidden,
        "libraries": LIBRARIES,
    }
    return {name: size for name, size in items.items() if size}


def activation_bytes(config: Config, shape: Shape) -> float:
    """Of one token, kept for backward. The residual stream and the norms are float32."""
    size = bytes_of(config.model.dtype)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = 4.0 * 4 * shape.hidden + size * (
        3 * shape.hidden + 2 * qkv + shape.heads * shape.head_dim + 4 * shape.intermediate
    )
    if config.train.gradient_checkpointing:
        return 4.0 * shape.hidden * shape.layers + 2 * layer
    return layer * shape.layers


def _train_remedy(config: Config, gpu: Gpu, shape: Shape, num_ranks: int) -> str:
    """One set of changes that fits, with no more of them than it takes."""
    longest, train = config.max_tokens_per_trajectory, config.train
    possible = [(key, value) for key, value in CHEAPEST_FIRST.items() if not getattr(train, key)]
    possible = [pair for pair in possible if num_ranks > 1 or pair[0] != "shard_optimizer"]
    for num_changes in range(len(possible) + 1):
        changes = dict(possible[:num_changes])
        tried = replace(config, train=replace(train, **changes))
        free = gpu.memory_gib * GIB - sum(fixed_items(tried, shape, num_ranks).values())
        fit = int(free / activation_bytes(tried, shape))
        if fit >= longest:
            fit = max(longest, fit // 256 * 256)
            texts = [f"set train.{key} = {str(value).lower()}" for key, value in changes.items()]
            texts += [f"lower train.max_tokens to {fit:,}"] if fit < train.max_tokens else []
            return ", ".join(texts)
    return "take a smaller model or shorter answers: every training GPU holds all of it"


def costs(config: Config, gpu: Gpu, shape: Shape, num_train: int, mean_tokens: float) -> Costs:
    """`mean_tokens`: of a whole trajectory, which its attention costs depend on."""
    width, size = config.devices.tensor_parallel, bytes_of(config.model.dtype)
    num, rate = shape.num_parameters, gpu.bf16_tflops if size == 2 else gpu.fp32_tflops
    flops, bandwidth = 1e12 * rate, gpu.bandwidth_gb_s * 1e9 * DECODE * width
    forward = 2.0 * num + 2.0 * shape.layers * shape.heads * shape.head_dim * mean_tokens
    link = gpu.link_gb_s if num_train <= 8 else BETWEEN_BOXES_GB_S
    gradients_s = 2 * 4.0 * num / (link * 1e9) if num_train > 1 else 0.0
    optimizer_s = 28.0 * num / (gpu.bandwidth_gb_s * 1e9)
    host_s = num * size / (HOST_GB_S * 1e9)
    return Costs(
        step_s=STEP_S + num * size / bandwidth,
        step_per_seq_s=STEP_PER_SEQ_S + 2.0 * num / (flops * PREFILL * width),
        step_per_context_s=shape.kv_values_per_token * size / bandwidth,
        prefill_per_token_s=forward / (flops * PREFILL * width),
        reload_s=host_s / width,
        train_per_token_s=forward * passes(config) / (flops * TRAIN * num_train),
        train_fixed_s=config.train.num_minibatches * (gradients_s + optimizer_s) + host_s,
    )


def passes(config: Config) -> float:
    """The compute of a trained token, in forward passes: backward is two."""
    train = config.train
    is_ratio = train.objective != "naive" and train.proximal == "forward"
    has_proximal = train.num_minibatches > 1 and is_ratio
    learner = 3.0 + train.gradient_checkpointing
    critic = learner + 1 if train.estimator == "gae" else 0.0  # and its values before the step
    return learner + has_proximal + bool(train.kl_coef) + critic


@dataclass(frozen=True)
class Split:
    rollout: int
    train: int
    outcome: Outcome
    fits: bool  # in memory: the fewer training GPUs share an optimizer, the more each holds

    @property
    def row(self) -> tuple[str, ...]:
        o, pools = self.outcome, f"{self.rollout} + {self.train}"
        idle = f"{o.engines_idle:.0%}", f"{o.trainer_idle:.0%}"
        return pools, f"{o.tokens_per_s:,.0f}", *idle, f"{o.staleness_mean:.2f}"

    @property
    def balance(self) -> Balance:
        o = self.outcome
        return Balance(self.rollout, self.train, o.engines_idle, o.trainer_idle)


def usual_lengths(config: Config, mean: float | None = None) -> Lengths:
    limit = config.rollout.max_new_tokens
    return with_mean(mean or USUAL_SHARE * limit, limit, config.tasks.max_prompt_tokens // 2)


@dataclass(frozen=True)
class Plan:
    """A recipe on GPUs of one kind, with answers of these lengths."""

    config: Config
    gpu: Gpu
    lengths: Lengths

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.config)

    @property
    def mean_tokens(self) -> float:
        return self.lengths.mean + self.lengths.prompt

    @cached_property
    def rollout_bill(self) -> Bill:
        return rollout_bill(self.config, self.gpu, self.shape)

    @property
    def max_running(self) -> int:
        """Sequences of the usual length that one engine decodes at once."""
        fit = int(self.rollout_bill.kv_tokens / self.mean_tokens)
        return min(self.config.rollout.max_num_seqs, fit)

    def simulate(self, rollout: int, train: int) -> Outcome:
        config = self.config
        eta, size = config.buffer.max_staleness, config.train.batch_size
        num_warm = min(MAX_STEPS // 2, eta + 3)
        setup = Setup(
            costs=costs(config, self.gpu, self.shape, train, self.mean_tokens),
            lengths=self.lengths,
            num_engines=rollout // config.devices.tensor_parallel,
            max_running=max(1, self.max_running),
            group_size=config.rollout.group_size,
            num_steps=min(MAX_STEPS, 2 * num_warm + 6),
            num_warm=num_warm,
            recomputes=config.rollout.on_update == "recompute",
            seed=config.seed,
        )
        target = config.buffer.target_staleness if eta else None
        buffer = Buffer(size, eta, OnStale(config.buffer.on_stale), target_staleness=target)
        return Simulation(setup, buffer).run()

    def splits(self, num_gpus: int) -> list[Split]:
        found = []
        for rollout, train in possible(self.config, num_gpus):
            fits = not train_bill(self.config, self.gpu, self.shape, train).remedy
            found.append(Split(rollout, train, self.simulate(rollout, train), fits))
        return found

    def memory_rows(self, num_gpus: int) -> Iterator[tuple[str, ...]]:
        config, bill = self.config, self.rollout_bill
        num_billions = self.shape.num_parameters / 1e9
        yield "model", f"{config.model.path}: {num_billions:.2f} B parameters", ""
        yield "rollout GPU", *bill.row
        fit = f"{self.max_running:,} answers of the usual {self.mean_tokens:,.0f} tokens at once"
        yield "", f"{bill.kv_tokens:,} KV tokens: {fit}", ""
        # As many as can train share an optimizer; split_rows says where it is too big for fewer.
        num_train = max(1, num_gpus - config.devices.tensor_parallel)
        yield "training GPU", *train_bill(config, self.gpu, self.shape, num_train).row

    def split_rows(self, num_gpus: int) -> Iterator[tuple[str, ...]]:
        found = self.splits(num_gpus)
        best = recommended(found)
        yield "split", "tokens/s", "engines idle", "trainers idle", "staleness", ""
        for split in found:
            advice = "" if split.fits else "too big"
            if split is best:
                is_synchronous = self.config.is_synchronous
                sentence = split.balance.sentence(is_synchronous=is_synchronous)
                advice = f"<- take this{'' if split.fits else ', once it fits'}; {sentence}"
            yield *split.row, advice


def possible(config: Config, num_gpus: int) -> list[tuple[int, int]]:
    """Pairs of (rollout, train); with many GPUs only some of them."""
    width = config.devices.tensor_parallel
    share = config.train.batch_size // config.train.num_minibatches * config.rollout.group_size
    pairs = [(n, num_gpus - n) for n in range(width, num_gpus, width) if num_gpus - n <= share]
    if not pairs:
        rule = f"{num_gpus} cannot be split into engines of {width} and at least one to train"
        raise RecipeError("--num", num_gpus, rule, f"take {width + 1} or more")
    return pairs[:: -(-len(pairs) // MAX_SPLITS)]


def recommended(found: Sequence[Split]) -> Split:
    """Of those that fit; of all, where none does."""
    usable = [split for split in found if split.fits] or found
    best = max(split.outcome.tokens_per_s for split in usable)
    good = [split for split in usable if split.outcome.tokens_per_s >= AS_GOOD * best]
    return min(good, key=lambda split: (split.outcome.staleness_mean, split.train))


def with_auto_split(config: Config, gpu: Gpu | None, resumed: Path | None) -> Config:
    """devices.split = "auto": as planned for the GPU, and the recipe's own on a GPU that is not in
    the table. A run that is resumed on as many devices keeps the split in its recipe.toml."""
    own = config.devices
    total = own.rollout + own.train
    before = load(resumed / "recipe.toml").config.devices if resumed else own
    if resumed and before.rollout + before.train == total:
        own = replace(own, rollout=before.rollout, train=before.train)
    elif gpu is not None:
        best = recommended(Plan(config, gpu, usual_lengths(config)).splits(total))
        own = replace(own, rollout=best.rollout, train=best.train)
    return replace(config, devices=own)
