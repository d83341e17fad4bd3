"""The graders of gsm8k and math against answers that were labelled by hand for this project."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from minirl.config import TasksConfig
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks import math as mathematics
from minirl.tasks.gsm8k import INSTRUCTION, Gsm8k
from minirl.tasks.math import Mathematics, is_equal
from minirl.tasks.registry import self_check

DATA = Path(__file__).parent / "data"


def cases(name: str) -> list[dict[str, object]]:
    lines = (DATA / f"{name}_cases.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def verdict(task: Task, case: dict[str, object], stop: StopReason = StopReason.STOP) -> bool:
    example = Example("", str(case["reference"]))
    return task.reward(example, Answer(str(case["answer"]), stop, 1)) == 1.0


@pytest.mark.parametrize(("name", "kind"), [("gsm8k", Gsm8k), ("math", Mathematics)])
def test_every_label_is_met(name: str, kind: type[Task]) -> None:
    labelled, task = cases(name), kind(TasksConfig())
    wrong = [case for case in labelled if verdict(task, case) != case["right"]]
    assert wrong == []
    assert len(labelled) >= 150
    assert len({(c["answer"], c["reference"]) for c in labelled}) == len(labelled)
    assert min(Counter(c["right"] for c in labelled).values()) >= 50, "both verdicts are tested"
    right = next(case for case in labelled if case["right"])
    assert not verdict(task, right, StopReason.LENGTH), "what was cut is not an answer"


def test_gsm8ks_references_are_the_numbers_at_their_marks(tmp_path: Path) -> None:
    answers = ["48 + 24 = 72\n#### 72", "A lot: <<1000*1.5=1500>>\n#### 1,500", "#### -0.25"]
    rows = [{"question": f"{number}?", "answer": text} for number, text in enumerate(answers)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Gsm8k(replace(TasksConfig(), data=str(tmp_path), test_split="train"))
    assert [e.reference for e in task.heldout(9)] == ["72", "1500", "-1/4"]
    assert task.train(1).worked == "A lot: \n#### 1,500"
    assert task.train(1).prompt == ({"role": "user", "content": f"1?\n{INSTRUCTION}"},)
    self_check(task, "gsm8k")


@pytest.mark.slow
def test_gsm8k_and_math_verify_agree_but_for_what_our_rule_says() -> None:
    """The table of docs/tasks.md: math-verify 0.9.0 on whole answers, by the labels' reasons."""
    from math_verify import parse, verify

    labelled = cases("gsm8k")
    differ = [
        c for c in labelled if verify(parse(c["reference"]), parse(c["answer"])) != c["right"]
    ]
    print(*Counter(str(case["why"]) for case in differ).items(), sep="\n")
    assert (len(labelled), len(labelled) - len(differ)) == (220, 172)


def test_gsm8ks_own_references_score_1() -> None:
    folder = os.environ.get("MINIRL_GSM8K")
    if not folder:
        pytest.skip("MINIRL_GSM8K names no folder with train.jsonl and test.jsonl")
    task = Gsm8k(replace(TasksConfig(), data=folder))
    for split, count in (("train", task.num_train), ("test", len(task.heldout(10**6)))):
        rows = [json.loads(line) for line in (Path(folder) / f"{split}.jsonl").open()]
        assert len(rows) == count
        examples = task.heldout(count) if split == "test" else map(task.train, range(count))
        for row, example in zip(rows, examples, strict=True):
            for text in (row["answer"], task.solution(example)):
                assert task.reward(example, Answer(text, StopReason.STOP, 1)) == 1.0, row


def test_math_that_takes_too_long_raises_what_a_verifier_survives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mathematics, "LIMIT_S", 1)
    with pytest.raises(TimeoutError, match="took longer than"):
        is_equal("9", r"\boxed{9^{9^{9^9}}}")
    assert is_equal("9", r"\boxed{9}"), "and it goes on"


def test_a_reference_that_is_no_mathematics_raises_and_a_box_of_a_book_is_wrong() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        is_equal("", r"\boxed{9}")
    assert not is_equal("9", r"\boxed{" + "9+" * 5000 + "9}")
