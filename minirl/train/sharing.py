"""Each prompt is trained once: which tokens of a micro-batch are one and the same.

Takes the units of a micro-batch (packing.py), gives `Shared`: the columns of a loss stay on T, all
tokens of all trajectories, and only a model's backbone sees U, the unique ones. Every prompt and
every answer is a segment of U; an answer attends to its prompt and causally to itself, and the
logprob of its first token comes from the prompt's last hidden state. Leaves out the attention.

Axes: T tokens of all trajectories, U unique tokens, K keys of all segments, S1 segments + 1.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirl.train.attention import Keys
from minirl.train.packing import Unit


class Shared(NamedTuple):
    rows_U: Tensor  # where in T a unique token is taken from
    unique_T: Tensor  # which unique token a token is
    cu_seqlens_S1: Tensor  # of the segments
    max_seqlen: int
    keys: Keys


class Segment(NamedTuple):
    """A part of a trajectory, by places in T: it sees [start, end), and computes [own, end)."""

    start: int
    own: int
    end: int


def share(units: Sequence[Unit], device: str) -> Shared | None:
    """Of the trajectories of all units, one after another. None: they have nothing in common."""
    if not any(unit.prompt for unit in units):
        return None
    segments, source_T = _segments(units)
    # Equal lengths side by side: attention takes them at once.
    segments.sort(key=lambda s: (s.start - s.end, s.own - s.start))
    rows_U = np.concatenate([np.arange(s.own, s.end) for s in segments])
    place_T = np.empty(len(source_T), np.int64)
    place_T[rows_U] = np.arange(len(rows_U))
    unique_T = place_T[source_T]
    rows_K = np.concatenate([unique_T[s.start : s.end] for s in segments])
    num_q, num_k = [s.end - s.own for s in segments], [s.end - s.start for s in segments]

    def column(values: Sequence[int] | np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values).to(device, dtype)

    cu_q, cu_k = (column([0, *accumulate(n)], torch.int32) for n in (num_q, num_k))
    keys = Keys(column(rows_K), cu_k, max(num_k))
    return Shared(column(rows_U), column(unique_T), cu_q, max(num_q), keys)


def _segments(units: Sequence[Unit]) -> tuple[list[Segment], np.ndarray]:
    """All that have tokens; and for each of T the place of the first token that is the same."""
    segments, source, start = [], [], 0
    for unit in units:
        first, shared = start, unit.prompt
        segments.append(Segment(first, first, first + shared))
        for answer in unit.answers:
            end = start + shared + answer
            segments.append(Segment(start, start + shared, end))
            source += [np.arange(first, first + shared), np.arange(start + shared, end)]
            start = end
    return [s for s in segments if s.own < s.end], np.concatenate(source)
