"""How far ahead of the trainer generation may run: `buffer.target_staleness`.

Takes what is measured (how long groups and steps take, how long the trainer starved), gives a limit
on the groups in flight. A pure structure: durations are handed in, there is no clock.

When training is the bottleneck, slots alone let generation run ahead until every batch is η old.
The limit keeps only as many groups in flight as the trainer needs:

    B in training  +  B · turn-around / step time under way  +  a margin

The second term is Little's law and never less than one batch. The margin makes up for what the
means do not show: it grows when the trainer starves, and shrinks by what was left in stock after a
batch was taken. When generation is the bottleneck the trainer always starves, the margin grows, and
the limit is all slots: nothing is held back where it would cost throughput.
"""

import math

AUTO = -1.0
STARVED = 0.01  # a wait above this share of a step is one
RELEASE = 0.1  # the share of the left-over stock that is given up at each step


class Pace:
    def __init__(self, batch_size: int, num_slots: int, target_staleness: float = AUTO):
        self._batch_size, self._num_slots = batch_size, num_slots
        self._target = target_staleness
        self._turnaround_s = 0.0
        self._num_turnarounds = 0
        self._step_s = 0.0
        self._margin = 0.0

    @property
    def limit(self) -> int:
        """Groups that may be running, ready or in training at once."""
        if self._target != AUTO:
            wanted = self._batch_size * (1 + self._target)
        else:
            wanted = self._needed + self._margin
        return max(self._batch_size, min(self._num_slots, math.ceil(wanted)))

    @property
    def _needed(self) -> float:
        ahead = self._turnaround_s / self._step_s if self._step_s else 1.0
        return self._batch_size * (1 + max(1.0, ahead))

    def group_took(self, seconds: float) -> None:
        """From its admission until it was ready."""
        self._num_turnarounds += 1
        weight = 1 / min(self._num_turnarounds, self._batch_size)
        self._turnaround_s += weight * (seconds - self._turnaround_s)

    def step_took(self, seconds: float) -> None:
        """From taking a batch until its version was published."""
        weight = 0.3 if self._step_s else 1.0
        self._step_s += weight * (seconds - self._step_s)

    def batch_taken(self, starved_s: float, num_left: int) -> None:
        """The trainer had waited this long for want of groups; this many were ready beyond B."""
        if not self._step_s:  # the first batch is always waited for
            return
        starved = starved_s / self._step_s
        if starved > STARVED:
            self._margin += 1 + self._batch_size * min(1.0, starved)
        else:
            self._margin -= RELEASE * num_left
        # No further than the limit reaches, so that it turns at once when the tide does.
        low, high = 2 * self._batch_size - self._needed, self._num_slots - self._needed
        self._margin = min(max(self._margin, low), max(low, high))
