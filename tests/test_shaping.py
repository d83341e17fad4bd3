"""What is trained on, from known parts; what is counted stays the task's own verdict."""

from dataclasses import replace
from typing import Any

import pytest

from minirl.config import Config
from minirl.filters import judge
from minirl.records import Group, StopReason, Trajectory
from minirl.rules import FORMATS
from minirl.tasks.shaping import is_formed, is_shaped, overlong, shaped


def config(**tasks: Any) -> Config:
    base = Config()
    return replace(base, tasks=replace(base.tasks, **tasks))  # rollout.max_new_tokens is 128


FORMED = {
    "boxed": ["\\boxed{3}", "So \\boxed{\\frac{1}{2}}."],
    "hashes": ["#### 3", "2 + 1 = 3\n#### $1,000 \n"],
    "think": ["<think>hm</think>3", "hm</think> 3", "<think>\na\nb\n</think>\n\nc\nd"],
    "think_answer": ["<think>hm</think><answer>3</answer>", "hm</think>\n<answer>\n3\n</answer>\n"],
    r"yes|no \d+": ["yes", " no 17 \n"],
}
NOT_FORMED = {
    "boxed": ["3", "\\boxed{}", "\\boxed{3", "\\boxed{3} \\boxed{3}", "boxed{3}"],
    "hashes": ["3", "####", "#### none", "#### 3\n#### 4", "#### 3 4", "#### 3\nmore", "###3"],
    "think": ["3", "<think>hm</think>", "<think></think>3", "<think>a<think>b</think>c", "a</think>b</think>c"],  # noqa: E501
    "think_answer": ["<think>hm</think>3", "<think>hm</think><answer></answer>", "<answer>3</answer>", "<think>a</think><answer>3</answer><answer>4</answer>", "<think>a</think><answer>3</answer> so"],  # noqa: E501
    r"yes|no \d+": ["", "yess", "no", "yes no 17"],
}  # fmt: skip


@pytest.mark.parametrize("format", FORMED)
def test_formats(format: str) -> None:
    assert [text for text in FORMED[format] if not is_formed(format, text)] == []
    assert [text for text in NOT_FORMED[format] if is_formed(format, text)] == []


def test_every_named_format_is_tested() -> None:
    assert set(FORMATS) < FORMED.keys()


@pytest.mark.parametrize(
    ("changes", "reward", "tokens", "formed", "total"),
    [
        ({}, 1.0, 128, True, 1.0),
        ({"format": "boxed"}, 1.0, 64, True, 1.1),
        ({"format": "boxed"}, 1.0, 64, False, 1.0),
        ({"format": "boxed", "format_weight": 0.5}, 0.0, 64, True, 0.5),
        ({"length_weight": 0.2}, 1.0, 64, False, 0.9),
        ({"length_weight": 0.2}, 0.0, 128, False, -0.2),
        ({"overlong_tokens": 32}, 1.0, 112, False, 0.5),
        ({"reward_weight": 2.0}, 0.5, 1, False, 1.0),
        ({"reward_clip": (0.0, 1.0), "length_weight": 0.5}, 0.0, 128, False, 0.0),
        ({"reward_clip": (0.0, 1.0), "format": "think"}, 1.0, 1, True, 1.0),
        (
            {
                "reward_weight": 0.9,
                "format": "boxed",
                "length_weight": 0.1,
                "overlong_tokens": 64,
                "reward_clip": (-1.0, 0.6),
            },
            *(1.0, 96, True, 0.425),  # 0.9 + 0.1 - 0.075 - 0.5
        ),
    ],
)
def test_the_sum_of_all_parts(
    changes: dict[str, Any], reward: float, tokens: int, formed: bool, total: float
) -> None:
    assert shaped(config(**changes), reward, tokens, formed) == pytest.approx(total)
    assert is_shaped(config(**changes)) == bool(changes)


def test_overlong_is_the_part_that_dapo_names() -> None:
    assert [overlong(config(overlong_tokens=32), n) for n in (96, 104, 128)] == [0.0, 0.25, 1.0]


def test_a_group_keeps_the_verdicts_beside_what_is_trained_on() -> None:
    trajectories = [Trajectory(i, 20, 10, StopReason.STOP, 0, 0) for i in range(3)]
    with_format = config(format="boxed", max_failures=1)
    rewards = (1.0, None, 0.0)
    group = judge(with_format, (0, 0), trajectories, rewards, (True, True, False))
    assert isinstance(group, Group)
    assert group.rewards == pytest.approx((1.1, 0.0))
    assert group.own_rewards == (1.0, 0.0) and group.formed == (True, False)
    plain = judge(config(), (0, 0), trajectories, (1.0, 0.0, 0.5))
    assert isinstance(plain, Group) and plain.own_rewards == plain.rewards == (1.0, 0.0, 0.5)
