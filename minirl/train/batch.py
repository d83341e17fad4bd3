"""Stage 5, batch: from trajectories in shared memory to packed tensors.

Takes a Batch of descriptors, gives micro-batches of tokens packed end to end, on the device. It is
the last place where the bound can be enforced (rule 1): a token staler than η is masked out here,
whatever the buffer and the engines did.

Axes: T tokens of all sequences in a micro-batch, S1 sequences + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minirl.records import Batch
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.train import attention
from minirl.train.advantage import group_normalised


@dataclass(frozen=True)
class Item:
    """One trajectory of the batch, in place, with what the step needs to know of it."""

    view: TrajectoryView
    advantage: float
    trainable: NDArray[np.bool_]  # written by the model, and not too stale
    at_equal_version: NDArray[np.bool_]  # written by the very version that the step starts from

    @property
    def length(self) -> int:
        return len(self.view.tokens)


@dataclass(frozen=True)
class MicroBatch:
    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    behav_T: Tensor
    advantages_T: Tensor
    trainable_T: Tensor
    at_equal_version_T: Tensor


def items_of(batch: Batch, ring: TrajectoryRing, max_staleness: int) -> list[list[Item]]:
    """By group, in the order of the batch."""
    groups = []
    for group in batch.groups:
        advantages = group_normalised(group.rewards)
        items = []
        for place, (trajectory, advantage) in enumerate(
            zip(group.trajectories, advantages, strict=True)
        ):
            view = ring.read(trajectory.cell, group.id)
            written = view.mask == 1
            trainable = written & (view.versions >= batch.version - max_staleness)
            trainable &= place not in group.masked
            at_equal_version = written & (view.versions == batch.version)
            items.append(Item(view, advantage, trainable, at_equal_version))
        groups.append(items)
    return groups


def minibatches(groups: list[list[Item]], count: int) -> list[list[Item]]:
    """The batch in `count` parts of equally many whole groups."""
    size = len(groups) // count
    return [
        [item for group in groups[i * size : (i + 1) * size] for item in group]
        for i in range(count)
    ]


def pack(items: Sequence[Item], device: str) -> MicroBatch:
    """Without padding. No items: a dummy of one token that trains nothing, which DDP needs."""
    if not items:
        return _dummy(device)
    bounds = attention.boundaries([item.length for item in items], torch.device(device))

    def column(arrays: list[NDArray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device, dtype)

    return MicroBatch(
        tokens_T=column([item.view.tokens for item in items], torch.int64),
        positions_T=bounds.positions_T,
        cu_seqlens_S1=bounds.cu_seqlens_S1,
        max_seqlen=bounds.max_seqlen,
        behav_T=column([item.view.logprobs for item in items], torch.float32),
        advantages_T=column(
            [np.full(item.length, item.advantage, np.float32) for item in items], torch.float32
        ),
        trainable_T=column([item.trainable for item in items], torch.bool),
        at_equal_version_T=column([item.at_equal_version for item in items], torch.bool),
    )


def _dummy(device: str) -> MicroBatch:
    bounds = attention.boundaries([1], torch.device(device))
    zeros_T, nothing_T = torch.zeros(1, device=device), torch.zeros(1, device=device).bool()
    return MicroBatch(
        zeros_T.long(),
        bounds.positions_T,
        bounds.cu_seqlens_S1,
        bounds.max_seqlen,
        zeros_T,
        zeros_T,
        nothing_T,
        nothing_T,
    )


def staleness(items: Sequence[Item], version: int) -> dict[str, float | None]:
    """The buffer's metrics that need every token's version."""
    ages = np.concatenate([version - item.view.versions[item.trainable] for item in items])
    num_written = sum(int(item.view.mask.sum()) for item in items)
    num_versions = [len(np.unique(item.view.versions[item.view.mask == 1])) for item in items]
    return {
        "buffer/staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "buffer/staleness_max": float(ages.max()) if len(ages) else 0.0,
        "buffer/masked_frac": 1.0 - len(ages) / max(1, num_written),
        "buffer/versions_per_trajectory": fmean(num_versions),
    }
