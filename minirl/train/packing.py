"""Stage 5, batch: which trajectories go to which rank and into which micro-batch. No torch.

Takes lengths in tokens, gives indices into them. Everything here is deterministic, so each rank
computes the whole split and takes its own part. A micro-batch is sequences packed end to end, at
most `max_tokens` of them together. Under DDP all ranks must run equally many, since each backward
that syncs is a collective: a rank with too few sequences ends with empty micro-batches, which the
trainer runs as a dummy of zero loss.
"""

import heapq
from collections.abc import Sequence

from minirl.errors import MinirlError

# Cost of a sequence of n tokens: n + n² / LINEAR_UNTIL. The linear layers of a model of width d
# cost about 24·d² per token and layer, causal attention about 2·d·n: equal where n = 12·d, which is
# 12 k tokens for a 1 k wide model. Only balance depends on it, so one constant serves all models.
LINEAR_UNTIL = 16384


def micro_batches(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> list[list[int]]:
    """The paper's Algorithm 1: longest first, each sequence into the open micro-batch with the
    fewest sequences that has room; a new one is opened where none has, or while there are fewer
    than `min_count`. Those beyond the number of sequences are empty."""
    batches: list[list[int]] = []
    sizes: list[int] = []
    for index in longest_first(lengths):
        length = lengths[index]
        if length > max_tokens:
            rule = f"a trajectory of {length} tokens does not fit into a micro-batch"
            raise MinirlError(f"train.max_tokens = {max_tokens}: {rule}; raise it to {length}")
        fitting = [i for i, size in enumerate(sizes) if size + length <= max_tokens]
        if not fitting or len(batches) < min_count:
            fitting = [len(batches)]
            batches.append([])
            sizes.append(0)
        chosen = min(fitting, key=lambda i: len(batches[i]))
        batches[chosen].append(index)
        sizes[chosen] += length
    return batches + [[] for _ in range(min_count - len(batches))]


def split_over_ranks(
    lengths: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Micro-batches of indices, by rank: equally many on every rank, at least 1."""
    owned = balanced(lengths, num_ranks)

    def packed(own: list[int], count: int) -> list[list[int]]:
        batches = micro_batches([lengths[index] for index in own], max_tokens, count)
        return [[own[place] for place in batch] for batch in batches]

    count = max(len(packed(own, 1)) for own in owned)
    split = [packed(own, count) for own in owned]
    # Spreading over `count` micro-batches may need one more than filling as few as possible.
    while (most := max(map(len, split))) > min(map(len, split)):
        split = [packed(own, most) for own in owned]
    return split


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
