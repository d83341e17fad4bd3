"""Stage 6, advantage: from the rewards of one group to one number a trajectory. Pure Python.

Axes: G trajectories of a group.
"""

from collections.abc import Sequence
from math import fsum, sqrt

EPSILON = 1e-4  # keeps a nearly constant group from being blown up


def group_normalised(rewards_G: Sequence[float]) -> list[float]:
    """GRPO: (r - mean) / (std + 1e-4), population std.

    A group without variance teaches nothing: its advantages are exactly 0, not the rounding
    error of the mean divided by epsilon.
    """
    if not rewards_G or min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    mean = fsum(rewards_G) / len(rewards_G)
    std = sqrt(fsum((r - mean) ** 2 for r in rewards_G) / len(rewards_G))
    return [(r - mean) / (std + EPSILON) for r in rewards_G]
