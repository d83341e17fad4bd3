"""How sure a figure is: intervals, pass@k, and a test of two results on the same problems.

Takes rewards by problem, or figures by seed; gives numbers (docs/evaluation.md). Draws have a fixed
seed. No files.
"""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, stdev
from typing import NamedTuple, TypedDict

import numpy as np
import scipy
from numpy.typing import NDArray

DRAWS = {"n_resamples": 10_000, "batch": 250, "method": "percentile", "rng": 0}  # 20 MB at once


class Interval(NamedTuple):  # of 95 %
    mean: float
    low: float
    high: float


class Estimate(TypedDict):
    """A mean over seeds and half the width of its 95 % interval; None: one seed says nothing."""

    mean: float
    half: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval."""
    num, half = len(values), None
    if num > 1:
        half = float(scipy.stats.t.ppf(0.975, num - 1)) * stdev(values) / sqrt(num)
    return Estimate(mean=fmean(values), half=half, count=num)


def interval_of(by_problem: Sequence[Sequence[float]]) -> Interval | None:
    """Of the mean over problems of their mean rewards: Wilson's where each is 0 or 1, or all are
    equal; else the bootstrap over problems, as answers to one problem are not independent."""
    means = np.array([float(np.mean(rewards)) for rewards in by_problem if len(rewards)])
    if not len(means):
        return None
    is_binary, is_same = np.isin(means, (0.0, 1.0)).all(), np.ptp(means) == 0
    mean = float(means.mean())
    return wilson(mean, len(means)) if is_binary or (is_same and 0 < mean < 1) else bootstrap(means)


def wilson(share: float, count: int) -> Interval:
    found = scipy.stats.binomtest(round(share * count), count).proportion_ci(method="wilson")
    return Interval(share, float(found.low), float(found.high))


def bootstrap(values: NDArray[np.float64]) -> Interval:
    """The middle 95 % of the means of 10,000 draws of as many values, with replacement."""
    mean = float(values.mean())
    if np.ptp(values) == 0:  # also of one value
        return Interval(mean, mean, mean)
    found = scipy.stats.bootstrap((values,), np.mean, **DRAWS).confidence_interval
    return Interval(mean, float(found.low), float(found.high))


def pass_at(k: int, num_answers: int, num_right: int) -> float:
    """Unbiased, as in the Codex paper: the chance that one of k answers is right."""
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def usual_ks(most: int) -> list[int]:
    return sorted({1 << i for i in range(most.bit_length())} | {most}) if most else []


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Two-sided p, exact: had neither side an edge, each problem that changed was a fair coin."""
    num = num_gained + num_lost
    return float(scipy.stats.binomtest(num_gained, num).pvalue) if num else 1.0
