"""The peak memory of a training step, counted on fake tensors: no byte of it is allocated.

Takes a recipe and a model's config, gives bytes: every storage is counted while it lives, through
two micro-batches of train.max_tokens, forward and backward, as the trainer runs them on CUDA.
What fake tensors cannot show is left out: CUDA's context, NCCL, workspaces and fragmentation.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from minirl.config import Config
from minirl.train import attention, lora, policy
from minirl.train.packing import Unit
from minirl.train.policy import Policy
from minirl.train.sharing import share

BLOCK_BYTES = 512  # CUDA's allocator rounds up to it
LENGTH = 512  # of a sequence: what attention keeps does not depend on it
WRITTEN = 0.8  # of all tokens: those whose logprobs are needed


class Counter(TorchDispatchMode):
    """Storages that were made since it began, and are alive."""

    def __init__(self, known: set[int]):
        super().__init__()
        self.known, self.now, self.peak = known, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, key, size)

    def remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_bytes(config: Config, shape: PretrainedConfig, units: Sequence[Unit] = ()) -> float:
    """Of one rank: weights, gradients, AdamW's state, activations and copies; with shared prompts,
    if there are units."""
    mode, shared = FakeTensorMode(allow_non_fake_inputs=True), share(units, "cpu")
    num_tokens = len(shared.unique_T) if shared else config.train.max_tokens
    num_needed = sum(sum(unit.answers) for unit in units) or int(WRITTEN * num_tokens)
    model, train, dtype = faked(shape, mode), config.train, getattr(torch, config.model.dtype)
    with ExitStack() as stack:
        stack.enter_context(mode)
        if train.lora_rank:
            with patch.object(nn.Module, "to", lambda module, *_, **__: module):  # as all are fake
                lora.add_adapters(model, train.lora_rank, dtype)
            model.enable_input_require_grads()
        tokens_T = torch.empty(num_tokens, dtype=torch.int64)
        ends = torch.empty(num_tokens // LENGTH + 1, dtype=torch.int32)
        bounds = attention.Boundaries(tokens_T, ends, LENGTH)
        needed = lambda self: tokens_T[:num_needed, None]  # noqa: E731
        stack.enter_context(patch.object(attention, "VARLEN_ON", {"cpu"}))
        stack.enter_context(patch.object(policy, "AUTOCAST_ON", {"cpu"}))
        stack.enter_context(patch.object(Tensor, "nonzero", needed))
        if train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.get_input_embeddings().register_forward_hook(policy.widen)
        own = Policy(model, dtype).train()
        known = {p.untyped_storage()._cdata for p in own.parameters()}
        counter = stack.enter_context(Counter(known))
        for _ in range(2):
            logprobs_T, _entropy_T = own(tokens_T, bounds, shared=shared)
            logprobs_T.sum().backward()
            del logprobs_T, _entropy_T
    shards = config.devices.train if train.shard == "optimizer" else 1
    trained = sum(p.numel() for p in own.parameters() if p.requires_grad)
    return sum(p.nbytes for p in own.parameters()) + 8.0 * trained / shards + counter.peak


def faked(shape: PretrainedConfig, mode: FakeTensorMode) -> Any:
    """The model, each tensor a fake one; tied ones stay tied."""
    with mode:
        return AutoModelForCausalLM.from_config(
            shape, attn_implementation=attention.NAME, dtype=torch.float32
        )
