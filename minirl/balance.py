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


@dataclass(frozen=True)
class Balance:
    rollout: int
    train: int
    rollout_idle: float
    train_idle: float

    def gain(self, rollout: int, train: int) -> float:
        """The throughput of another split, relative to this one, minus 1."""
        generation = 1 / max(1e-3, 1 - self.rollout_idle)
        training = 1 / max(1e-3, 1 - self.train_idle)
        other = min(generation * rollout / self.rollout, training * train / self.train)
        return other / min(generation, training) - 1

    def sentence(self, word: str = "GPU", is_synchronous: bool = False) -> str:
        shares = f"engines idle {self.rollout_idle:.0%}, trainers {self.train_idle:.0%}"
        if is_synchronous:
            return f"synchronous: {shares}; buffer.max_staleness = 1 or more would let both work"
        if max(self.rollout_idle, self.train_idle) < BALANCED:
            return f"balanced: {shares}"
        if self.train_idle > self.rollout_idle:
            gain = self.gain(self.rollout + 1, self.train)
            text, pool = f"generation-bound: trainers idle {self.train_idle:.0%}", "rollout"
        else:
            gain = self.gain(self.rollout, self.train + 1)
            text, pool = f"training-bound: engines idle {self.rollout_idle:.0%}", "training"
        return f"{text}, one {word} more for {pool} would give {gain:+.0%}"


def balance(lines: Sequence[dict[str, Any]], rollout: int, train: int) -> Balance | None:
    """Of the steps with these devices; None where there are too few. Steps weigh by their time."""
    devices = {"rollout/devices": rollout, "train/devices": train}
    own = [line for line in lines if all(line.get(k, n) == n for k, n in devices.items())]
    if len(own) < 2:
        return None
    total = max(1e-9, own[-1]["seconds"] - own[0]["seconds"])

    def mean(name: str) -> float:
        pairs = pairwise(own)
        return sum(b.get(name, 0.0) * (b["seconds"] - a["seconds"]) for a, b in pairs) / total

    return Balance(rollout, train, mean("rollout/idle_frac"), mean("train/idle_frac"))
