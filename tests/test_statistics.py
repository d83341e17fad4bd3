"""Intervals, pass@k and paired tests against known values and against brute force."""

import itertools
import random
from statistics import fmean

import pytest

from minirl.statistics import interval_of, pass_at, usual_ks, wilson


def test_wilson_s_interval_has_known_values() -> None:
    # Newcombe 1998, table I, method 3.
    table = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]
    for right, count, low, high in [*table, (1, 29, 0.0061, 0.1718)]:
        found = wilson(right / count, count)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert interval_of([(1.0,)] * 81 + [(0.0,)] * 182) == wilson(81 / 263, 263)
    assert interval_of([(1.0,), ()]) == wilson(1.0, 1)
    copied = interval_of([(1.0,) * 8] * 81 + [(0.0,) * 8] * 182)
    assert copied == wilson(81 / 263, 263), "answers to one problem are not independent"
    assert interval_of([]) is interval_of([(), ()]) is None  # nothing was graded


def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    dice, num_held = random.Random(0), 0
    for _ in range(200):
        skills = [dice.betavariate(0.6, 0.4) for _ in range(60)]  # true mean 0.6
        found = interval_of([[float(dice.random() < s) for _ in range(4)] for s in skills])
        num_held += found is not None and found.low <= 0.6 <= found.high
    assert 180 <= num_held <= 199


def test_pass_at_k_is_the_mean_over_all_choices_of_k() -> None:
    for n, c in [(1, 0), (1, 1), (4, 1), (8, 3), (8, 0), (8, 8)]:
        answers = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            chosen = list(itertools.combinations(answers, k))
            assert pass_at(k, n, c) == pytest.approx(fmean(any(part) for part in chosen))
    assert [usual_ks(k) for k in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
