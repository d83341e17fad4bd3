"""Which engine samples which group. Takes what comes back, gives an engine for each new group.

A pure structure, so that a simulator can drive it. A group goes to the engine with the least
outstanding work, so a slow engine, which keeps its work for longer, gets less. Work is counted in
tokens that are expected to be written, learned from the lengths seen; a straggler counts until it
is done, so stragglers do not pile up. All trajectories of a group go to one engine, where they
share their prompt's KV.

Leaves out: how many groups may run (buffer.py), and the groups themselves (groups.py).
"""

from collections.abc import Collection
from typing import NamedTuple

SMOOTHING = 0.05  # weight of a new length in the running mean


class ExpectedLength:
    """The running mean of written lengths; before the first, a guess that is on the safe side."""

    def __init__(self, at_first: float):
        self.tokens, self._is_guess = at_first, True

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
        self._expected = ExpectedLength(max_new_tokens)

    def assign(self, num_trajectories: int, among: Collection[int] | None = None) -> Assignment:
        """`among`: the engines that may have it; default all."""
        tokens = max(1, round(self._expected.tokens))
        engine = min(among or range(len(self._load)), key=lambda engine: self._load[engine])
        self._load[engine] += num_trajectories * tokens
        return Assignment(engine, tokens)

    def trajectory_done(self, assignment: Assignment, num_tokens: int) -> None:
        self._expected.saw(num_tokens)
        self._load[assignment.engine] -= assignment.tokens_each

    def release(self, assignment: Assignment, num_left: int) -> None:
        """These trajectories of a group will not come."""
        self._load[assignment.engine] -= num_left * assignment.tokens_each
