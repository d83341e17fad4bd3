"""Which groups reach the buffer: failures, over-long answers, truncated answers, equal rewards. And
the graders of gsm8k and math against answers that were labelled by hand for this project."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from minirl.config import Config, TasksConfig
from minirl.recipe import build
from minirl.records import Answer, Drop, Example, Group, StopReason, Trajectory
from minirl.tasks import Task
from minirl.tasks import math as mathematics
from minirl.tasks.gsm8k import Gsm8k
from minirl.tasks.math import Mathematics, is_equal
from minirl.tasks.rewards import filter_group, overlong_penalty


def config(**changes: Any) -> Config:
    of_tasks = ("max_failures", "overlong_tokens")
    return build({f"{'tasks' if k in of_tasks else 'buffer'}.{k}": v for k, v in changes.items()})


def answers(*lengths: int) -> list[Trajectory]:
    """Of these many tokens; those of 128 were truncated."""
    ends = [StopReason.LENGTH if n == 128 else StopReason.STOP for n in lengths]
    return [Trajectory(i, n + 10, n, ends[i], i, i) for i, n in enumerate(lengths)]


def test_a_group_that_teaches_nothing_is_dropped_with_a_reason() -> None:
    for lengths, rewards, changes, why in (
        ((3, 4, 5, 6), (1.0, None, 0.5, None), {"max_failures": 1}, Drop.REWARD_ERROR),
        ((128, 128), (1.0, 0.0), {"mask_truncated": True}, Drop.TRUNCATED),
        ((5, 6), (1.0, 1.0), {"drop_equal_rewards": True}, Drop.EQUAL_REWARDS),
    ):
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


# Graders -------------------------------------------------------------------------------------


def verdict(task: Task, case: dict[str, object], stop: StopReason = StopReason.STOP) -> bool:
    example = Example("", str(case["reference"]))
    return task.reward(example, Answer(str(case["answer"]), stop, 1)) == 1.0


@pytest.mark.parametrize(("name", "kind"), [("gsm8k", Gsm8k), ("math", Mathematics)])
def test_every_label_is_met(name: str, kind: type[Task]) -> None:
    lines = (Path(__file__).parent / "data" / f"{name}_cases.jsonl").read_text().splitlines()
    labelled, task = [json.loads(line) for line in lines], kind(TasksConfig())
    wrong = [case for case in labelled if verdict(task, case) != case["right"]]
    assert wrong == []
    assert len(labelled) >= 150
    assert min(Counter(c["right"] for c in labelled).values()) >= 50, "both verdicts are tested"
    right = next(case for case in labelled if case["right"])
    assert not verdict(task, right, StopReason.LENGTH), "what was cut is not an answer"


def test_gsm8ks_own_references_score_1() -> None:
    folder = os.environ.get("MINIRL_GSM8K")
    if not folder:
        pytest.skip("MINIRL_GSM8K names no folder with train.jsonl and test.jsonl")
    task = Gsm8k(TasksConfig(data=folder))
    for example in (*map(task.train, range(task.num_train)), *task.heldout(10**6)):
        for text in (example.worked, task.solution(example)):
            assert task.reward(example, Answer(text, StopReason.STOP, 1)) == 1.0, example


def test_a_comparison_may_fail_as_a_verifier_survives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "LIMIT_S", 1)
    with pytest.raises(TimeoutError, match="took longer than"):
        is_equal("9", r"\boxed{9^{9^{9^9}}}")
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        is_equal("", r"\boxed{9}")
    assert is_equal("9", r"\boxed{9}") and not is_equal("9", r"\boxed{" + "9+" * 5000 + "9}")
