"""Which pool holds a run back, in one sentence. Takes metric lines and a split, gives a Balance.

Each pool's capacity is what it did, divided by its busy share; the slower pool is the bottleneck.
Evaluations and checkpoints count as they came. The first step is left out: it waits for the first
answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

BALANCED = 0.05  # a pool that idles less than this is busy
WORTH_A_MOVE = 1.02  # the throughput of another split, relative to this one


@dataclass(frozen=True)
class Balance:
    rollout: int
    train: int
    rollout_idle: float
    train_idle: float

    def throughput(self, rollout: int, train: int) -> float:
        """Of another split, relative to this one."""
        generation, training = (
            1 / max(1e-3, 1 - idle) for idle in (self.rollout_idle, self.train_idle)
        )
        other = min(generation * rollout / self.rollout, training * train / self.train)
        return other / min(generation, training)

    def best(self) -> tuple[int, int]:
        """The best split of the same devices; this one in a tie."""
        total = self.rollout + self.train
        pairs = [(self.rollout, self.train), *((n, total - n) for n in range(1, total))]
        return max(pairs, key=lambda pair: round(self.throughput(*pair), 3))

    def sentence(self, word: str = "GPU", is_synchronous: bool = False) -> str:
        shares = f"engines idle {self.rollout_idle:.0%}, trainers {self.train_idle:.0%}"
        if is_synchronous:
            return f"synchronous: {shares}; buffer.max_staleness = 1 or more would let both work"
        if max(self.rollout_idle, self.train_idle) < BALANCED:
            return f"balanced: {shares}"
        if self.train_idle > self.rollout_idle:
            text = f"generation-bound: trainers idle {self.train_idle:.0%}, one {word} more for "
            text += f"rollout would give {self.throughput(self.rollout + 1, self.train) - 1:+.0%}"
        else:
            text = f"training-bound: engines idle {self.rollout_idle:.0%}, one {word} more for "
            text += f"training would give {self.throughput(self.rollout, self.train + 1) - 1:+.0%}"
        best = self.best()
        if (gain := self.throughput(*best)) > WORTH_A_MOVE:
            text += f"; of these, {best[0]} + {best[1]} would give {gain - 1:+.0%}"
        return text


def balance(lines: Sequence[dict[str, Any]], rollout: int, train: int) -> Balance | None:
    """Of the steps with these devices; None where there are too few. Steps weigh by their time."""
    now = (rollout, train)
    own = [
        line
        for line in lines
        if (line.get("rollout/devices", rollout), line.get("train/devices", train)) == now
    ]
    if len(own) < 2:
        return None
    total = max(1e-9, own[-1]["seconds"] - own[0]["seconds"])

    def mean(name: str) -> float:
        pairs = pairwise(own)
        return sum(b.get(name, 0.0) * (b["seconds"] - a["seconds"]) for a, b in pairs) / total

    return Balance(rollout, train, mean("rollout/idle_frac"), mean("train/idle_frac"))
