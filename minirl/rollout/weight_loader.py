"""The part of minirl that runs inside vLLM's own worker, once per tensor-parallel rank.

Takes a slot number of the weight store, copies the tensors into the running model in place, and
gives the names of tensors that did not arrive (rule 6). Only small values cross vLLM's border.
"""

import numpy as np
import torch

from minirl import devices
from minirl.shm.weights import TensorSpec, WeightStore

devices.keep_weights_writable()  # vLLM imports this file before it builds the model

SAMPLES_PER_AXIS = 16  # what the check after a load compares of each tensor


class WeightLoader:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`)."""

    def open_store(self, table: tuple[TensorSpec, ...], dtype: str, path: str) -> None:
        self._store = WeightStore(table, dtype, path)
        self._loaded: LoadedTensors | None = None

    def load_slot(self, slot: int) -> list[str]:
        """Loads a slot in place, so that captured graphs stay valid."""
        weights = dict(self._store.views(slot))
        if self._loaded is not None and self._loaded.is_outdated:
            self._loaded = None
        self.copy(weights)
        if self._loaded is None:
            self._loaded = LoadedTensors(self.model_runner.model, weights)  # type: ignore[attr-defined]
        return self._loaded.absent(weights)

    def copy(self, weights: dict[str, torch.Tensor]) -> None:
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        if self._loaded is None:
            model.load_weights(weights.items())  # type: ignore[operator]
        else:
            self._loaded.load(model, weights)

    def reseed(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # where vLLM's model runner V2 draws seeds of requests


class LoadedTensors:
    """Where vLLM's own loader put each tensor, found once, right after it ran. For a small model
    that loader takes ten times as long as the copy itself. So tensors that lie in the model as they
    were published, every value compared, are copied there directly from then on; others, such as
    those sharded over tensor-parallel ranks, go through vLLM each time."""

    def __init__(self, model: torch.nn.Module, weights: dict[str, torch.Tensor]):
        parameters = dict(model.named_parameters())
        self._addresses = [(p, p.data_ptr()) for p in parameters.values()]
        self._unplaced: list[str] = []
        self._held: dict[str, torch.Tensor] = {}
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        packed = getattr(model, "packed_modules_mapping", {})
        for name, tensor in weights.items():
            place = find_place(name, shapes, parameters, packed)
            if place is None:
                self._unplaced.append(name)
                continue
            target, first_row, num_rows = place
            parameter = parameters[target].detach()
            held = parameter[first_row : first_row + tensor.shape[0]]
            if num_rows <= parameter.shape[0] and held.shape == tensor.shape:  # else it is sharded
                self._held[name] = held
        self._direct = {n: held for n, held in self._held.items() if _is_equal(held, weights[n])}

    @property
    def is_outdated(self) -> bool:
        """Some parameter was given other memory than it had."""
        return any(parameter.data_ptr() != address for parameter, address in self._addresses)

    def load(self, model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
        direct = {name: held for name, held in self._direct.items() if name in weights}
        if direct:
            torch._foreach_copy_(list(direct.values()), [weights[name] for name in direct])
        others = [(name, w) for name, w in weights.items() if name not in self._direct]
        if others:
            model.load_weights(others)  # type: ignore[operator]

    def absent(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """Names whose values the model does not hold, by a grid of samples of each tensor. Tensors
        that are sharded are left to the canary."""
        sampled = {name: (_grid(held), _grid(weights[name])) for name, held in self._held.items()}
        return self._unplaced + [n for n, pair in sampled.items() if not _is_equal(*pair)]


def _grid(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(None, None, max(1, n // SAMPLES_PER_AXIS)) for n in tensor.shape)]


def _is_equal(held: torch.Tensor, published: torch.Tensor) -> bool:
    return torch.equal(held.cpu(), published.to(held.dtype))


def find_place(
    name: str,
    shapes: dict[str, torch.Size],
    parameters: dict[str, torch.nn.Parameter],
    packed: dict[str, list[str]],
) -> tuple[str, int, int] | None:
    """Where a checkpoint's tensor lies: the engine's parameter, its first row there, and how many
    rows that has before any sharding. vLLM fuses q, k and v, and gate and up."""
    if name in parameters:
        return name, 0, shapes[name][0]
    for fused, parts in packed.items():
        for i, part in enumerate(parts):
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                rows = [shapes[name.replace(f".{part}.", f".{other}.")][0] for other in parts]
                return target, sum(rows[:i]), sum(rows)
    return None
