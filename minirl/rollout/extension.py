"""The part of minirl that runs inside vLLM's own worker, once per tensor-parallel rank.

Takes a slot number of the weight store, copies the tensors into the running model in place, and
gives the names of tensors that did not arrive (rule 6). Only small values cross vLLM's border.
"""

from collections.abc import Iterator

import torch

from minirl.shm.weights import TensorSpec, WeightStore

SAMPLES_PER_AXIS = 16  # what the check after a load compares of each tensor


class Reloader:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`)."""

    def open_store(self, table: list[tuple[str, tuple[int, ...]]], dtype: str, path: str) -> None:
        specs = tuple(TensorSpec(name, tuple(shape)) for name, shape in table)
        self._store = WeightStore.open(specs, dtype, path)

    def load_slot(self, slot: int) -> list[str]:
        """Loads a slot. vLLM's loaders write in place, so captured graphs stay valid."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        model.load_weights(self._store.views(slot))  # type: ignore[operator]
        return list(absent(model, dict(self._store.views(slot))))


def absent(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[str]:
    """Names whose values the model does not hold, compared on a grid of samples of each tensor."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        target, row = _place(
            name, weights, parameters, getattr(model, "packed_modules_mapping", {})
        )
        if target is None:
            yield name
            continue
        held = parameters[target][row : row + tensor.shape[0]]
        if held.shape != tensor.shape:  # sharded over ranks: the canary alone vouches for these
            continue
        grid = tuple(slice(None, None, max(1, size // SAMPLES_PER_AXIS)) for size in tensor.shape)
        if not torch.equal(held[grid].cpu(), tensor[grid].to(held.dtype)):
            yield name


def _place(
    name: str,
    weights: dict[str, torch.Tensor],
    parameters: dict[str, torch.nn.Parameter],
    packed: dict[str, list[str]],
) -> tuple[str | None, int]:
    """Which parameter holds a checkpoint's tensor, and from which row on: vLLM fuses q, k, v."""
    if name in parameters:
        return name, 0
    for fused, parts in packed.items():
        for i, part in enumerate(parts):
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                before = [name.replace(f".{part}.", f".{earlier}.") for earlier in parts[:i]]
                return target, sum(weights[other].shape[0] for other in before)
    return None, 0
