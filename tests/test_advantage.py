"""Advantages: known answers, and exact zeros where there is nothing to learn."""

import numpy as np
import pytest

from minirl.train.advantage import ESTIMATORS, estimate, gae
from minirl.train.batch import loss_weights

GROUPS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
STD = 0.1875**0.5 + 1e-4  # of a group: variance (3 · 0.0625 + 0.5625) / 4
ONE = 5 / (5 + 1e-4)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("grpo", [0.75 / STD, *[-0.25 / STD] * 3], [*[0.25 / STD] * 3, -0.75 / STD]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]),
        # The mean of the others is 0, or (1 + 0 + 0) / 3.
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        # Centred by group, then over the batch: mean 0, variance (2 · 0.5625 + 6 · 0.0625) / 8.
        ("reinforce++", [0.75 / STD, *[-0.25 / STD] * 3], [*[0.25 / STD] * 3, -0.75 / STD]),
        # ±5, four of each: mean 0, std 5. The question does not matter, only the answer.
        ("batch", [ONE, -ONE, -ONE, -ONE], [ONE, ONE, ONE, -ONE]),
    ],
)
def test_by_hand(name: str, first: list[float], second: list[float]) -> None:
    found = estimate(name, GROUPS)
    assert found[0] == pytest.approx(first) and found[1] == pytest.approx(second)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_without_variance_gets_zero_whatever_is_normalised_after(name: str) -> None:
    found = estimate(name, [[0.1] * 3, [1.0, 0.0, 1.0], [0.3] * 3])
    assert found[0] == found[2] == [0.0] * 3
    assert all(found[1])
    assert estimate(name, [[1.0, 1.0], [0.0, 0.0]]) == [[0.0, 0.0], [0.0, 0.0]]
    # Also where a penalty in the reward varies: it is not a signal of its own.
    assert estimate(name, [[1.0, 1.0]], [[0.001, 0.002]]) == [[0.0, 0.0]]


def test_a_penalty_is_taken_off_the_reward() -> None:
    assert estimate("dr_grpo", [[1.0, 0.0]], [[0.5, 0.1]])[0] == pytest.approx([0.3, -0.3])


def test_gae_by_hand() -> None:
    # λ 0.5; rewards 0, 0, 1; values 0.2, 0.4, 0.6.
    # δ: 0.4 - 0.2 = 0.2;  0.6 - 0.4 = 0.2;  1 - 0.6 = 0.4
    # A, from the last: 0.4;  0.2 + 0.5·0.4 = 0.4;  0.2 + 0.5·0.4 = 0.4
    rewards_N, values_N = (np.array(x, np.float32) for x in ([0, 0, 1], [0.2, 0.4, 0.6]))
    advantages_N, returns_N = gae(rewards_N, values_N, 0.5)
    assert advantages_N == pytest.approx([0.4, 0.4, 0.4], abs=1e-6)
    assert returns_N == pytest.approx([0.6, 0.8, 1.0], abs=1e-6)


def test_loss_weights_by_hand() -> None:
    # 6 trained tokens: 2, 4 and none. The loss is divided by 6 after.
    # Each trajectory that trains counts 1/2, a token of it 1/2 of that or 1/4.
    assert loss_weights([2, 4, 0], "sequence", 10) == [6 / 4, 6 / 8, 0.0]
    assert loss_weights([2, 4, 0], "constant", 10) == [6 / 30] * 3
    assert loss_weights([0, 0], "sequence", 10) == [0.0, 0.0]
