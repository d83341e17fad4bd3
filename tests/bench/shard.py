"""The shard bench: what FSDP2 costs in time and saves in memory, against DDP.

full_over_ddp              tokens/s of two ranks with train.shard = "full" / with "none", each
                           on one core, through gloo: no measure of NVLink
counted_gib_none, …        peak memory of one of four ranks of a Qwen3-0.6B, counted on fake
                           tensors: slices, what is gathered, gradients, AdamW's state, a
                           micro-batch; and "held": with gradients that wait for the last
                           micro-batch before they are summed and sliced
bill_over_counted          the plan's bill of such a rank with "full" / counted, and the inverse:
counted_over_bill          neither may be above 1.05
bill_over_counted_none, …  the same for the others
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig, Qwen3Config

from minirl.config import Config, DevicesConfig, ModelConfig, TrainConfig
from minirl.devices import Placement
from minirl.tools.plan import GIB, GPUS, LIBRARIES, SHAPES, Plan, usual_lengths
from minirl.train import attention, optimizer, policy
from minirl.train.optimizer import own_slice, placed
from minirl.train.policy import Policy
from tests.bench import Figure, Options, at_most, median
from tests.bench.batches import draw, write_model
from tests.bench.models import SHAPES as MODELS
from tests.bench.processes import processes
from tests.bench.train import QUICK, SIZES
from tests.bench.two_ranks import tokens_per_s
from tests.fake_memory import BLOCK_BYTES, LENGTH, WRITTEN, Counter, faked, peak_bytes

NAME, NUM_RANKS = "Qwen3-0.6B", 4
HF_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
HF_NAMES += ("head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings")


class SliceCounter(Counter):
    """Follows storages that FSDP2 empties and fills again, too."""

    def __init__(self) -> None:
        super().__init__(set())
        self.sizes: dict[int, int] = {}
        self.resize = torch.UntypedStorage.resize_

    def add(self, storage: torch.UntypedStorage) -> None:
        self.sizes.setdefault(storage._cdata, _blocks(storage.nbytes()))
        super().add(storage)

    def remove(self, key: int, size: int) -> None:
        super().remove(key, self.sizes.pop(key))

    def resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        if storage._cdata in self.sizes:
            self.now += _blocks(size) - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = _blocks(size)
            self.peak = max(self.peak, self.now)
        return self.resize(storage, size)


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def counted_bytes(config: Config, sizes: PretrainedConfig, is_held: bool = False) -> float:
    """Of one of devices.train ranks. `is_held`: gradients are summed in the last backward only."""
    if config.train.shard != "full":
        return peak_bytes(config, sizes)
    with _fake_ranks(config.devices.train):
        return _sliced_bytes(config, sizes, is_held)


@contextmanager
def _fake_ranks(num: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num)
    yield
    dist.destroy_process_group()


def _sliced_bytes(config: Config, sizes: PretrainedConfig, is_held: bool) -> float:
    mode, num = FakeTensorMode(allow_non_fake_inputs=True), config.train.max_tokens

    def fake(size: Any, dtype: torch.dtype) -> Tensor:
        with mode:
            empty = torch.empty(size, dtype=dtype, device="meta")
            return FakeTensor(mode, empty, torch.device("cpu"))

    ends = fake(num // LENGTH + 1, torch.int32)
    bounds = attention.Boundaries(fake(num, torch.int64), ends, LENGTH)
    needed = fake((int(WRITTEN * num), 1), torch.int64)
    setup: Any = SimpleNamespace(config=config, num_ranks=2, placement=Placement("cpu"))
    model, counter = faked(sizes, mode), SliceCounter()
    model.get_input_embeddings().register_forward_hook(policy.widen)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with ExitStack() as stack:
        for target, name, value in (
            (attention, "VARLEN_ON", {"cpu"}),
            (policy, "AUTOCAST_ON", {"cpu"}),
            (Tensor, "nonzero", lambda self: needed),
            (
                optimizer,
                "init_device_mesh",
                lambda *_: mesh,
            ),  # it reads numbers: not of fake tensors
            (torch.UntypedStorage, "resize_", lambda s, size: counter.resized(s, size)),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(mode)
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own: Any = placed(Policy(model, torch.bfloat16).train(), setup)
        slices = [own_slice(p.detach()) for p in own.parameters()]
        for part in slices:
            counter.add(part.untyped_storage())
        own.set_requires_gradient_sync(not is_held)
        stack.enter_context(counter)
        for _ in range(2):
            logprobs_T, _entropy_T = own(fake(num, torch.int64), bounds)
            logprobs_T.sum().backward()
            del logprobs_T, _entropy_T
    return counter.peak + 8.0 * sum(part.numel() for part in slices)


def measure(options: Options) -> list[Figure]:
    return [_speed(options), *_memory(4096 if options.is_quick else 16384)]


def _speed(options: Options) -> Figure:
    shape, size = MODELS[options.model], QUICK if options.is_quick else SIZES[options.model]
    drawn, speeds = draw(size, shape.vocab), {"none": [], "full": []}
    with processes(1) as here:
        folder = write_model(shape, here.folder / "model")
        for _ in range(2 if size.repeats > 1 else 1):
            for shard, found in speeds.items():
                config = size.config(lr=1e-6, shard=shard)
                found.append(tokens_per_s(folder, config, drawn, 2, size.repeats))
    ratio = median(speeds["full"]) / median(speeds["none"])
    return Figure("full_over_ddp", ratio, note="tokens/s, two ranks, one core each, gloo")


def _memory(num_tokens: int) -> Iterator[Figure]:
    train = TrainConfig(max_tokens=num_tokens, gradient_checkpointing=True)
    config = Config(model=ModelConfig(NAME, "bfloat16"), devices=DevicesConfig(train=NUM_RANKS))
    sizes = Qwen3Config(**dict(zip(HF_NAMES, SHAPES[NAME][:-1], strict=True)), pad_token_id=0)
    for shard in ("none", "optimizer", "full"):
        own = replace(config, train=replace(train, shard=shard))
        counted, end = counted_bytes(own, sizes), "" if shard == "full" else f"_{shard}"
        items = Plan(own, GPUS["H100"], usual_lengths(own)).bills[1].items
        billed = sum(items.values()) - sum(LIBRARIES.values())
        yield Figure(f"counted_gib_{shard}", counted / GIB, note=f"{NUM_RANKS} ranks, {NAME}")
        yield at_most(f"bill_over_counted{end}", billed / counted, 1.05)
        yield at_most(f"counted_over_bill{end}", counted / billed, 1.05)
    yield Figure("counted_gib_held", counted_bytes(own, sizes, is_held=True) / GIB)
