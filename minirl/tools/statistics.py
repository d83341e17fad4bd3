"""How sure a figure is: intervals, pass@k, and tests of two results on the same problems.

Takes rewards by problem, gives numbers. Every rule is stated where it is used and in
docs/evaluation.md; nothing here is random but for draws from a fixed seed.

Leaves out: where rewards come from, files, looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, prod, sqrt

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # of a normal distribution: 95 % are within so many deviations
DRAWS = 10_000
SEED = 0
CHUNK = 250  # draws at once: 250 of 10,000 problems are 20 MB


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds that hold the true one in 95 of 100 such experiments."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} ({self.low:.1%} to {self.high:.1%})"


def interval_of(by_problem: Sequence[Sequence[float]]) -> Interval | None:
    """Of the mean over problems of each problem's mean reward. None: there is nothing to average.

    One answer to each, each 0 or 1: Wilson's. Otherwise answers to one problem are not independent,
    so problems are drawn again, with their answers, 10,000 times: the middle 95 % of the means.
    Where all problems have the same mean, such draws know no spread: Wilson's over the problems.
    """
    means = np.array([float(np.mean(rewards)) for rewards in by_problem if len(rewards)])
    if not len(means):
        return None
    is_single = all(len(rewards) <= 1 for rewards in by_problem)
    is_binary = bool(np.isin(means, (0.0, 1.0)).all())
    mean = float(means.mean())
    if (is_single and is_binary) or (np.ptp(means) == 0 and 0 <= mean <= 1):
        return wilson(mean, len(means))
    drawn = np.sort(bootstrap_means(means))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(mean, float(low), float(high))


def wilson(share: float, count: int, z: float = Z95) -> Interval:
    """Wilson's score interval of a share of `count` independent trials."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = share * (1 - share) / count + z * z / (4 * count * count)
    half = z * sqrt(spread) / (1 + z * z / count)
    # At 0 and 1 that end is exact, but for rounding.
    low, high = (0.0 if share == 0 else middle - half), (1.0 if share == 1 else middle + half)
    return Interval(share, max(0.0, low), min(1.0, high))


def bootstrap_means(values: NDArray[np.float64], num_draws: int = DRAWS) -> NDArray[np.float64]:
    """Means of as many values, drawn with replacement."""
    dice, means = np.random.default_rng(SEED), []
    for first in range(0, num_draws, CHUNK):
        size = (min(CHUNK, num_draws - first), len(values))
        means.append(values[dice.integers(0, len(values), size)].mean(1))
    return np.concatenate(means)


def pass_at(k: int, num_answers: int, num_right: int) -> float:
    """The chance that one of k answers is right, without bias, from n ≥ k answers of which c are:
    1 - C(n - c, k) / C(n, k), as in the Codex paper."""
    assert 1 <= k <= num_answers
    wrong = num_answers - num_right
    return 1.0 - prod((wrong - i) / (num_answers - i) for i in range(k)) if wrong >= k else 1.0


def usual_ks(most: int) -> list[int]:
    """1, 2, 4, 8, … and the largest there is."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return powers if powers[-1:] == [most] else [*powers, most]


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Two-sided p, exact: had neither side an edge, each problem that changed was a fair coin."""
    changed = num_gained + num_lost
    if not changed:
        return 1.0
    fewer = min(num_gained, num_lost)
    tail = sum(comb(changed, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)  # whole numbers until here: no coin is rounded away


def sign_flips(differences: Sequence[float], num_draws: int = DRAWS) -> float:
    """Two-sided p of a paired permutation test on differences of means by problem: the share of
    10,000 random swaps of the two sides with a mean at least as far from 0, counting ours."""
    values = np.asarray(differences, np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    dice, seen = np.random.default_rng(SEED), abs(values.sum())
    num_as_far = 0
    for first in range(0, num_draws, CHUNK):
        size = (min(CHUNK, num_draws - first), len(values))
        sums = np.abs((dice.integers(0, 2, size) * 2 - 1) @ values)
        num_as_far += int((sums >= seen - 1e-9).sum())
    return (num_as_far + 1) / (num_draws + 1)
