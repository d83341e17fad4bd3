"""What drops say of a run: faults in a row stop it, a filter that keeps hardly anything warns.

Takes what becomes of each group, in order; gives the one line that ends the run, and warnings that
name the number to change. Pure. Leaves out: the counts of the run (buffer.py), and how a run ends
(loop.py).
"""

import math
from collections import Counter

from minirl.config import Config
from minirl.errors import one_line
from minirl.metrics import RateLimit
from minirl.records import Drop

FILTERS = {  # they drop on purpose; what changes that
    Drop.EQUAL_REWARDS: "set buffer.drop_equal_rewards to false, raise rollout.temperature, or "
    "take prompts that are less easy or less hard",
    Drop.TRUNCATED: "raise rollout.max_new_tokens",
    Drop.STALE: "raise buffer.max_staleness",
}
MIN_FAULTS = 24  # in a row; with small batches max_faults alone would stop a run for noise
MAX_FILTERED = 0.75  # share of the groups since the last step


class DropWatch:
    def __init__(self, config: Config, seldom: RateLimit):
        self._batch_size, self._max_faults = config.train.batch_size, config.buffer.max_faults
        self._limit = max(MIN_FAULTS, math.ceil(self._max_faults * self._batch_size))
        self._seldom = seldom
        self._examples: dict[Drop, str] = {}
        self._faults: Counter[Drop] = Counter()  # since a group was last graded
        self._filtered: Counter[Drop] = Counter()  # since one was last kept
        self._dropped: Counter[Drop] = Counter()  # since the last step

    @property
    def fault(self) -> str:
        """Why the run cannot train, or "". Of prompts that are too long ten count as one: they end
        at once, and where most are too long such a row may be chance."""
        num = self._faults.total()
        if 10 * num - 9 * self._faults[Drop.TOO_LONG] < 10 * self._limit:
            return ""
        ((reason, count),) = self._faults.most_common(1)
        return (
            f"no reward for {num:,} groups in a row: {reason.words} {count:,} times, such as "
            f"{one_line(self._examples[reason])}; mend that, or raise buffer.max_faults = "
            f"{self._max_faults:g}"
        )

    def begun(self) -> None:
        """A prompt was short enough."""
        del self._faults[Drop.TOO_LONG]

    def graded(self, is_kept: bool) -> None:
        self._faults.clear()
        if is_kept:
            self._filtered.clear()

    def dropped(self, reason: Drop, why: str) -> None:
        """The death of a worker has a limit of its own (supervisor.py)."""
        self._dropped[reason] += 1
        if reason in FILTERS:
            self.graded(is_kept=False)
            self._filtered[reason] += 1
            if (num := self._filtered.total()) % self._limit == 0:
                self._warn(*self._filtered.most_common(1)[0], num, "in a row")
        elif reason is not Drop.WORKER_DIED:
            self._faults[reason] += 1
            self._examples[reason] = why

    def stepped(self) -> None:
        """The next version is published."""
        num = self._dropped.total() + self._batch_size
        for reason in FILTERS:
            if (count := self._dropped[reason]) > MAX_FILTERED * num:
                self._warn(reason, count, num, "since the last step")
        self._dropped.clear()

    def _warn(self, reason: Drop, count: int, num: int, when: str) -> None:
        share = f"{count / num:.0%} of {num:,} groups {when} were dropped"
        self._seldom.note(reason, f"warning: {share}, {reason.words}: {FILTERS[reason]}")
