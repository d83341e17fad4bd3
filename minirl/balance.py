"""Which pool holds a run back, in one sentence. Takes metric lines or idle shares, gives text.

Each pool's capacity is what it did, divided by its busy share; the slower pool is the bottleneck.
Evaluations and checkpoints count as they came.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minirl.config import TINY, Config

# Of a pool that has all CPU cores instead of half: SmolLM2-135M on 2 cores; none for "tiny".
SPEEDUP = 1.15


def sentence(config: Config, idle: Sequence[float], word: str = "GPU") -> str:
    """`idle`: the shares of rollout and training; `word`: "GPU" where there may be one more, ""
    where there is none left, "cores" on a CPU."""
    shares = f"engines idle {idle[0]:.0%}, trainers {idle[1]:.0%}"
    busy = [max(1e-3, 1 - share) for share in idle]
    if config.devices.share:
        return f"both on the same {word or 'GPU'}: {shares}"
    advice, gain = "", SPEEDUP / sum(busy) - 1
    if word == "cores" and config.num_devices == 2 and gain > 0.1 and config.model.path != TINY:
        advice = f"; all cores in turn (devices.share, max_staleness 0) would give {gain:+.0%}"
    if config.is_synchronous:
        text = f"synchronous: {shares}; buffer.max_staleness = 1 or more would let both work"
        return text + advice
    if max(idle) < 0.05:
        return f"balanced: {shares}"
    text, pool, num = "training-bound: engines", "training", config.devices.train
    if idle[1] > idle[0]:
        text, pool, num = "generation-bound: trainers", "rollout", config.devices.rollout
    if word == "GPU":  # more help the slower pool until the other one is the slower
        gain = min((num + 1) / num, max(busy) / min(busy)) - 1
        advice = f", one {word} more for {pool} would give {gain:+.0%}"
    return f"{text} idle {max(idle):.0%}{advice}"


def measured(config: Config, lines: Sequence[dict[str, Any]], word: str) -> str:
    """Of the steps with these devices, without the first, which waits for the first answers; steps
    weigh by their time. Empty where there are too few."""
    now = {"rollout/devices": config.devices.rollout, "train/devices": config.devices.train}
    own = [line for line in lines if all(line.get(k, n) == n for k, n in now.items())]
    steps = [(line, line["seconds"] - before["seconds"]) for before, line in pairwise(own)]
    if not (total := sum(seconds for _, seconds in steps)):
        return ""
    idle = [
        sum(line.get(f"{pool}/idle_frac", 0.0) * seconds for line, seconds in steps) / total
        for pool in ("rollout", "train")
    ]
    return sentence(config, idle, word)
