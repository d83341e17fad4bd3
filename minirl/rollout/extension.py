"""The part of minirl that runs inside vLLM's own worker, once per tensor-parallel rank.

Takes a slot number of the weight store, copies the tensors into the running model in place, and
gives the names of tensors that did not arrive (rule 6). Only small values cross vLLM's border.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minirl import devices
from minirl.shm.weights import TensorSpec, WeightStore

devices.keep_weights_writable()  # vLLM imports this file before it builds the model

SAMPLES_PER_AXIS = 16  # what the check after a load compares of each tensor


class Reloader:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`)."""

    def open_store(self, table: list[tuple[str, tuple[int, ...]]], dtype: str, path: str) -> None:
        devices.remember_segments()
        specs = tuple(TensorSpec(name, tuple(shape)) for name, shape in table)
        self._store = WeightStore.open(specs, dtype, path)

    def load_slot(self, slot: int) -> list[str]:
        """Loads a slot. vLLM's loaders write in place, so captured graphs stay valid."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        model.load_weights(self._store.views(slot))  # type: ignore[operator]
        return list(absent(model, dict(self._store.views(slot))))

    def reseed(self, seed: int) -> None:
        torch.manual_seed(seed)


def absent(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[str]:
    """Names whose values the model does not hold, compared on a grid of samples of each tensor.

    Tensors that are sharded over tensor-parallel ranks are left to the canary.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    for name, tensor in weights.items():
        place = find_place(name, shapes, parameters, getattr(model, "packed_modules_mapping", {}))
        if place is None:
            yield name
            continue
        parameter = parameters[place.parameter]
        held = parameter[place.first_row : place.first_row + tensor.shape[0]]
        is_sharded = place.num_rows > parameter.shape[0] or held.shape != tensor.shape
        grid = tuple(slice(None, None, max(1, size // SAMPLES_PER_AXIS)) for size in tensor.shape)
        if not is_sharded and not torch.equal(held[grid].cpu(), tensor[grid].to(held.dtype)):
            yield name


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor lies in the engine: vLLM fuses q, k and v, and gate and up."""

    parameter: str
    first_row: int
    num_rows: int  # of all the tensors that were fused, before any sharding


def find_place(
    name: str,
    shapes: dict[str, torch.Size],
    parameters: dict[str, torch.nn.Parameter],
    packed: dict[str, list[str]],
) -> Place | None:
    if name in parameters:
        return Place(name, 0, shapes[name][0])
    for fused, parts in packed.items():
        for i, part in enumerate(parts):
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                rows = [shapes[name.replace(f".{part}.", f".{other}.")][0] for other in parts]
                return Place(target, sum(rows[:i]), sum(rows))
    return None
