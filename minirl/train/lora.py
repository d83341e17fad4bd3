"""LoRA: low-rank adapters on every linear layer, trained while the model's own weights rest.

peft puts the layers in; only this file knows it. What leaves the trainer is always the merged
model: engines and checkpoints know nothing of adapters. A checkpoint has the adapter beside it, in
peft's format; a resumed run loads the model that it began with, and the adapter's masters.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NAME = "default"  # peft's name of an adapter
INSIDE = ".base_layer."  # where peft moves a layer's own weights
ADAPTER = ".lora_"  # in the names of its weights
Weights = dict[str, Callable[[], Tensor]]  # by name, each computed when asked for
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def add_adapters(model: nn.Module, rank: int, dtype: torch.dtype) -> None:
    """In place. B starts at 0: the first forward is the model's own. Matrices that rest are kept in
    `dtype`, which products are computed in anyway; adapters are float32."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and ADAPTER not in name:
            parameter.data = parameter.data.to(dtype)


def merged(model: nn.Module) -> Weights:
    """The weights under the names of the model without adapters, each computed when asked for, so
    that a publication never has a second model in memory."""
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    adapted = {f"{name}{INSIDE}weight": layer for name, layer in layers.items()}
    return {
        name.replace(INSIDE, "."): partial(_merge, parameter.detach(), adapted.get(name))
        for name, parameter in model.named_parameters()
        if ADAPTER not in name
    }


@torch.no_grad()
def _merge(tensor: Tensor, layer: Any) -> Tensor:
    """Whole and, where it has an adapter, in float32. Of slices it is a collective."""
    return whole(tensor if layer is None else tensor.float() + layer.get_delta_weight(NAME))


def named(weights: Weights, name: str, fetch: Callable[[str], Tensor]) -> Tensor:
    """By its name in a checkpoint, where each expert of a mixture has tensors of its own, which
    transformers keeps in one: `fetch` gives that."""
    if (found := EXPERT.fullmatch(name)) is None:
        return weights[name]()
    layer, expert, part = found.groups()
    fused = "down_proj" if part == "down" else "gate_up_proj"
    own = fetch(f"{layer}.{fused}")[int(expert)]
    return own if part == "down" else own.chunk(2)[part == "up"]


def whole(tensor: Tensor) -> Tensor:
    """Of slices (FSDP2), gathered: a collective. Else the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter(model: nn.Module) -> Weights:
    """By the names that peft's file has, each gathered when asked for."""
    return {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": partial(whole, p.detach())
        for name, p in model.named_parameters()
        if ADAPTER in name
    }


def save_adapter(model: nn.Module, tensors: dict[str, Tensor], folder: Path, base: str) -> None:
    """As peft's `PeftModel.from_pretrained` reads it."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config: Any = cast(Any, model).peft_config[NAME]
    config.base_model_name_or_path, config.task_type = base, "CAUSAL_LM"
    config.save_pretrained(folder)
