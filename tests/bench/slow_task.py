"""A task with slow rewards, for the rewards bench, and the switch that says when they are slow.

Loads neither torch nor vLLM: it is what a real verifier runs.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np

from minirl.config import TasksConfig
from minirl.records import Answer, Example
from minirl.shm.segment import Segment, opened
from minirl.tasks import Task

SLOW_S = 0.2
HANGS = 100  # one slow reward in so many never ends


class Phase(IntEnum):
    INSTANT = 0
    SLOW = 1


@dataclass(frozen=True)
class Work:
    """What the engine did, and how fast its core was meanwhile: how long the same small piece of
    work took there, and how often it was done."""

    tokens: float
    seconds: float
    steps: float
    gauge_s: float = 0.0
    num_gauges: float = 0.0

    @property
    def tokens_per_gauge(self) -> float:
        gauge_s = self.gauge_s / self.num_gauges if self.num_gauges else 1.0  # too short a turn
        return self.tokens / self.seconds * gauge_s

    def __sub__(self, other: "Work") -> "Work":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(a - b for a, b in pairs))


class Switch:
    """Shared by the bench, the engine and the verifiers: which phase it is, and what the engine did
    in each. The bench writes the phase, the engine all else."""

    NUM_BYTES = 12 * 8

    def __init__(self, segment: Segment):
        self.segment = segment
        self._cells = segment.array(np.float64, (12,))
        self._work = self._cells[2:].reshape(2, 5)  # a row for each phase

    @property
    def phase(self) -> Phase:
        return Phase(int(self._cells[0]))

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._cells[0] = phase

    def add(self, phase: Phase, work: Work) -> None:
        self._work[phase] += astuple(work)

    # Pickled as an argument of a process that is being spawned.
    def __getstate__(self) -> Segment:
        return self.segment

    def __setstate__(self, segment: Segment) -> None:
        self.__init__(segment)  # type: ignore[misc]

    def total(self, phase: Phase) -> Work:
        return Work(*map(float, self._work[phase]))


class SlowTask(Task):
    num_train = 2**31

    def __init__(self, config: TasksConfig, seed: int = 0):
        self._switch = Switch(opened(config.data))

    def train(self, index: int) -> Example:
        return Example(str(index), "")

    def heldout(self, count: int) -> Sequence[Example]:
        return [Example(str(i), "") for i in range(count)]

    def reward(self, example: Example, answer: Answer) -> float:
        kind = zlib.crc32(answer.text.encode())
        if self._switch.phase is Phase.SLOW:
            time.sleep(3600.0 if kind % HANGS == 0 else SLOW_S)
        return float(kind % 2)

    def solution(self, example: Example) -> str:
        return ""
