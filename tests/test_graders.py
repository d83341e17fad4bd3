"""The graders of gsm8k and math against answers that were labelled by hand for this project."""

import json
from collections import Counter
from pathlib import Path

import pytest

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks import math as mathematics
from minirl.tasks.gsm8k import Gsm8k
from minirl.tasks.math import Mathematics, is_equal


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


def test_a_comparison_that_fails_raises_what_a_verifier_survives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mathematics, "LIMIT_S", 1)
    with pytest.raises(TimeoutError, match="took longer than"):
        is_equal("9", r"\boxed{9^{9^{9^9}}}")
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        is_equal("", r"\boxed{9}")
    assert is_equal("9", r"\boxed{9}") and not is_equal("9", r"\boxed{" + "9+" * 5000 + "9}")
