"""Stage 6, advantage: from rewards to how much better a trajectory, or a token, was than expected.

Takes the rewards of a whole batch, by group; gives one number per trajectory. Every estimator has
this form, a user's too (`train.estimator = "my_adv.py:my_advantage"`); `gae` alone gives one number
per token, and needs a critic. Python and numpy only; every rank computes all of it.
docs/algorithms.md has every formula and its paper.

Axes: N written tokens of a trajectory.
"""

from collections.abc import Callable, Sequence
from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray

from minirl.errors import RecipeError
from minirl.tasks.registry import load_function

EPSILON = 1e-4  # keeps a nearly constant group from being blown up
PLAIN_SCALE = 5.0  # the AReaL paper's rewards: 5 for right, -5 for wrong

Groups = Sequence[Sequence[float]]
Estimator = Callable[[Groups], list[list[float]]]


def grpo(groups: Groups) -> list[list[float]]:
    """(r - mean) / (std + 1e-4) within a group."""
    return [normalised(group) for group in groups]


def dr_grpo(groups: Groups) -> list[list[float]]:
    """r - mean: without the std, which makes easy and hard questions weigh more."""
    return [[r - fsum(group) / len(group) for r in group] for group in groups]


def rloo(groups: Groups) -> list[list[float]]:
    """r - mean of the group's other rewards."""
    return [[r - (fsum(group) - r) / (len(group) - 1) for r in group] for group in groups]


def batch(groups: Groups) -> list[list[float]]:
    """The AReaL paper's: rewards of 0 … 1 as -5 … 5, no baseline but the batch's mean."""
    return over_batch([[PLAIN_SCALE * (2 * r - 1) for r in group] for group in groups])


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": lambda groups: over_batch(dr_grpo(groups)),  # with a group baseline
    "batch": batch,
}


def normalised(values: Sequence[float]) -> list[float]:
    """By mean and population std."""
    mean = fsum(values) / len(values)
    std = sqrt(fsum((v - mean) ** 2 for v in values) / len(values))
    return [(v - mean) / (std + EPSILON) for v in values]


def over_batch(groups: Groups) -> list[list[float]]:
    """Normalised over all trajectories of the batch."""
    flat = iter(normalised([value for group in groups for value in group]))
    return [[next(flat) for _ in group] for group in groups]


def estimate(name: str, rewards: Groups) -> list[list[float]]:
    """Advantages by group. A group whose rewards are all equal teaches nothing: its advantages are
    exactly 0."""
    estimator = ESTIMATORS.get(name) or load_function("train.estimator", name)
    found = estimator(rewards)
    if [*map(len, found)] != [*map(len, rewards)]:
        remedy = "return a list per group, with a number per reward"
        raise RecipeError("train.estimator", name, "gave not one advantage per reward", remedy)
    pairs = zip(found, rewards, strict=True)
    return [[0.0] * len(own) if min(own) == max(own) else group for group, own in pairs]


def gae(
    reward: float, values_N: NDArray[np.float32], lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(advantages_N, returns_N) of the written tokens of one trajectory, whose reward comes at its
    end: it is the value after the last token.

    δ_t = V_{t+1} - V_t;  A_t = δ_t + λ·A_{t+1};  return_t = A_t + V_t.
    """
    advantages_N = np.zeros_like(values_N)
    value_after, after = reward, 0.0
    for t in reversed(range(len(values_N))):
        value = float(values_N[t])
        after = value_after - value + lam * after
        advantages_N[t], value_after = after, value
    return advantages_N, advantages_N + values_N
