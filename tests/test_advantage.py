"""Advantages: known answers, and exact zeros where there is nothing to learn."""

import numpy as np
import pytest

from minirl.train.advantage import ESTIMATORS, estimate, gae, group_normalised
from minirl.train.batch import loss_weights


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


GROUPS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]


def test_dr_grpo_by_hand() -> None:
    assert estimate("dr_grpo", GROUPS) == [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]


def test_rloo_by_hand() -> None:
    # Of the others: 0, and (1 + 0 + 0) / 3.
    assert estimate("rloo", GROUPS)[0] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert estimate("rloo", GROUPS)[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


def test_reinforce_plus_plus_by_hand() -> None:
    # Centred by group (above), then over the batch: mean 0, variance (2·0.5625 + 6·0.0625) / 8.
    std = 0.1875**0.5 + 1e-4
    found = estimate("reinforce++", GROUPS)
    assert found[0] == pytest.approx([0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std])
    assert found[1] == pytest.approx([0.25 / std, 0.25 / std, 0.25 / std, -0.75 / std])


def test_plain_reward_normalised_over_the_batch_by_hand() -> None:
    # ±5, four of each: mean 0, std 5. The question does not matter, only the answer.
    one = 5 / (5 + 1e-4)
    assert estimate("batch", GROUPS)[0] == pytest.approx([one, -one, -one, -one])
    assert estimate("batch", GROUPS)[1] == pytest.approx([one, one, one, -one])


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


def test_gae_at_one_is_return_minus_value_and_at_zero_one_step() -> None:
    rewards_N, values_N = (np.array(x, np.float32) for x in ([-0.1, 0.0, 2], [0.5, -1, 3]))
    advantages_N, returns_N = gae(rewards_N, values_N, 1.0)
    assert returns_N == pytest.approx([1.9, 2.0, 2.0], abs=1e-6)
    assert advantages_N == pytest.approx([1.4, 3.0, -1.0], abs=1e-6)
    advantages_N, _ = gae(rewards_N, values_N, 0.0)
    assert advantages_N == pytest.approx([-0.1 - 1 - 0.5, 3 + 1, 2 - 3], abs=1e-6)


def test_loss_weights_by_hand() -> None:
    # 6 trained tokens: 2, 4 and none. The loss is divided by 6 after.
    assert loss_weights([2, 4, 0], "token", 10) == [1.0, 1.0, 1.0]
    # Each trajectory that trains counts 1/2, a token of it 1/2 of that or 1/4.
    assert loss_weights([2, 4, 0], "sequence", 10) == [6 / 4, 6 / 8, 0.0]
    assert loss_weights([2, 4, 0], "constant", 10) == [6 / 30] * 3
    assert loss_weights([0, 0], "sequence", 10) == [0.0, 0.0]
