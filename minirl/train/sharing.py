"""Each prompt is trained once: which tokens of a micro-batch are one and the same.

Takes the units of a micro-batch (packing.py), gives `Shared`. The columns of a loss stay on T, all
tokens of all trajectories; only a model's backbone sees U, the unique ones. Every prompt and answer
is a segment of U. An answer attends to its prompt and causally to itself, and the logprob of its
first token comes from the prompt's last hidden state. Leaves out the attention.

Axes: T tokens of all trajectories, U unique tokens, K keys of all segments, S1 segments + 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minirl.train.attention import Boundaries, Keys, boundaries
from minirl.train.packing import Unit


class Shared(NamedTuple):
    rows_U: Tensor  # where in T a unique token is taken from
    unique_T: Tensor  # which unique token a token is
    segments: Boundaries  # with positions from 0, in an answer too
    keys: Keys


def share(units: Sequence[Unit], device: str) -> Shared | None:
    """Of the trajectories of all units, one after another. None: they have nothing in common."""
    if not any(unit.prompt for unit in units):
        return None
    segments, sources, start = [], [], 0  # places in T: keys from start to end, queries from own
    for unit in units:
        prompt = torch.arange(start, start + unit.prompt)
        segments.append((start, start, start + unit.prompt))
        for answer in unit.answers:
            own, end = start + unit.prompt, start + unit.prompt + answer
            segments.append((start, own, end))
            sources += [prompt, torch.arange(own, end)]
            start = end
    segments = [(start, own, end) for start, own, end in segments if own < end]
    # Equal lengths side by side: attention computes them at once.
    segments.sort(key=lambda at: (at[0] - at[2], at[1] - at[0]))
    rows_U = torch.cat([torch.arange(own, end) for _, own, end in segments])
    place_T = torch.empty(start, dtype=torch.int64)
    place_T[rows_U] = torch.arange(len(rows_U))
    unique_T = place_T[torch.cat(sources)]
    rows_K = torch.cat([unique_T[start:end] for start, _, end in segments])
    queries = boundaries([end - own for _, own, end in segments], device)
    seen = boundaries([end - start for start, _, end in segments], device)
    keys = Keys(rows_K.to(device), seen.cu_seqlens_S1, seen.max_seqlen)
    return Shared(rows_U.to(device), unique_T.to(device), queries, keys)
