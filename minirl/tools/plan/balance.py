"""What a run's own steps say about its split. Takes metric lines, gives a verdict in one sentence.

Each pool's capacity is what it did, divided by the share of time it was at it; the slower pool sets
the pace. Evaluations and checkpoints count as they came. The first step is left out: it waits for
the first answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUM_FIRST = 1
BALANCED = 0.05  # a pool that idles less than this is busy


@dataclass(frozen=True)
class Balance:
    rollout: int
    train: int
    rollout_idle: float
    train_idle: float

    @property
    def verdict(self) -> str:
        if max(self.rollout_idle, self.train_idle) < BALANCED:
            return "balanced"
        return "generation-bound" if self.train_idle > self.rollout_idle else "training-bound"

    def throughput(self, rollout: int, train: int) -> float:
        """Of another split, relative to this one's."""
        generation = (rollout / self.rollout) / max(1e-3, 1 - self.rollout_idle)
        training = (train / self.train) / max(1e-3, 1 - self.train_idle)
        now = min(1 / max(1e-3, 1 - self.rollout_idle), 1 / max(1e-3, 1 - self.train_idle))
        return min(generation, training) / now

    def best(self, pairs: Sequence[tuple[int, int]] = ()) -> tuple[int, int]:
        """The same devices, shared out anew: one of `pairs`, or any."""
        total, now = self.rollout + self.train, (self.rollout, self.train)
        among = [*(pairs or ((n, total - n) for n in range(1, total)))]
        if now in among or not among:  # a tie leaves it as it is
            among.insert(0, now)
        return max(among, key=lambda pair: round(self.throughput(*pair), 3))

    def sentence(self, word: str = "GPU", is_synchronous: bool = False) -> str:
        if is_synchronous:
            shares = f"engines idle {self.rollout_idle:.0%}, trainers {self.train_idle:.0%}"
            return f"synchronous: {shares}; buffer.max_staleness = 1 or more would let both work"
        if self.verdict == "balanced":
            return f"balanced: engines idle {self.rollout_idle:.0%}, trainers {self.train_idle:.0%}"
        is_generation = self.verdict == "generation-bound"
        who, idle = "engines", self.rollout_idle
        if is_generation:
            who, idle = "trainers", self.train_idle
        pool = "rollout" if is_generation else "training"
        more = (self.rollout + 1, self.train) if is_generation else (self.rollout, self.train + 1)
        gain = self.throughput(*more) - 1
        text = f"{self.verdict}: {who} idle {idle:.0%}, one {word} more for {pool} would give "
        text += f"+{gain:.0%}"
        best = self.best()
        if best != (self.rollout, self.train) and self.throughput(*best) > 1.02:
            gain = self.throughput(*best) - 1
            text += f"; of these, {best[0]} + {best[1]} would give {gain:+.0%}"
        return text


def balance(lines: Sequence[dict[str, Any]], rollout: int, train: int) -> Balance | None:
    """None where there are too few steps with these devices to tell."""
    now = (rollout, train)
    lines = [
        line
        for line in lines
        if (line.get("rollout/devices", rollout), line.get("train/devices", train)) == now
    ]
    counted = lines[NUM_FIRST:]
    if not counted:
        return None
    seconds = [
        after["seconds"] - before["seconds"]
        for before, after in zip(lines[NUM_FIRST - 1 :], counted, strict=False)
    ]
    total = max(1e-9, sum(seconds))

    def mean(name: str) -> float:
        pairs = zip(counted, seconds, strict=True)
        return sum(line.get(name, 0.0) * s for line, s in pairs) / total

    return Balance(rollout, train, mean("rollout/idle_frac"), mean("train/idle_frac"))
