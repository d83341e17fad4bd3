"""Which groups reach the buffer: truncated answers, equal rewards. And
the graders of gsm8k and math against answers that were labelled by hand for this project."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from minirl.config import TasksConfig
from minirl.groups import filter_group
from minirl.recipe import build
from minirl.records import Answer, Drop, Example, Group, StopReason, Trajectory
from minirl.tasks import Task
from minirl.tasks import math as mathematics
from minirl.tasks.gsm8k import Gsm8k
from minirl.tasks.math import Mathematics, is_equal


def answers(*lengths: int) -> tuple[Trajectory, ...]:
    """Of these many tokens; those of 128 were truncated."""
    ends = [StopReason.LENGTH if n == 128 else StopReason.STOP for n in lengths]
    return tuple(Trajectory(i, n + 10, n, ends[i], i, i) for i, n in enumerate(lengths))


def filtered(lengths: tuple[int, ...], rewards: tuple[float, ...], *rules: str) -> Group | Drop:
    config = build({f"buffer.{rule}": True for rule in rules})
    return filter_group(config, (7, 5), answers(*lengths), rewards)


def test_a_group_that_teaches_nothing_is_dropped_and_others_pass() -> None:
    assert filtered((128, 128), (1.0, 0.0), "mask_truncated") is Drop.TRUNCATED
    assert filtered((5, 6), (1.0, 1.0), "drop_equal_rewards") is Drop.EQUAL_REWARDS
    assert isinstance(filtered((5, 6), (1.0, 0.0), "drop_equal_rewards"), Group)
    plain = Group(7, 5, answers(3, 128, 128), (1.0, 1.0, 1.0))
    assert filtered((3, 128, 128), (1.0, 1.0, 1.0)) == plain, "by default as they are"
    group = filtered((10, 128, 20), (1.0, 0.0, 0.0), "mask_truncated")
    assert isinstance(group, Group) and group.masked == {1}
    assert group.rewards == (1.0, 0.0, 0.0), "it counts in the baseline"
    assert (group.head_version, group.newest_version) == (0, 2)


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
