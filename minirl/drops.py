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
    Drop.TOO_LONG: "raise tasks.max_prompt_tokens",
}
MIN_FAULTS = 24  # in a row; with small batches max_faults alone would stop a run for noise


class DropWatch:
    def __init__(self, config: Config, seldom: RateLimit):
        self._max_faults = config.buffer.max_faults
        self._limit = max(MIN_FAULTS, math.ceil(self._max_faults * config.train.batch_size))
        self._seldom = seldom
        self._examples: dict[Drop, str] = {}
        self._faults: Counter[Drop] = Counter()  # since a group was last graded
        self._filtered: Counter[Drop] = Counter()  # since the last step

    @property
    def fault(self) -> str:
        """Why the run cannot train, or ""."""
        if (num := self._faults.total()) < self._limit:
            return ""
        ((reason, count),) = self._faults.most_common(1)
        return (
            f"no reward for {num:,} groups in a row: {reason.words} {count:,} times, such as "
            f"{one_line(self._examples[reason])}; mend that, or raise buffer.max_faults = "
            f"{self._max_faults:g}"
        )

    def graded(self) -> None:
        self._faults.clear()

    def stepped(self) -> None:
        """The next version is published."""
        self._filtered.clear()

    def dropped(self, reason: Drop, why: str) -> None:
        """The death of a worker has a limit of its own (supervisor.py)."""
        if reason in FILTERS:
            self._filtered[reason] += 1
            if self._filtered.total() % self._limit == 0:
                self._warn()
        elif reason is not Drop.WORKER_DIED:
            self._faults[reason] += 1
            self._examples[reason] = why

    def _warn(self) -> None:
        ((reason, count),) = self._filtered.most_common(1)
        num = self._filtered.total()
        share = f"{num:,} groups dropped since the last step, {count / num:.0%} of them"
        self._seldom.note(reason, f"warning: {share} {reason.words}: {FILTERS[reason]}")
