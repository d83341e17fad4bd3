"""Which groups reach the buffer: failures, over-long answers, cut answers, equal rewards."""

from dataclasses import replace
from typing import Any

import pytest

from minirl.config import Config
from minirl.records import Drop, Group, StopReason, Trajectory
from minirl.tasks.rewards import filter_group, overlong_penalty


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
    group = filter_group(config(), (7, 5), trajectories, (1.0, 1.0, 1.0))
    assert group == Group(7, 5, tuple(trajectories), (1.0, 1.0, 1.0))


def test_failed_rewards_are_left_out_up_to_the_limit_and_are_never_a_0() -> None:
    trajectories = answers(3, 4, 5, 6)
    group = filter_group(config(max_failures=2), (0, 0), trajectories, (1.0, None, 0.5, None))
    assert isinstance(group, Group)
    assert group.trajectories == (trajectories[0], trajectories[2])
    assert group.rewards == (1.0, 0.5)
    assert filter_group(config(max_failures=1), (0, 0), trajectories, (1.0, None, 0.5, None)) is (
        Drop.REWARD_ERROR
    )


def test_the_penalty_rises_from_the_zone_to_the_limit_and_is_taken_off_the_reward() -> None:
    for length, lost in {1: 0.0, 103: 0.0, 108: 0.2, 118: 0.6, 128: 1.0}.items():
        answer, zone = answers(length)[0], config(overlong_tokens=25)
        assert overlong_penalty(zone, answer) == pytest.approx(lost)
        assert overlong_penalty(config(), answer) == 0.0
    group = filter_group(config(overlong_tokens=25), (0, 0), answers(10, 118, 128), (1.0, 1.0, 0.0))
    assert isinstance(group, Group) and group.rewards == pytest.approx((1.0, 0.4, -1.0))
    assert group.own_rewards == (1.0, 1.0, 0.0)


def test_truncated_answers_are_masked_but_count_in_the_baseline() -> None:
    strict = config(mask_truncated=True)
    group = filter_group(strict, (0, 0), answers(10, 128, 20), (1.0, 0.0, 0.0))
    assert isinstance(group, Group)
    assert group.masked == {1} and group.rewards == (1.0, 0.0, 0.0)
    assert (group.head_version, group.newest_version) == (0, 2)
    assert filter_group(strict, (0, 0), answers(128, 128), (1.0, 0.0)) is Drop.TRUNCATED


def test_equal_rewards_are_dropped_after_penalties() -> None:
    strict = config(drop_equal_rewards=True)
    assert filter_group(strict, (0, 0), answers(5, 6), (1.0, 1.0)) is Drop.EQUAL_REWARDS
    assert isinstance(filter_group(strict, (0, 0), answers(5, 6), (1.0, 0.0)), Group)
    both = config(drop_equal_rewards=True, overlong_tokens=25)
    assert isinstance(filter_group(both, (0, 0), answers(5, 128), (1.0, 1.0)), Group)
