"""Rows from files: every kind gives the same, and a bad row is one line with its place."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest

from minirl.config import Config, TasksConfig
from minirl.errors import RecipeError
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.gsm8k import Gsm8k
from minirl.tasks.math import Mathematics
from minirl.tasks.registry import make_task, self_check

ROWS = [{"q": f"What is {i}, twice?", "a": str(2 * i), "more": i} for i in range(60)]


class Plain(Task):
    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.text == example.reference)


def config(data: Path | str, **changes: Any) -> TasksConfig:
    base = TasksConfig(data=str(data), prompt_column="q", reference_column="a")
    return replace(base, **changes)


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), path)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_one_file_holds_out_a_tenth_by_its_prompts(tmp_path: Path, kind: str) -> None:
    task = Plain(config(write(tmp_path / f"rows{kind}")))
    test = task.heldout(100)
    train = [task.train(i) for i in range(task.num_train)]
    assert {*test, *train} == {Example(row["q"], row["a"]) for row in ROWS}
    assert len(test) + len(train) == 60 and 1 <= len(test) <= 15
    backwards = Plain(config(write(tmp_path / "back.jsonl", ROWS[::-1])))
    assert set(backwards.heldout(100)) == set(test), "the order does not matter"
    self_check(task, "mine")
    task = Plain(config(write(tmp_path / "two.jsonl", ROWS[:2])))
    assert (task.num_train, len(task.heldout(5))) == (1, 1), "of a handful of rows too"


def test_a_folder_has_one_file_per_split_and_parts_are_joined(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:20])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[20:30])
    write(tmp_path / "data" / "dev.csv", ROWS[30:33])
    task = Plain(config(tmp_path, test_split="dev"))
    assert task.num_train == 30 and task.train(29).reference == "58"
    assert [e.reference for e in task.heldout(2)] == ["60", "62"]
    held = Plain(config(tmp_path, test_split=""))
    assert held.num_train + len(held.heldout(99)) == 30
    # Prompts may be messages, and references numbers.
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"q": chat, "a": 2}, {"q": chat[1:], "a": [1, "x"]}]
    task = Plain(config(write(tmp_path / "chat" / "train.jsonl", rows).parent))
    assert task.train(0) == Example(tuple(chat), "2") and task.train(1).reference == '[1, "x"]'


FOLDER = "FileNotFoundError: a folder needs train.jsonl, train.csv or train.parquet"
BAD = [
    ("train.jsonl", b'{"q": 1', "cannot be read at row 1 (Expecting"),
    ("train.jsonl", b'{"q": "a", "a": "b"}\n[1]', "cannot be read at row 2 (it is no JSON object"),
    ("train.jsonl", b'{"q": "a", "b": "c"}', 'row 1": nothing in the column "a", it has q, b'),
    ("train.jsonl", b'\n{"q": " ", "a": "b"}', 'row 1": no prompt in its column "q"'),
    ("train.jsonl", b'{"q": [{"role": "user"}], "a": "b"}', 'no prompt in its column "q": ['),
    ("train.jsonl", b"", "has no rows to train on"),
    ("train.csv", b"q,a\n1,2,3\n", "row 1 (it is no JSON object, or has more cells"),
    ("train.parquet", b"no", "cannot be read at row 1 ("),
    ("x.txt", b"no", "of another kind than .jsonl, .csv and .parquet"),
    ("dev.jsonl", b"{}", FOLDER),
    ("", None, FOLDER),
    *((name, None, "no such path") for name in ("./gone", "gone.jsonl", "tests/gone", "~/x/y")),
]


@pytest.mark.parametrize(("name", "text", "line"), BAD)
def test_bad_data_is_one_line(tmp_path: Path, name: str, text: bytes | None, line: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    data = name if text is None else tmp_path / name if name == "x.txt" else tmp_path
    with pytest.raises(RecipeError) as caught:
        Plain(config(data)).train(0)
    assert caught.value.key == "tasks.data"
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_built_in_tasks_take_ones_own_rows_and_columns(tmp_path: Path) -> None:
    answers = ["48 + 24 = 72\n#### 72", "A lot: <<1000*1.5=1500>>\n#### 1,500", "#### -0.25"]
    write(tmp_path / "train.jsonl", [{"q": f"{i}?", "a": text} for i, text in enumerate(answers)])
    gsm8k = Gsm8k(config(tmp_path, test_split="train"))
    assert [e.reference for e in gsm8k.heldout(9)] == ["72", "1500", "-1/4"]
    self_check(gsm8k, "gsm8k")
    bare = Gsm8k(config(tmp_path, options={"instruction": ""}))
    message = {"role": "user", "content": "1?"}
    assert bare.train(1) == Example((message,), "1500", "A lot: \n#### 1,500")
    write(tmp_path / "dev.jsonl", [{"q": "?", "a": r"It is \boxed{\frac{1}{2}}."}, ROWS[1]])
    math = Mathematics(config(tmp_path, train_split="dev", test_split="dev"))
    assert [math.train(i).reference for i in range(2)] == [r"\frac{1}{2}", "2"]
    self_check(math, "math")
    unread = Gsm8k(TasksConfig(data="gone.jsonl"))  # as a verifier has it
    assert unread.reward(Example("", "12"), Answer("#### 12", StopReason.STOP, 1)) == 1.0


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("gsm8k", {"instrution": ""}, "is no option of this task; the defaults are {'instruction'"),
        ("arithmetic", {"step_weights": [0, 0]}, "must be the weights of 1, 2, … up to 7 steps"),
        ("arithmetic", {"step_weights": 3}, "must be of type list"),
        ("code", {"test_s": 0}, "must be above 0"),
    ],
)
def test_a_wrong_option_is_one_line(kind: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(line)) as caught:
        make_task(Config(tasks=TasksConfig(kind=kind, options=options)))
    assert caught.value.key == f"tasks.options.{next(iter(options))}"
    with pytest.raises(RecipeError, match="draws its own problems"):
        make_task(Config(tasks=TasksConfig(kind="arithmetic", data="train.jsonl")))
