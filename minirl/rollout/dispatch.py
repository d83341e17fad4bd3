"""Which engine samples which group. Takes what comes back, gives an engine for each new group.

A pure structure, so that a simulator can drive it. A group goes to the engine that will be through
with it first: the one with the least outstanding work for its speed. Work is counted in tokens that
are expected to be written, learned from the lengths seen; a straggler counts until it is done, so
stragglers do not pile up. All trajectories of a group go to one engine, where they share their
prompt's KV.

Speeds are tokens per second of being busy, as the board shows them (`Speedometer`). An engine that
was restarted is taken for slow until it has shown otherwise.

Leaves out: how many groups may run (buffer.py), and the groups themselves (groups.py).
"""

import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from minirl.shm.board import Board, Total

SMOOTHING = 0.05  # weight of a new length in the running mean
UNPROVEN = 0.25  # share of the others' speed that a restarted engine is given credit for
LEAST_BUSY_S = 0.5  # a speed over less time than that says nothing


class ExpectedLength:
    """The running mean of written lengths; before the first, a guess that is on the safe side."""

    def __init__(self, at_first: float):
        self.tokens = at_first
        self._is_guess = True

    def saw(self, num_tokens: int) -> None:
        self.tokens += (num_tokens - self.tokens) * (1.0 if self._is_guess else SMOOTHING)
        self._is_guess = False


class Assignment(NamedTuple):
    """A group at an engine, and the work that each of its trajectories was taken for."""

    engine: int
    tokens_each: int


class Dispatcher:
    def __init__(self, num_engines: int, max_new_tokens: int):
        self._load = [0] * num_engines  # in whole tokens: what is added can be taken away again
        self._speed = [0.0] * num_engines  # 0: nothing known yet
        self.expected = ExpectedLength(max_new_tokens)

    def assign(self, num_trajectories: int, among: Collection[int] | None = None) -> Assignment:
        """`among`: the engines that may have it; default all."""
        tokens = max(1, round(self.expected.tokens))
        work, usual = num_trajectories * tokens, self._usual_speed

        def seconds(engine: int) -> float:
            return (self._load[engine] + work) / (self._speed[engine] or usual)

        engine = min(among or range(len(self._load)), key=seconds)
        self._load[engine] += work
        return Assignment(engine, tokens)

    def trajectory_done(self, assignment: Assignment, num_tokens: int) -> None:
        self.expected.saw(num_tokens)
        self._load[assignment.engine] -= assignment.tokens_each

    def release(self, assignment: Assignment, num_left: int) -> None:
        """These trajectories of a group will not come."""
        self._load[assignment.engine] -= num_left * assignment.tokens_each

    def restarted(self, engine: int) -> None:
        self._speed[engine] = UNPROVEN * self._usual_speed

    def measured(self, engine: int, tokens_per_s: float) -> None:
        """What an engine has shown while it was busy."""
        self._speed[engine] = tokens_per_s

    @property
    def _usual_speed(self) -> float:
        known = [speed for speed in self._speed if speed]
        return sum(known) / len(known) if known else 1.0


class Speedometer:
    """Tokens per second of each engine while it had something to do, since the last look."""

    def __init__(self, board: Board, rows: list[int]):
        self._board, self._rows = board, rows
        self._before = [self._look(row) for row in rows]

    def _look(self, row: int) -> tuple[float, float]:
        idle_s = self._board.total(row, Total.IDLE_S)
        return self._board.total(row, Total.TOKENS), time.monotonic() - idle_s

    def read(self) -> Iterator[tuple[int, float]]:
        for engine, row in enumerate(self._rows):
            (tokens, busy_s), before = self._look(row), self._before[engine]
            if busy_s - before[1] > LEAST_BUSY_S:
                self._before[engine] = (tokens, busy_s)
                yield engine, max(1.0, (tokens - before[0]) / (busy_s - before[1]))
