"""The board: one row per worker, written by that worker alone, read by the controller at any time.

Takes what a worker does and its running totals, gives heartbeats (rule 8) and the raw material of
the throughput and idle metrics without a message. Each field is one aligned 8-byte store.
"""

import time
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minirl.shm.segment import Segment
from minirl.shm.tracer import Tracer, open_trace

BEAT_S = 0.25  # a worker that waits says so this often


class State(IntEnum):
    """What a worker does, or what it waits for."""

    STARTING = 0
    WAITING_FOR_PROMPTS = 1
    GENERATING = 2
    RELOADING = 3
    WAITING_FOR_BATCH = 4
    TRAINING = 5
    PUBLISHING = 6
    SAVING = 7
    WAITING_FOR_ANSWERS = 8
    GRADING = 9
    SLEEPING = 10
    WAITING_FOR_BOX = 11

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


IDLE_STATES = (*(s for s in State if s.name.startswith("WAITING")), State.SLEEPING)


class Total(IntEnum):
    """Columns that only grow; the controller takes differences."""

    TOKENS = 0
    IDLE_S = 1
    RELOAD_S = 2
    RELOADS = 3
    STEPS = 4


STATE, SINCE, BEAT, VERSION, RUNNING, START, TOTALS = range(7)
NUM_COLUMNS = TOTALS + len(Total)


class Row(NamedTuple):
    state: State
    since_s: float  # seconds in this state
    beat_s: float  # seconds since the last sign of life
    version: int
    running: int


class Board:
    def __init__(self, num_workers: int, trace: Path | None = None, segment: Segment | None = None):
        self.num_workers = num_workers
        self.trace = open_trace(trace) if trace else None
        self._segment = segment or Segment(8 * NUM_COLUMNS * num_workers)
        self._rows = self._segment.array(np.float64, (num_workers, NUM_COLUMNS))
        for worker in range(num_workers if segment is None else 0):
            self.reset(worker)

    def __reduce__(self) -> tuple[Any, ...]:
        return Board, (self.num_workers, self.trace, self._segment)

    def reset(self, worker: int, start: int = 0) -> None:
        """A new process takes this row over, at that start of its worker. Totals stay: they belong
        to the place, not to the process."""
        row = self._rows[worker]
        row[STATE], row[RUNNING], row[VERSION], row[START] = State.STARTING, 0, -1, start
        row[SINCE] = row[BEAT] = time.monotonic()

    def row(self, worker: int) -> Row:
        state, since, beat, version, running = self._rows[worker, :START].tolist()
        now = time.monotonic()
        return Row(State(int(state)), now - since, now - beat, int(version), int(running))

    @property
    def rows(self) -> list[Row]:
        return [self.row(worker) for worker in range(self.num_workers)]

    def total(self, worker: int, column: Total) -> float:
        """Idle time counts up to now, also while the worker is still waiting."""
        row = self._rows[worker]
        is_waiting = column is Total.IDLE_S and row[STATE] in IDLE_STATES
        return float(row[TOTALS + column]) + (time.monotonic() - row[BEAT] if is_waiting else 0.0)

    def ages(self) -> NDArray[np.float64]:
        """All rows, with ages instead of times: clocks of boxes differ."""
        rows = self._rows.copy()
        rows[:, [SINCE, BEAT]] = time.monotonic() - rows[:, [SINCE, BEAT]]
        return rows

    def take(self, worker: int, ages: NDArray[np.float64], before: NDArray[np.float64]) -> None:
        """A row of another box's `ages`; its totals have grown since `before`. The rest counts
        only where it is of the start that this row is for."""
        own, row = self._rows[worker], ages[:START].copy()
        row[[SINCE, BEAT]] = time.monotonic() - row[[SINCE, BEAT]]  # never an age for a time
        own[TOTALS:] += ages[TOTALS:] - before[TOTALS:]
        if ages[START] == own[START]:
            own[SINCE:START] = row[SINCE:]
            own[STATE] = row[STATE]  # last, as in `enter`

    def writer(self, worker: int, name: str = "") -> "BoardWriter":
        return BoardWriter(self, worker, name)


class BoardWriter:
    """One worker's pen. Time in a waiting state adds to its idle total by itself."""

    def __init__(self, board: Board, worker: int, name: str):
        self.board, self.index, self._row = board, worker, board._rows[worker]
        self.tracer = Tracer(board.trace, name) if board.trace and name else None

    def enter(self, state: State, anew: bool = False, **facts: object) -> None:
        """Also a beat. Called again in the same state it keeps `since`, unless it begins anew.
        `facts` are for the timeline alone."""
        if self.tracer is not None:
            self.tracer.state(state.words, facts, anew)
        now = time.monotonic()
        if self._row[STATE] in IDLE_STATES:
            self._row[TOTALS + Total.IDLE_S] += now - self._row[BEAT]
        if self._row[STATE] != state or anew:
            self._row[SINCE] = now
        self._row[BEAT] = now
        self._row[STATE] = state  # last: with an old time it would pass for a stall

    def serving(self, version: int, running: int) -> None:
        self._row[VERSION] = version
        self._row[RUNNING] = running

    def add(self, column: Total, amount: float) -> None:
        self._row[TOTALS + column] += amount
