"""LoRA: low-rank adapters on every linear layer, trained while the model's own weights rest.

peft puts the layers in; only this file knows it. What leaves the trainer is always the merged
model: engines and checkpoints know nothing of adapters. A checkpoint has the adapter beside it, in
peft's own format, and training goes on from the model the run began with plus that adapter.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minirl.errors import MinirlError

NAME = "default"  # peft's name of an adapter
INSIDE = ".base_layer."  # where peft moves a layer's own weights
PREFIX = "base_model.model."  # before every name in an adapter's file
FILE = "adapter_model.safetensors"


def add_adapters(model: nn.Module, rank: int) -> None:
    """In place. B starts at 0: the first forward is the model's own."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MinirlError(
            f'train.lora_rank = {rank} needs peft ({error}): pip install "minirl[lora]"'
        ) from None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    inject_adapter_in_model(config, model)


def is_adapted(model: nn.Module) -> bool:
    return any(".lora_" in name for name, _ in model.named_parameters())


def own_names(model: nn.Module) -> list[str]:
    """Of the parameters that the model has without adapters."""
    names = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    return [name.replace(INSIDE, ".") for name in names]


def merged(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The weights under the names of the model without adapters, each computed when asked for, so
    that a publication never has a second model in memory."""
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    weights: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in model.state_dict().items():
        layer, inside, rest = name.rpartition(INSIDE)
        if inside and rest == "weight":
            weights[f"{layer}.weight"] = _sum_of(tensor, adapted[layer])
        elif inside:
            weights[f"{layer}.{rest}"] = _just(tensor)
        elif ".lora_" not in name:
            weights[name] = _just(tensor)
    return weights


def _just(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _sum_of(tensor: Tensor, layer: nn.Module) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        with torch.no_grad():
            return tensor + layer.get_delta_weight(NAME)  # type: ignore[operator]

    return compute


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield PREFIX + name.replace(f".{NAME}.", "."), parameter


def save_adapter(model: nn.Module, folder: Path, base: str) -> None:
    """As peft's `PeftModel.from_pretrained` reads it."""
    folder.mkdir(parents=True)
    tensors = {name: p.detach().cpu().contiguous() for name, p in _adapters(model)}
    save_file(tensors, folder / FILE)
    config: Any = cast(Any, model).peft_config[NAME]
    config.base_model_name_or_path, config.task_type = base, "CAUSAL_LM"
    config.save_pretrained(folder)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    found = load_file(folder / FILE)
    for name, parameter in _adapters(model):
        parameter.copy_(found[name])
