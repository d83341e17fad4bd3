"""Stage 5, batch: which trajectories go to which rank and into which micro-batch. No torch.

Takes lengths in tokens, gives indices into them. Everything here is deterministic, so each rank
can compute the whole split by itself and take its own part.

A micro-batch is sequences packed end to end, at most `max_tokens` of them together. Under DDP all
ranks must run equally many, since each backward that syncs is a collective: a rank with too few
sequences ends with empty micro-batches, which the trainer runs as a dummy of zero loss.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from minirl.errors import MinirlError

# Cost of a sequence of n tokens: n + n² / LINEAR_UNTIL. The linear layers of a model of width d
# cost about 24·d² a token and layer, causal attention about 2·d·n: equal where n = 12·d, which is
# 12 k tokens for a 1 k wide model. Only balance depends on it, so one constant serves all models.
LINEAR_UNTIL = 16384


@dataclass
class MicroBatch:
    indices: list[int] = field(default_factory=list)
    num_tokens: int = 0


def micro_batches(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> list[list[int]]:
    """The paper's Algorithm 1: longest first, each sequence into the open micro-batch with the
    fewest sequences that has room; a new one is opened where none has, or while there are fewer
    than `min_count`. Those beyond the number of sequences are empty."""
    check_lengths(lengths, max_tokens)
    open_: list[MicroBatch] = []
    for index in longest_first(lengths):
        length = lengths[index]
        fitting = [m for m in open_ if m.num_tokens + length <= max_tokens]
        if not fitting or len(open_) < min_count:
            open_.append(MicroBatch())
            fitting = open_[-1:]
        chosen = min(fitting, key=lambda m: len(m.indices))
        chosen.indices.append(index)
        chosen.num_tokens += length
    empty = max(0, min_count - len(open_))
    return [m.indices for m in open_] + [[] for _ in range(empty)]


def split_over_ranks(
    lengths: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Micro-batches of indices, by rank: equally many on every rank, at least 1."""
    owned = balanced(lengths, num_ranks)
    count = max(len(_local(lengths, own, max_tokens, 1)) for own in owned)
    while True:
        split = [_local(lengths, own, max_tokens, count) for own in owned]
        most = max(map(len, split))
        # Spreading over `count` micro-batches may need one more than filling as few as possible.
        if most == min(map(len, split)):
            return split
        count = most


def balanced(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices by rank: costliest first, each to the rank that has the least cost so far."""
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in longest_first(lengths):
        load, rank = heapq.heappop(loads)
        owned[rank].append(index)
        heapq.heappush(loads, (load + cost(lengths[index]), rank))
    return owned


def cost(length: int) -> float:
    return length + length * length / LINEAR_UNTIL


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by falling length; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise MinirlError(
            f"train.max_tokens = {max_tokens}: a trajectory of {longest} tokens does not fit into "
            f"a micro-batch. Set train.max_tokens to at least {longest}."
        )
    assert min(lengths, default=1) > 0, "an empty sequence cannot be packed"


def _local(
    lengths: Sequence[int], own: Sequence[int], max_tokens: int, min_count: int
) -> list[list[int]]:
    """Micro-batches over the sequences of one rank, as indices into all lengths."""
    batches = micro_batches([lengths[index] for index in own], max_tokens, min_count)
    return [[own[place] for place in batch] for batch in batches]
