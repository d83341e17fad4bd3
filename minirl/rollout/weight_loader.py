"""The part of minirl that runs inside vLLM's own worker, once per tensor-parallel rank.

Takes a slot number of the weight store, copies the tensors into the running model in place, and
gives the names of tensors that did not arrive (rule 6). Only small values cross vLLM's border.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minirl import devices
from minirl.shm.segment import opened
from minirl.shm.weights import TensorSpec, WeightStore

devices.keep_weights_writable()  # vLLM imports this file before it builds the model

Weights = dict[str, Tensor]
SIZES = "output_partition_sizes"  # vLLM's, of a fused layer: of each part, on this rank
SAMPLES_PER_AXIS = 16  # what the check after a load compares of each tensor


class WeightLoader:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`)."""

    rank: int  # these three are vLLM's
    model_runner: Any
    vllm_config: Any

    def open_store(self, table: tuple[TensorSpec, ...], dtype: str, path: str) -> None:
        self._store = WeightStore(table, dtype, opened(path))
        self._loaded: LoadedTensors | None = None
        if torch.cuda.is_available():
            devices.pin(self._store.memory)

    def load_slot(self, slot: int) -> list[str]:
        """Loads a slot in place, so that captured graphs stay valid."""
        stamp, weights = self._store.stamp(slot), dict(self._store.views(slot))
        if self._loaded and any(p.data_ptr() != at for p, at in self._loaded.addresses):
            self._loaded = None  # a parameter has moved to other memory
        self.copy(weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # for all copies: after this the slot may be overwritten
        loaded = self._loaded
        if loaded is None:
            num_ranks = self.vllm_config.parallel_config.tensor_parallel_size
            loaded = LoadedTensors(self.model_runner.model, weights, self.rank, num_ranks)
            if self._store.stamp(slot) == stamp:  # else the writer was here: compare again
                self._loaded = loaded
                if loaded.unplaced:  # a note in the worker's log
                    print("checked by the canary alone:", *loaded.unplaced, flush=True)
        return loaded.absent(weights)

    def copy(self, weights: Weights) -> None:
        if self._loaded is None:
            self.model_runner.model.load_weights(weights.items())
        else:
            self._loaded.load(self.model_runner.model, weights)

    def reseed(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # where vLLM's model runner V2 draws seeds of requests


class Piece(NamedTuple):
    """What this rank holds of a published tensor: all of it, or its slice."""

    held: Tensor  # a view into the engine's parameter
    of: tuple[slice, ...]  # the published tensor


class LoadedTensors:
    """Where vLLM's own loader put each tensor, found once, right after it ran: every value is
    compared. For a small model that loader takes ten times as long as the copy itself, so tensors
    that were found are copied there directly from then on. Tensors not found go through vLLM's
    loader each time: of these, a whole one counts as lost, and one in an unknown layout is left to
    the canary."""

    def __init__(self, model: nn.Module, weights: Weights, rank: int, num_ranks: int):
        parameters = dict(model.named_parameters())
        self.addresses = [(p, p.data_ptr()) for p in parameters.values()]
        self._pieces: dict[str, Piece] = {}
        self._lost, self.unplaced = list[str](), list[str]()
        for name, tensor in weights.items():
            region = find_region(model, parameters, name)
            piece = None if region is None else find_piece(region, tensor.shape, rank, num_ranks)
            if piece is not None and _is_equal(piece.held, tensor[piece.of]):
                self._pieces[name] = piece
            else:
                is_lost = piece is not None and piece.held.shape == tensor.shape
                (self._lost if is_lost else self.unplaced).append(name)

    def load(self, model: nn.Module, weights: Weights) -> None:
        pairs = [(p.held, weights[n][p.of]) for n, p in self._pieces.items() if n in weights]
        if pairs:
            held, sources = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(held, sources, non_blocking=True)
        others = [(name, w) for name, w in weights.items() if name not in self._pieces]
        if others:
            model.load_weights(others)  # type: ignore[operator]

    def absent(self, weights: Weights) -> list[str]:
        """Names whose values the model does not hold, by a grid of samples of each tensor."""
        found = self._pieces.items()
        pairs = ((n, _grid(piece.held), _grid(weights[n][piece.of])) for n, piece in found)
        return self._lost + [name for name, *pair in pairs if not _is_equal(*pair)]


def _grid(tensor: Tensor) -> Tensor:
    return tensor[tuple(slice(None, None, max(1, n // SAMPLES_PER_AXIS)) for n in tensor.shape)]


def _is_equal(held: Tensor, published: Tensor) -> bool:
    return torch.equal(held.cpu(), published.to(held.dtype))


def find_region(model: nn.Module, parameters: dict[str, nn.Parameter], name: str) -> Tensor | None:
    """The part of the engine's parameters that holds a checkpoint's tensor, or a shard of it. vLLM
    fuses q, k and v, and gate and up."""
    if name in parameters:
        return parameters[name].detach()
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for i, part in enumerate(parts):
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                layer = model.get_submodule(target.rpartition(".")[0])
                held, sizes = parameters[target].detach(), getattr(layer, SIZES, [])
                fits = len(sizes) == len(parts) and sum(sizes) == len(held)
                return held.split(sizes)[i] if fits else None
    return None


def find_piece(region: Tensor, shape: torch.Size, rank: int, num_ranks: int) -> Piece | None:
    """Where vLLM puts a tensor of this shape on a tensor-parallel rank: rows or columns are dealt
    out in order; a key-value head goes to several ranks where there are fewer heads than ranks;
    the vocabulary is padded at its end."""
    if region.ndim != len(shape):
        return None
    index = []
    for room, full in zip(region.shape, shape, strict=True):
        num_slices = max(1, -(-full // max(1, room)))
        start = min(full, room * (rank * num_slices // num_ranks))
        index.append(slice(start, min(full, start + room)))
    return Piece(region[tuple(slice(at.stop - at.start) for at in index)], tuple(index))
