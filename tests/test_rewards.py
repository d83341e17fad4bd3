"""Which groups reach the buffer: failures, over-long answers, truncated answers, equal rewards."""

from typing import Any

import pytest

from minirl.config import BufferConfig, Config, TasksConfig
from minirl.records import Drop, Group, StopReason, Trajectory
from minirl.tasks.rewards import filter_group, overlong_penalty


def config(**changes: Any) -> Config:
    tasks = {k: v for k, v in changes.items() if k in ("max_failures", "overlong_tokens")}
    buffer = {k: v for k, v in changes.items() if k not in tasks}
    return Config(tasks=TasksConfig(**tasks), buffer=BufferConfig(**buffer))


def answers(*lengths: int) -> list[Trajectory]:
    """Of these many tokens; those of 128 were truncated."""
    ends = [StopReason.LENGTH if n == 128 else StopReason.STOP for n in lengths]
    return [Trajectory(i, n + 10, n, ends[i], i, i) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "rewards", "changes", "why"),
    [
        ((3, 4, 5, 6), (1.0, None, 0.5, None), {"max_failures": 1}, Drop.REWARD_ERROR),
        ((128, 128), (1.0, 0.0), {"mask_truncated": True}, Drop.TRUNCATED),
        ((5, 6), (1.0, 1.0), {"drop_equal_rewards": True}, Drop.EQUAL_REWARDS),
    ],
)
def test_a_group_that_teaches_nothing_is_dropped_with_a_reason(
    lengths: tuple[int, ...], rewards: tuple[float | None, ...], changes: Any, why: Drop
) -> None:
    assert filter_group(config(**changes), (0, 0), answers(*lengths), rewards) is why


def passed(rewards: tuple[float | None, ...], *lengths: int, **changes: Any) -> Group:
    group = filter_group(config(**changes), (7, 5), answers(*lengths), rewards)
    assert isinstance(group, Group)
    return group


def test_others_pass_as_the_recipe_shapes_them() -> None:
    plain = Group(7, 5, tuple(answers(3, 128, 128)), (1.0, 1.0, 1.0))
    assert passed((1.0, 1.0, 1.0), 3, 128, 128) == plain, "by default as they are"
    group = passed((1.0, None, 0.5, None), 3, 4, 5, 6, max_failures=2)
    assert group.rewards == (1.0, 0.5), "a failure is never a 0"
    assert group.trajectories == (answers(3, 4, 5, 6)[0], answers(3, 4, 5, 6)[2])
    group = passed((1.0, 0.0, 0.0), 10, 128, 20, mask_truncated=True)
    assert group.masked == {1} and group.rewards == (1.0, 0.0, 0.0), "it counts in the baseline"
    assert (group.head_version, group.newest_version) == (0, 2)
    assert passed((1.0, 0.0), 5, 6, drop_equal_rewards=True)
    assert passed((1.0, 1.0), 5, 128, drop_equal_rewards=True, overlong_tokens=25)  # penalties


def test_the_penalty_rises_from_the_zone_to_the_limit_and_is_taken_off_the_reward() -> None:
    for length, lost in {1: 0.0, 103: 0.0, 108: 0.2, 118: 0.6, 128: 1.0}.items():
        answer, zone = answers(length)[0], config(overlong_tokens=25)
        assert overlong_penalty(zone, answer) == pytest.approx(lost)
        assert overlong_penalty(config(), answer) == 0.0
    group = passed((1.0, 1.0, 0.0), 10, 118, 128, overlong_tokens=25)
    assert group.rewards == pytest.approx((1.0, 0.4, -1.0))
    assert group.task_rewards == (1.0, 1.0, 0.0)
