"""Advantages: known answers, and exact zeros where there is nothing to learn."""

import pytest

from minirl.train.advantage import group_normalised


def test_by_hand() -> None:
    # mean 0.25, variance (3 · 0.0625 + 0.5625) / 4 = 0.1875, std 0.4330127
    std = 0.1875**0.5
    assert group_normalised([1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [0.75 / (std + 1e-4), *[-0.25 / (std + 1e-4)] * 3]
    )


def test_equal_rewards_give_exactly_zero() -> None:
    # The mean of three 0.1 is not 0.1 in floating point: this must not leak through.
    for group in ([0.1] * 3, [1.0] * 8, [0.7], []):
        assert group_normalised(group) == [0.0] * len(group)
