"""Who samples which group. Takes what comes back, gives a worker for each new group.

A pure structure, so that a simulator can drive it. A group goes to the worker that will be through
with it first: the one with the least outstanding work for its speed. Work is counted in tokens that
are expected to be written, learned from the lengths seen; a straggler counts until it is done, so
stragglers do not pile up. All trajectories of a group go to one worker, where they share their
prompt's KV.

Speeds are tokens per second of being busy, as the board shows them. A worker that was restarted is
taken for slow until it has shown otherwise.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

SMOOTHING = 0.05  # weight of a new length in the running mean
UNPROVEN = 0.25  # share of the others' speed that a restarted worker is given credit for


class ExpectedLength:
    """The running mean of written lengths; before the first, a guess that is on the safe side."""

    def __init__(self, at_first: float):
        self.tokens = at_first
        self._is_guess = True

    def saw(self, num_tokens: int) -> None:
        self.tokens += (num_tokens - self.tokens) * (1.0 if self._is_guess else SMOOTHING)
        self._is_guess = False


@dataclass(slots=True)
class Outstanding:
    """A group at a worker: trajectories to come, and the work that each was taken for."""

    worker: int
    num_left: int
    tokens_each: int


class Dispatcher:
    def __init__(self, num_workers: int, max_new_tokens: int):
        self._groups: dict[int, Outstanding] = {}
        self._load = [0] * num_workers  # in whole tokens: what is added can be taken away again
        self._speed: list[float | None] = [None] * num_workers  # None: nothing known yet
        self._rates = [1.0] * num_workers  # the same, with what is usual where nothing is known
        self._is_even = True  # all alike: then the least load is through first
        self.expected = ExpectedLength(max_new_tokens)

    def assign(
        self, group_id: int, num_trajectories: int, among: Collection[int] | None = None
    ) -> int:
        """`among`: the workers that may have it; default all."""
        tokens = max(1, round(self.expected.tokens))
        work = num_trajectories * tokens
        through: Sequence[float] = self._load
        if not self._is_even:
            through = [(n + work) / speed for n, speed in zip(through, self._rates, strict=True)]
        worker = min(among, key=through.__getitem__) if among else through.index(min(through))
        self._groups[group_id] = Outstanding(worker, num_trajectories, tokens)
        self._load[worker] += work
        return worker

    def num_left(self, worker: int) -> int:
        """Trajectories that are still to come from it."""
        return sum(group.num_left for group in self._groups.values() if group.worker == worker)

    def worker_of(self, group_id: int) -> int | None:
        group = self._groups.get(group_id)
        return group.worker if group else None

    @property
    def _usual_speed(self) -> float:
        known = [speed for speed in self._speed if speed]
        return sum(known) / len(known) if known else 1.0

    def trajectory_done(self, group_id: int, num_tokens: int) -> None:
        self.expected.saw(num_tokens)
        group = self._groups[group_id]
        group.num_left -= 1
        self._load[group.worker] -= group.tokens_each
        if not group.num_left:
            del self._groups[group_id]

    def forget(self, group_id: int) -> None:
        """Nothing more will come of it."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._load[group.worker] -= group.num_left * group.tokens_each

    def lost(self, worker: int) -> list[int]:
        """The worker died and is restarted: its unfinished groups, which are nobody's now."""
        groups = [group_id for group_id, group in self._groups.items() if group.worker == worker]
        for group_id in groups:
            self.forget(group_id)
        self._set_speed(worker, UNPROVEN * self._usual_speed)
        return groups

    def measured(self, worker: int, tokens_per_s: float) -> None:
        """What a worker has shown while it was busy."""
        self._set_speed(worker, tokens_per_s)

    def _set_speed(self, worker: int, tokens_per_s: float) -> None:
        self._speed[worker] = tokens_per_s
        self._rates = [speed or self._usual_speed for speed in self._speed]
        self._is_even = len({*self._rates}) == 1
