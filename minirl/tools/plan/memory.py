"""The memory bill of a rollout GPU and of a training GPU, and which number to change.

Takes a recipe, a GPU and a model's shape, gives the items in bytes and a verdict. Estimates: what
the libraries keep for themselves is taken as a round number, on the safe side.
"""

from dataclasses import dataclass, replace

from minirl.config import Config
from minirl.tools.plan.gpus import GIB, Gpu
from minirl.tools.plan.shapes import Shape

LIBRARIES = 1.5 * GIB  # CUDA context, NCCL, cuBLAS
ENGINE_WORK = 1.5 * GIB  # activations and CUDA graphs of an engine, inside its share
LOGITS_CHUNK = 1024  # rows (train/policy.py)


@dataclass(frozen=True)
class Bill:
    items: tuple[tuple[str, float], ...]  # what, bytes
    available: float
    remedy: str  # empty: it fits

    @property
    def total(self) -> float:
        return sum(size for _, size in self.items)

    @property
    def is_ok(self) -> bool:
        return not self.remedy


@dataclass(frozen=True)
class RolloutBill(Bill):
    kv_tokens: int  # of one engine
    num_longest: int  # sequences of the greatest length that fit at once
    num_usual: int  # of the expected length; never above rollout.max_num_seqs


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def rollout_bill(config: Config, gpu: Gpu, shape: Shape, usual_tokens: float) -> RolloutBill:
    """Of one GPU; an engine has devices.tensor_parallel of them."""
    width, size = config.devices.tensor_parallel, bytes_of(config.model.dtype)
    share = config.rollout.memory_fraction * gpu.memory_bytes
    weights = shape.num_parameters * size / width
    kv = max(0.0, share - weights - ENGINE_WORK)
    tokens = int(kv * width / (shape.kv_values_per_token * size))
    longest = config.max_tokens_per_trajectory
    remedy = ""
    if not kv:
        wider = "raise devices.tensor_parallel"
        remedy = wider + " or rollout.memory_fraction, or take a smaller model"
    elif tokens < longest:
        remedy = f"lower rollout.max_new_tokens: one answer needs {longest:,} tokens of KV"
    usual = min(config.rollout.max_num_seqs, int(tokens / usual_tokens))
    items = (("weights", weights), ("engine", ENGINE_WORK), ("KV cache", kv))
    return RolloutBill(items, share, remedy, tokens, tokens // longest, usual)


def train_bill(config: Config, gpu: Gpu, shape: Shape, num_ranks: int) -> Bill:
    """float32 weights, gradients and AdamW on every rank (DDP); activations in model.dtype."""
    num, size, train = shape.num_parameters, bytes_of(config.model.dtype), config.train
    trained = shape.num_adapted(train.lora_rank) if train.lora_rank else num
    optimizer = 8.0 * trained / (num_ranks if train.shard_optimizer else 1)
    items = [("weights", 4.0 * num), ("gradients", 4.0 * trained), ("optimizer", optimizer)]
    if num_ranks > 1:
        items.append(("DDP buckets", 4.0 * trained))
    if train.estimator == "gae":  # of the same size, and always trained whole
        share = num_ranks if train.shard_optimizer else 1
        items.append(("critic", num * (8.0 + 8.0 / share + (4.0 if num_ranks > 1 else 0.0))))
    if train.kl_coef:
        items.append(("reference", 4.0 * num))
    if size == 2:
        items.append(("bfloat16 copies", 2.0 * num))
    activations = config.train.max_tokens * activation_bytes(config, shape)
    items.append(("activations", activations))
    logits = 3 * 4.0 * LOGITS_CHUNK * shape.vocab + 4.0 * shape.vocab * shape.hidden
    items.append(("logits chunk", logits))
    items.append(("libraries", LIBRARIES))
    fixed = sum(n for name, n in items if name != "activations")
    free = gpu.memory_bytes - fixed
    remedy = ""
    if free < activations:
        remedy = _train_remedy(config, shape, free, num_ranks)
    return Bill(tuple(items), gpu.memory_bytes, remedy)


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


def _train_remedy(config: Config, shape: Shape, free: float, num_ranks: int) -> str:
    longest = config.max_tokens_per_trajectory
    fit = int(free / activation_bytes(config, shape))
    if fit >= longest:
        return f"lower train.max_tokens to {max(longest, fit // 256 * 256):,}"
    thrifty = replace(config, train=replace(config.train, gradient_checkpointing=True))
    fit = int(free / activation_bytes(thrifty, shape))
    if fit < longest and num_ranks > 1 and not config.train.shard_optimizer:
        return "set train.shard_optimizer = true"
    if fit < 1 and not config.train.lora_rank:
        return "set train.lora_rank = 32, or take a smaller model: every training GPU holds it all"
    if fit < 1:
        return "take a smaller model: every training GPU holds all of it"
    if fit < longest:
        return f"shorten answers: at best {fit:,} tokens fit, and one needs {longest:,}"
    size = min(config.train.max_tokens, max(longest, fit // 256 * 256))
    return f"set train.gradient_checkpointing = true and train.max_tokens = {size:,}"
