"""How sure a figure is: intervals, pass@k, and a test of two results on the same problems.

Takes rewards by problem, gives numbers. docs/evaluation.md states every rule; draws come from a
fixed seed, so the same rewards give the same figures. Leaves out: where rewards come from, files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import scipy
from numpy.typing import NDArray

# Draws at once: 250 of 10,000 problems are 20 MB.
DRAWS = {"n_resamples": 10_000, "batch": 250, "method": "percentile", "rng": 0}


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds that hold the true one in 95 of 100 such experiments."""

    mean: float
    low: float
    high: float


def interval_of(by_problem: Sequence[Sequence[float]]) -> Interval | None:
    """Of the mean over problems of each problem's mean reward. None: there is nothing to average.

    Where each problem's mean is 0 or 1, or all have the same mean: Wilson's over the problems.
    Otherwise answers to one problem are not independent, so problems are drawn again, with their
    answers: the bootstrap.
    """
    means = np.array([float(np.mean(rewards)) for rewards in by_problem if len(rewards)])
    if not len(means):
        return None
    is_binary, is_same = np.isin(means, (0.0, 1.0)).all(), np.ptp(means) == 0
    mean = float(means.mean())
    return wilson(mean, len(means)) if is_binary or (is_same and 0 < mean < 1) else bootstrap(means)


def wilson(share: float, count: int) -> Interval:
    """Wilson's score interval of a share of `count` independent trials."""
    found = scipy.stats.binomtest(round(share * count), count).proportion_ci(method="wilson")
    return Interval(share, float(found.low), float(found.high))


def bootstrap(values: NDArray[np.float64]) -> Interval:
    """The middle 95 % of the means of 10,000 draws of as many values, with replacement."""
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return Interval(mean, mean, mean)
    found = scipy.stats.bootstrap((values,), np.mean, **DRAWS).confidence_interval
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
