"""Stage 6, advantage: from rewards to how much better a trajectory, or a token, was than expected.

Takes the rewards of a whole batch, by group; gives a number a trajectory. `gae` alone gives one a
token, and needs a critic. Pure Python and numpy; every rank computes all of it.

A group whose rewards are all equal teaches nothing: its advantages are exactly 0 (`estimate` sees
to it), whatever is normalised after, and not the rounding error of a mean divided by epsilon.
docs/algorithms.md has every formula and its paper.

Axes: G trajectories of a group, N written tokens of a trajectory.
"""

from collections.abc import Callable, Sequence
from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4  # keeps a nearly constant group from being blown up
PLAIN_SCALE = 5.0  # the paper's rewards: 5 for right, -5 for wrong

Groups = Sequence[Sequence[float]]
Estimator = Callable[[Groups], list[list[float]]]


def group_normalised(rewards_G: Sequence[float]) -> list[float]:
    """GRPO: (r - mean) / (std + 1e-4), population std."""
    if is_flat(rewards_G):
        return [0.0] * len(rewards_G)
    mean, std = mean_and_std(rewards_G)
    return [(r - mean) / (std + EPSILON) for r in rewards_G]


def group_centred(rewards_G: Sequence[float]) -> list[float]:
    """Dr. GRPO: r - mean. Without the std, which makes easy and hard questions weigh more."""
    mean, _ = mean_and_std(rewards_G)
    return [r - mean for r in rewards_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """RLOO: r - mean of the group's other rewards."""
    total, others = fsum(rewards_G), len(rewards_G) - 1
    return [r - (total - r) / others for r in rewards_G]


def plain(rewards_G: Sequence[float]) -> list[float]:
    """The paper's: rewards of 0 … 1 as -5 … 5, no baseline but the batch's mean."""
    return [PLAIN_SCALE * (2 * r - 1) for r in rewards_G]


def batch_normalised(groups: Groups) -> list[list[float]]:
    """(a - mean) / (std + 1e-4) over all trajectories of the batch."""
    mean, std = mean_and_std([a for group in groups for a in group])
    return [[(a - mean) / (std + EPSILON) for a in group] for group in groups]


def each(of_group: Callable[[Sequence[float]], list[float]]) -> Estimator:
    return lambda groups: [of_group(group) for group in groups]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": each(group_normalised),
    "dr_grpo": each(group_centred),
    "rloo": each(leave_one_out),
    "reinforce++": lambda groups: batch_normalised(each(group_centred)(groups)),
    "batch": lambda groups: batch_normalised(each(plain)(groups)),
}


def estimate(name: str, rewards: Groups, penalties: Groups | None = None) -> list[list[float]]:
    """Advantages by group. `penalties` (a KL in the reward) are taken off the rewards before."""
    shaped = rewards
    if penalties is not None:
        shaped = [
            [r - p for r, p in zip(*pair, strict=True)]
            for pair in zip(rewards, penalties, strict=True)
        ]
    advantages = ESTIMATORS[name](shaped)
    # By the task's own rewards: a penalty that varies must not be blown up to a whole signal.
    return [
        [0.0] * len(group) if is_flat(group) else found
        for group, found in zip(rewards, advantages, strict=True)
    ]


def is_flat(rewards_G: Sequence[float]) -> bool:
    return not rewards_G or min(rewards_G) == max(rewards_G)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Population std."""
    if not values:
        return 0.0, 0.0
    mean = fsum(values) / len(values)
    return mean, sqrt(fsum((v - mean) ** 2 for v in values) / len(values))


def gae(
    rewards_N: NDArray[np.float32], values_N: NDArray[np.float32], lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(advantages_N, returns_N) of the written tokens of one trajectory, which then ends.

    δ_t = r_t + V_{t+1} - V_t;  A_t = δ_t + λ·A_{t+1};  return_t = A_t + V_t.
    """
    advantages_N = np.zeros_like(values_N, dtype=np.float64)
    value_after, after = 0.0, 0.0
    for t in range(len(values_N) - 1, -1, -1):
        delta = float(rewards_N[t]) + value_after - float(values_N[t])
        after = delta + lam * after
        advantages_N[t], value_after = after, float(values_N[t])
    found_N = advantages_N.astype(np.float32)
    return found_N, found_N + values_N
