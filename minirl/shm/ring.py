"""The trajectory ring. Takes trajectories from many writers, gives them to readers in place.

Equal cells, each large enough for the longest trajectory that the recipe allows. The controller
owns which cell belongs to which group, so no two writers share a cell and no lock exists that a
killed process could hold. A cell is visible only when it is *sealed* with the id of its group: the
seal is the last store of a write, so a writer that dies in the middle leaves nothing that reads as
an entry, and a cell that was handed on is never mistaken for its earlier content.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minirl.shm.segment import Segment

NOTHING = -1  # the seal of a cell without an entry; also the version of a token no model wrote

COLUMNS = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}

Column: TypeAlias = Sequence[int] | Sequence[float] | NDArray[np.number]


class TrajectoryView(NamedTuple):
    """One trajectory in shared memory: flat arrays of one length, not to be written to."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class TornEntry(Exception):
    """The cell holds no whole entry of that ticket."""


class TrajectoryRing:
    def __init__(self, num_cells: int, cell_tokens: int, segment: Segment | None = None):
        """New and empty, or the one in `segment`."""
        self.num_cells, self.cell_tokens = num_cells, cell_tokens
        columns = [(name, kind, cell_tokens) for name, kind in COLUMNS.items()]
        self.cell = np.dtype([("seal", np.int64), ("length", np.int64), *columns], align=True)
        self._segment = segment or Segment(num_cells * self.cell.itemsize)
        self._cells = self._segment.array(self.cell, (num_cells,))
        if segment is None:
            self._cells["seal"] = NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return TrajectoryRing, (self.num_cells, self.cell_tokens, self._segment)

    def write(
        self,
        cell: int,
        ticket: int,
        prompt: Column,
        tokens: Column,
        logprobs: Column,
        versions: Column,
    ) -> None:
        """One prompt and one answer; what no model wrote in it (a task's replies) has the version
        NOTHING and with it mask 0. Sealed last: x86 keeps the order of stores. Arrays are copied at
        the speed of memory; lists take 30 times as long."""
        start, end = len(prompt), len(prompt) + len(tokens)
        assert end <= self.cell_tokens, f"{end} tokens in a ring cell of {self.cell_tokens}"
        # By hand: numpy would repeat a single value where lengths differ.
        assert len(tokens) == len(logprobs) == len(versions) and ticket != NOTHING
        entry = self._cells[cell]
        entry["seal"] = NOTHING
        entry["tokens"][:start], entry["tokens"][start:end] = prompt, tokens
        entry["logprobs"][:start], entry["logprobs"][start:end] = 0.0, logprobs
        entry["versions"][:start], entry["versions"][start:end] = NOTHING, versions
        entry["mask"][:end] = entry["versions"][:end] != NOTHING
        entry["length"] = end
        entry["seal"] = ticket

    def read(self, cell: int, ticket: int) -> TrajectoryView:
        entry = self._cells[cell]
        if entry["seal"] != ticket:
            raise TornEntry(f"cell {cell} is sealed for {entry['seal']}, not for {ticket}")
        return TrajectoryView(*(entry[name][: entry["length"]] for name in COLUMNS))
