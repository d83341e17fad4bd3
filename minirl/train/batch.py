"""Stage 5, batch: from trajectories in shared memory to packed tensors.

Takes a Batch of descriptors, gives micro-batches of tokens packed end to end, on the device. It is
the last place where the bound can be enforced (rule 1): a token staler than η is masked out here,
whatever the buffer and the engines did.

Axes: T tokens of all sequences in a micro-batch, S1 sequences + 1, A tokens of the whole batch, in
the order of its trajectories: what is computed for all of it is one flat column, and `index_T` says
where a micro-batch's tokens are in it.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minirl.messages import RankSetup
from minirl.records import Batch
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.train.attention import Boundaries, boundaries
from minirl.train.packing import Unit, split_units
from minirl.train.sharing import Shared, share


class Item(NamedTuple):
    """One trajectory of the batch, in place, with what the step needs to know of it."""

    view: TrajectoryView
    reward: float
    start: int  # of its tokens in a column of the whole batch
    written: NDArray[np.bool_]  # by the model
    staleness: NDArray[np.int32]  # -1 where the model did not write
    trainable: NDArray[np.bool_]  # written by the model, and not too stale

    @property
    def length(self) -> int:
        return len(self.view.tokens)

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.length)


class MicroBatch(NamedTuple):
    """`None`: not known yet, or not needed by the recipe."""

    tokens_T: Tensor
    bounds: Boundaries
    index_T: Tensor
    sequence_T: Tensor
    behav_T: Tensor
    staleness_T: Tensor
    trainable_T: Tensor
    shared: Shared | None = None
    prox_T: Tensor | None = None
    ref_T: Tensor | None = None
    advantages_T: Tensor | None = None
    weights_T: Tensor | None = None
    returns_T: Tensor | None = None

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Of what attention computes: queries, and the keys that they see."""
        queries, keys = self.shared[2:] if self.shared else (self.bounds, self.bounds)
        return queries.cu_seqlens_S1.diff().tolist(), keys.cu_seqlens_S1.diff().tolist()

    @property
    def needed_T(self) -> Tensor:
        """Tokens whose logprob is of use: those that train, and those that can be compared."""
        return self.trainable_T | (self.staleness_T == 0)


def items_of(batch: Batch, ring: TrajectoryRing, max_staleness: int) -> list[list[Item]]:
    """By group, in the order of the batch."""
    groups, start = [], 0
    for group in batch.groups:
        items = []
        for place, trajectory in enumerate(group.trajectories):
            view = ring.read(trajectory.cell, group.id)
            most = -1 if place in group.masked else max_staleness  # -1: none of it trains
            item = item_of(view, batch.version, most)
            items.append(item._replace(reward=group.rewards[place], start=start))
            start += len(view.tokens)
        groups.append(items)
    return groups


def item_of(view: TrajectoryView, version: int, max_staleness: int = 0) -> Item:
    """Alone, for a step that starts from `version`."""
    written = view.mask == 1
    staleness = np.where(written, version - view.versions, -1).astype(np.int32)
    return Item(view, 0.0, 0, written, staleness, written & (staleness <= max_staleness))


def num_trainable(items: Sequence[Item]) -> int:
    return sum(int(item.trainable.sum()) for item in items)


def own_micro_batches(
    items: Sequence[Item], setup: RankSetup, can_share: bool = False
) -> list[MicroBatch]:
    """Every rank computes the same split and takes its own part."""
    groups = by_prompt(items)
    if not can_share:
        groups = [alone for group in groups for alone in group.apart]
    split = split_units(groups, setup.num_ranks, setup.config.train.max_tokens)
    own, device = split[setup.rank], setup.placement.torch_device
    return [pack([items[i] for unit in units for i in unit.places], device, units) for units in own]


def by_prompt(items: Sequence[Item]) -> list[Unit]:
    """Trajectories that have the same tokens before the first that the model wrote."""
    found: dict[bytes, Unit] = {}
    for place, item in enumerate(items):
        prompt = item.view.tokens[: item.written.argmax() if item.written.any() else None]
        unit = found.setdefault(prompt.tobytes(), Unit([], len(prompt), []))
        unit.places.append(place)
        unit.answers.append(item.length - unit.prompt)
    return list(found.values())


def pack(items: Sequence[Item], device: str, units: Sequence[Unit] = ()) -> MicroBatch:
    """Without padding. No items: a dummy of one token that trains nothing, which DDP needs."""
    items = items or [example_item([0], [])]
    lengths = [item.length for item in items]

    def column(arrays: list[NDArray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device, dtype)

    return MicroBatch(
        column([item.view.tokens for item in items], torch.int64),
        boundaries(lengths, device),
        index_T=column([np.arange(i.start, i.start + i.length) for i in items], torch.int64),
        sequence_T=column([np.repeat(np.arange(len(items)), lengths)], torch.int64),
        behav_T=column([item.view.logprobs for item in items], torch.float32),
        staleness_T=column([item.staleness for item in items], torch.float32),
        trainable_T=column([item.trainable for item in items], torch.bool),
        shared=share(units, device),
    )


def example_item(prompt: Sequence[int], answer: Sequence[int]) -> Item:
    """A worked answer as a trajectory that trains."""
    tokens = np.array([*prompt, *answer], np.int32)
    written, zeros = np.arange(len(tokens)) >= len(prompt), np.zeros_like(tokens)
    view = TrajectoryView(tokens, written.astype(np.uint8), zeros.astype(np.float32), zeros)
    return item_of(view, version=0)


def trained_staleness(items: Sequence[Item]) -> NDArray[np.int32]:
    """Of every trained token."""
    return np.concatenate([item.staleness[item.trainable] for item in items])


def staleness_metrics(items: Sequence[Item], max_staleness: int) -> dict[str, float | None]:
    """The buffer's metrics that need every token's version."""
    trained = trained_staleness(items)
    num_written = sum(int(item.written.sum()) for item in items)
    num_stale = sum(int((item.staleness > max_staleness).sum()) for item in items)
    versions = [len(np.unique(item.view.versions[item.written])) for item in items]
    return {
        "buffer/staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        "buffer/staleness_max": float(max(trained, default=0)),
        "buffer/masked_frac": num_stale / max(1, num_written),
        "buffer/versions_per_trajectory": fmean(versions),
    }
