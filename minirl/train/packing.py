"""Stage 5, batch: which trajectories go to which rank and into which micro-batch. No torch.

Takes lengths in tokens, gives indices into them. Everything here is deterministic, so each rank
computes the whole split and takes its own part. What is packed is a `Unit`: the trajectories of one
prompt, which are computed with one copy of it, or one trajectory. A micro-batch is units packed end
to end, at most `max_tokens` of them together. Under DDP all ranks must run equally many, since each
backward that syncs is a collective: a rank with too few units ends with empty micro-batches, which
the trainer runs as a dummy of zero loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minirl.errors import MinirlError

# Cost of a sequence of n tokens: n + n² / LINEAR_UNTIL. The linear layers of a model of width d
# cost about 24·d² per token and layer, causal attention about 2·d·n: equal where n = 12·d, which is
# 12 k tokens for a 1 k wide model. Only balance depends on it, so one constant serves all models.
LINEAR_UNTIL = 16384
# Share a prompt only where doing without costs at least this many times as much. On CPU a tiny
# model was 1.06 to 1.16 times as fast at 1.22, and lost 4 % at 1.08: smaller pieces of attention.
MIN_SAVING = 1.15
COPIES_PER_TOKEN = 16  # keys and values of a prompt, kept for each answer, in memory of a token


class Unit(NamedTuple):
    """Trajectories that are packed together."""

    places: list[int]
    prompt: int  # tokens that they share; 0: one trajectory, alone
    answers: list[int]  # tokens of each after those

    @property
    def sizes(self) -> list[int]:
        """Of the answers, in tokens of memory."""
        return [answer + self.prompt // COPIES_PER_TOKEN for answer in self.answers]

    @property
    def size(self) -> int:
        return self.prompt + sum(self.sizes)

    @property
    def cost(self) -> float:
        shared = cost(self.prompt)
        return shared + sum(cost(self.prompt + answer) - shared for answer in self.answers)

    @property
    def apart(self) -> list["Unit"]:
        pairs = zip(self.places, self.answers, strict=True)
        return [Unit([place], 0, [self.prompt + answer]) for place, answer in pairs]


def split_units(groups: Sequence[Unit], num_ranks: int, max_tokens: int) -> list[list[list[Unit]]]:
    """Micro-batches of units, by rank: equally many on every rank, at least 1. Groups are cut into
    as many parts as leave the least to the rank that has the most: each part costs a copy of the
    prompt, but few groups balance badly."""
    most = max((len(group.places) for group in groups), default=1) if num_ranks > 1 else 1
    nums = sorted({*(2**n for n in range(most.bit_length())), most})
    choices = [[part for group in groups for part in cut(group, max_tokens, n)] for n in nums]
    shares = (balanced(units, num_ranks) for units in choices)
    owned = min(shares, key=lambda split: max(sum(unit.cost for unit in own) for own in split))

    def packed(own: list[Unit], count: int) -> list[list[Unit]]:
        batches = micro_batches([unit.size for unit in own], max_tokens, count)
        return [[own[place] for place in batch] for batch in batches]

    count = max(len(packed(own, 1)) for own in owned)
    split = [packed(own, count) for own in owned]
    # Spreading over `count` micro-batches may need one more than filling as few as possible.
    while (count := max(map(len, split))) > min(map(len, split)):
        split = [packed(own, count) for own in owned]
    return split


def cut(group: Unit, max_tokens: int, num_parts: int) -> list[Unit]:
    """Into parts that fit, at least so many. Trajectories go apart where sharing their prompt does
    not pay; all of a group do where one does not fit."""
    places, prompt, answers = group
    if prompt + max(group.sizes) > max_tokens:
        return group.apart
    found = []
    for part in micro_batches(group.sizes, max_tokens - prompt, num_parts):
        unit = Unit([places[i] for i in part], prompt, [answers[i] for i in part])
        is_worth_it = sum(alone.cost for alone in unit.apart) >= MIN_SAVING * unit.cost
        found += [unit] if is_worth_it and part else unit.apart
    return found


def micro_batches(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> list[list[int]]:
    """The paper's Algorithm 1: longest first, each sequence into the open micro-batch with the
    fewest sequences that has room; a new one is opened where none has, or while there are fewer
    than `min_count`. Those beyond the number of sequences are empty."""
    batches: list[list[int]] = []
    sizes: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
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


def balanced(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """By rank: costliest first, each to the rank that has the least cost so far."""
    owned: list[list[Unit]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for unit in sorted(units, key=lambda unit: -unit.cost):
        rank = loads.index(min(loads))
        owned[rank].append(unit)
        loads[rank] += unit.cost
    return owned


def cost(length: int) -> float:
    return length + length * length / LINEAR_UNTIL
