"""GSM8K: which number an answer gives, and a local folder of it."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from minirl.config import TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, StopReason
from minirl.tasks.answers import final_number
from minirl.tasks.gsm8k import INSTRUCTION, Gsm8k
from minirl.tasks.registry import self_check

CASES = [
    ("#### 12", "12"),
    ("#### 12 apples", "12"),
    ("####12", "12"),
    ("#### $1,234.50", "1234.50"),
    ("#### -3", "-3"),
    ("#### -$3", "-3"),
    ("#### $-3", "-3"),
    ("#### −3", "-3"),  # the minus sign of typesetters
    ("#### 1,000,000", "1000000"),
    ("#### 50%", "50"),
    ("#### 18.", "18"),
    ("#### 0.5", "0.5"),
    ("#### .5", "0.5"),
    ("#### 007", "7"),
    ("6 + 6 = 12, so 13 are left.\n#### 12", "12"),
    ("#### 5\nNo, wait.\n#### 7", "7"),
    ("#### 12 (that is 3 * 4)", "12"),
    ("12 apples ####", None),
    ("####  none", None),
    (r"So \boxed{42} apples of 50", "42"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\$1,250}", "1250"),
    (r"\boxed{1{,}250}", "1250"),
    (r"\boxed{x = 8}", "8"),
    (r"\boxed{\text{12 apples}}", "12"),
    (r"\boxed{7} #### 8", "8"),
    ("The answer is 12.", "12"),
    ("The answer is $1,234.50.", "1234.50"),
    ("She has 3 apples and 4 pears, 7 in all", "7"),
    ("It is 5-3=2", "2"),
    ("He pays 5-10", "10"),  # a range, not minus ten
    ("Chapter 4-7", "7"),
    ("It falls to -7", "-7"),
    ("It falls to (-7)", "-7"),
    ("They are 1,2,3", "3"),  # a list, not one hundred and twenty-three
    ("They are 1, 2, 3", "3"),
    ("between 10,000 and 12,500", "12500"),
    ("so...5", "5"),
    ("- 3 apples", "3"),  # an item of a list
    ("no number at all", None),
    ("", None),
    ("-", None),
    (".", None),
]


@pytest.mark.parametrize(("text", "number"), CASES)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


ROWS = [
    {"question": "Natalia sold 48 clips, then half as many.", "answer": "48 + 24 = 72\n#### 72"},
    {"question": "How much is it?", "answer": "A lot: <<1000*1.5=1500>>\n#### 1,500"},
    {"question": "And below?", "answer": "Cold.\n#### -5"},
]


def folder_of(tmp_path: Path) -> Path:
    text = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
    (tmp_path / "train.jsonl").write_text(text)
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[1]) + "\n" + json.dumps(ROWS[2]))
    return tmp_path


def load(folder: Path) -> Gsm8k:
    return Gsm8k(replace(TasksConfig(), kind="gsm8k", data=str(folder)))


def test_a_local_folder(tmp_path: Path) -> None:
    task = load(folder_of(tmp_path))
    assert task.num_train == 3
    example = task.train(1)
    assert example.reference == "1500"
    assert example.prompt == ({"role": "user", "content": f"How much is it?\n{INSTRUCTION}"},)
    assert [e.reference for e in task.heldout(10)] == ["1500", "-5"]
    assert [e.reference for e in task.heldout(1)] == ["1500"]
    self_check(task, "gsm8k")


@pytest.mark.parametrize(
    ("text", "stop", "reward"),
    [
        ("#### 1,500", StopReason.STOP, 1.0),
        ("It is $1500.00", StopReason.STOP, 1.0),
        ("#### 1501", StopReason.STOP, 0.0),
        ("#### -1500", StopReason.STOP, 0.0),
        ("no idea", StopReason.STOP, 0.0),
        ("#### 1,500", StopReason.LENGTH, 0.0),  # it was cut: the model did not end there
    ],
)
def test_reward(tmp_path: Path, text: str, stop: StopReason, reward: float) -> None:
    task = load(folder_of(tmp_path))
    assert task.reward(task.train(1), Answer(text, stop, 5)) == reward


def test_a_folder_without_its_files_is_a_recipe_error(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]))
    line = r"tasks.data .*has no test.jsonl, test.csv or test.parquet"
    with pytest.raises(RecipeError, match=line):
        load(tmp_path).heldout(1)
