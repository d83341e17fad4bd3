"""How sure a figure is: intervals, pass@k, and tests of two results on the same problems.

Takes rewards by problem, gives numbers. Every rule is stated where it is used and in
docs/evaluation.md; draws come from a fixed seed, so the same rewards give the same figures.

Leaves out: where rewards come from, files, looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import scipy
from numpy.typing import NDArray

Z95 = 1.959964  # of a normal distribution: 95 % are within so many deviations
DRAWS = 10_000
BATCH = 250  # draws at once: 250 of 10,000 problems are 20 MB


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
    so problems are drawn again, with their answers: the bootstrap. Where all problems have the same
    mean, such draws know no spread: Wilson's over the problems.
    """
    means = np.array([float(np.mean(rewards)) for rewards in by_problem if len(rewards)])
    if not len(means):
        return None
    is_single = all(len(rewards) <= 1 for rewards in by_problem)
    is_binary = bool(np.isin(means, (0.0, 1.0)).all())
    mean = float(means.mean())
    if (is_single and is_binary) or (np.ptp(means) == 0 and 0 <= mean <= 1):
        return wilson(mean, len(means))
    return bootstrap(means)


def wilson(share: float, count: int) -> Interval:
    """Wilson's score interval of a share of `count` independent trials."""
    found = scipy.stats.binomtest(round(share * count), count).proportion_ci(method="wilson")
    return Interval(share, float(found.low), float(found.high))


def bootstrap(values: NDArray[np.float64]) -> Interval:
    """The middle 95 % of the means of 10,000 draws of as many values, with replacement."""
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return Interval(mean, mean, mean)
    options = {"n_resamples": DRAWS, "batch": BATCH, "method": "percentile", "rng": 0}
    found = scipy.stats.bootstrap((values,), np.mean, **options).confidence_interval
    return Interval(mean, float(found.low), float(found.high))


def pass_at(k: int, num_answers: int, num_right: int) -> float:
    """The chance that one of k answers is right, without bias, from n ≥ k answers of which c are:
    1 - C(n - c, k) / C(n, k), as in the Codex paper."""
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def usual_ks(most: int) -> list[int]:
    """1, 2, 4, 8, … and the largest there is."""
    powers = {1 << i for i in range(most.bit_length())}
    return sorted(powers | {most}) if most else []


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Two-sided p, exact: had neither side an edge, each problem that changed was a fair coin."""
    changed = num_gained + num_lost
    return float(scipy.stats.binomtest(num_gained, changed).pvalue) if changed else 1.0


def sign_flips(differences: Sequence[float]) -> float:
    """Two-sided p of a paired permutation test on differences of means by problem: all swaps of the
    two sides where there are at most 10,000, else as many random ones, counting ours."""
    values = np.array([difference for difference in differences if difference], np.float64)
    if len(values) < 2:
        return 1.0
    options = {"permutation_type": "samples", "n_resamples": DRAWS, "batch": BATCH, "rng": 0}
    return float(scipy.stats.permutation_test((values,), np.mean, **options).pvalue)
