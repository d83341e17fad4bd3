"""The trajectory ring. Takes trajectories from many writers, gives them to readers in place.

Equal cells, each large enough for the longest trajectory that the recipe allows. The controller
owns which cell belongs to which group, so no two writers share a cell and no lock exists that a
killed process could hold. A cell is visible only when it is *sealed* with the id of its group: the
seal is the last store of a write, so a writer that dies in the middle leaves nothing that reads as
an entry, and a cell that was handed on is never mistaken for its earlier content.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from minirl.errors import MinirlError
from minirl.shm.segment import Segment, Shared, aligned

NOTHING = -1  # the seal of a cell without an entry; also the version of a token no model wrote

Column: TypeAlias = Sequence[int] | Sequence[float] | NDArray[np.number]


@dataclass(frozen=True)
class TrajectoryView:
    """One trajectory in shared memory: flat arrays of one length, not to be written to."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class TornEntry(Exception):
    """The cell holds no whole entry of that ticket."""


class TrajectoryRing(Shared):
    def __init__(self, num_cells: int, cell_tokens: int):
        self.num_cells, self.cell_tokens = num_cells, cell_tokens
        self._segment = Segment(self.bytes_needed(num_cells, cell_tokens))
        self._map()
        self._seals[:] = NOTHING

    @staticmethod
    def bytes_needed(num_cells: int, cell_tokens: int) -> int:
        per_column = [aligned(num_cells * cell_tokens * size) for size in (4, 1, 4, 4)]
        return sum(per_column) + 2 * aligned(8 * num_cells)

    def _map(self) -> None:
        shape, offset = (self.num_cells, self.cell_tokens), 0

        def column(dtype: type, dims: tuple[int, ...]) -> NDArray:
            nonlocal offset
            array = self._segment.array(dtype, dims, offset)
            offset += aligned(array.nbytes)
            return array

        self._seals = column(np.int64, (self.num_cells,))
        self._lengths = column(np.int64, (self.num_cells,))
        self._tokens = column(np.int32, shape)
        self._logprobs = column(np.float32, shape)
        self._versions = column(np.int32, shape)
        self._mask = column(np.uint8, shape)

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
        if end > self.cell_tokens:
            raise MinirlError(
                f"a trajectory of {start} prompt and {len(tokens)} written tokens does not fit "
                f"a ring cell of {self.cell_tokens}, which is tasks.max_prompt_tokens + "
                "rollout.max_new_tokens"
            )
        # By hand: numpy would repeat a single value where lengths differ.
        assert len(tokens) == len(logprobs) == len(versions) and ticket != NOTHING
        self._seals[cell] = NOTHING
        self._tokens[cell, :start] = prompt
        self._tokens[cell, start:end] = tokens
        self._mask[cell, :start] = 0
        self._logprobs[cell, :start] = 0.0
        self._logprobs[cell, start:end] = logprobs
        self._versions[cell, :start] = NOTHING
        self._versions[cell, start:end] = versions
        self._mask[cell, start:end] = self._versions[cell, start:end] != NOTHING
        self._lengths[cell] = end
        self._seals[cell] = ticket

    def read(self, cell: int, ticket: int) -> TrajectoryView:
        if self._seals[cell] != ticket:
            raise TornEntry(f"cell {cell} is sealed for {self._seals[cell]}, not for {ticket}")
        end = int(self._lengths[cell])
        columns = (self._tokens, self._mask, self._logprobs, self._versions)
        return TrajectoryView(*(column[cell, :end] for column in columns))
