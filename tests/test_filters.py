"""Which groups reach the buffer: failures, over-long answers, cut answers, equal rewards."""

from dataclasses import replace
from typing import Any

import pytest

from minirl.buffer import Drop
from minirl.config import Config
from minirl.filters import judge
from minirl.records import Group, StopReason, Trajectory
from minirl.tasks.shaping import overlong


def config(**changes: Any) -> Config:
    base = Config()
    tasks = {k: v for k, v in changes.items() if hasattr(base.tasks, k)}
    buffer = {k: v for k, v in changes.items() if hasattr(base.buffer, k)}
    assert tasks.keys() | buffer.keys() == changes.keys()
    return replace(base, tasks=replace(base.tasks, **tasks), buffer=replace(base.buffer, **buffer))


def answers(*lengths: int) -> list[Trajectory]:
    """Of these many tokens; those of 128 were cut."""
    stops = [StopReason.LENGTH if n == 128 else StopReason.STOP for n in lengths]
    pairs = enumerate(zip(lengths, stops, strict=True))
    return [Trajectory(i, n + 10, n, stop, i, i) for i, (n, stop) in pairs]


def test_by_default_every_graded_group_passes_as_it_is() -> None:
    trajectories = answers(3, 128, 128)
    group = judge(config(), (7, 5), trajectories, (1.0, 1.0, 1.0))
    assert group == Group(7, 5, tuple(trajectories), (1.0, 1.0, 1.0))


def test_failed_rewards_are_left_out_up_to_the_limit_and_are_never_a_0() -> None:
    trajectories = answers(3, 4, 5, 6)
    group = judge(config(max_failures=2), (0, 0), trajectories, (1.0, None, 0.5, None))
    assert isinstance(group, Group)
    assert group.trajectories == (trajectories[0], trajectories[2])
    assert group.rewards == (1.0, 0.5)
    assert judge(config(max_failures=1), (0, 0), trajectories, (1.0, None, 0.5, None)) is (
        Drop.REWARD_ERROR
    )


@pytest.mark.parametrize(
    ("length", "lost"), [(1, 0.0), (103, 0.0), (108, 0.2), (118, 0.6), (128, 1.0)]
)
def test_the_penalty_rises_from_the_zone_to_the_limit(length: int, lost: float) -> None:
    assert overlong(config(overlong_tokens=25), answers(length)[0]) == pytest.approx(lost)
    assert overlong(config(), answers(length)[0]) == 0.0


def test_the_penalty_is_taken_off_the_reward() -> None:
    group = judge(config(overlong_tokens=25), (0, 0), answers(10, 118, 128), (1.0, 1.0, 0.0))
    assert isinstance(group, Group) and group.rewards == pytest.approx((1.0, 0.4, -1.0))
    assert group.own_rewards == (1.0, 1.0, 0.0)


def test_cut_answers_are_masked_but_count_in_the_baseline() -> None:
    group = judge(config(mask_truncated=True), (0, 0), answers(10, 128, 20), (1.0, 0.0, 0.0))
    assert isinstance(group, Group)
    assert group.masked == {1} and group.rewards == (1.0, 0.0, 0.0)
    assert (group.head_version, group.newest_version) == (0, 2)


def test_a_group_of_cut_answers_only_is_dropped() -> None:
    assert judge(config(mask_truncated=True), (0, 0), answers(128, 128), (1.0, 0.0)) is (
        Drop.TRUNCATED
    )


def test_equal_rewards_are_dropped_after_penalties() -> None:
    strict = config(drop_equal_rewards=True)
    assert judge(strict, (0, 0), answers(5, 6), (1.0, 1.0)) is Drop.EQUAL_REWARDS
    assert isinstance(judge(strict, (0, 0), answers(5, 6), (1.0, 0.0)), Group)
    both = config(drop_equal_rewards=True, overlong_tokens=25)
    assert isinstance(judge(both, (0, 0), answers(5, 128), (1.0, 1.0)), Group)
