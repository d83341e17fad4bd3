"""Tasks: from tasks.kind to one that has proved itself, rows from files, and the graders of gsm8k
and math against answers that were labelled by hand for this project. User code that contradicts
itself, cannot be loaded, hangs, exits, crashes or eats memory, and a bad row: one line each."""

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
from cases import DATA, cases, each_case, refused

from minirl import recipe
from minirl.config import TINY_FOLDER, Config, TasksConfig
from minirl.errors import RecipeError
from minirl.groups import filter_group
from minirl.messages import Checked
from minirl.records import Answer, Drop, Example, Group, StopReason, Trajectory
from minirl.tasks import Task
from minirl.tasks import math as mathematics
from minirl.tasks.arithmetic import Arithmetic
from minirl.tasks.check import checking
from minirl.tasks.gsm8k import Gsm8k
from minirl.tasks.math import Mathematics, is_equal
from minirl.tasks.registry import make_task, self_check

TASK = (DATA / "task.txt").read_text()


def config_of(kind: str, **options: object) -> Config:
    return Config(seed=7, tasks=TasksConfig(kind=kind, **options))  # type: ignore[arg-type]


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Mine"


def checked(folder: Path, text: str, timeout_s: float = 60.0) -> Checked:
    with checking(config_of(written(folder, text), timeout_s=timeout_s), TINY_FOLDER) as check:
        return check()


@pytest.mark.parametrize("kind", ["arithmetic", "minirl.tasks.arithmetic:Arithmetic"])
def test_a_task_is_found_by_its_name_and_proves_itself(kind: str) -> None:
    task = make_task(config_of(kind))
    assert isinstance(task, Arithmetic)
    assert self_check(task, kind) == "32 references score 1, 30 shuffled ones less"


@each_case("wrong_tasks")
def test_a_task_that_cannot_be_loaded_is_one_line(tmp_path: Path, case: dict[str, str]) -> None:
    own = written(tmp_path, case.get("code", ""))
    with refused("tasks.kind", case["why"]):
        make_task(config_of(case.get("kind", own)))


@each_case("contradictions")
def test_a_task_that_contradicts_itself(tmp_path: Path, case: dict[str, Any]) -> None:
    text, why = TASK, case["why"]
    for old, new in case["changes"].items():
        assert old in text
        text = text.replace(old, new)
    task, kind = make_task(config_of(written(tmp_path, text))), "mine.py:Mine"
    expected = pytest.raises(RecipeError, match=f'tasks.kind = "{kind}": .*{why}')
    with expected if why else nullcontext():
        self_check(task, kind)


@each_case("harmful_tasks")
def test_it_is_one_line(tmp_path: Path, case: dict[str, str]) -> None:
    mark, harm, what = case.values()
    with refused("tasks.kind", what) as caught:
        checked(tmp_path, TASK.replace(f"pass  # {mark}", harm), 3.0 if "longer" in what else 60.0)
    line = str(caught.value)
    number = next(n for n, text in enumerate(TASK.splitlines(), 1) if f"# {mark}" in text)
    if "return" not in harm:
        assert f"(mine.py, line {number}, in " in line, line


def test_what_is_right_passes_and_a_helper_is_named_with_its_method(tmp_path: Path) -> None:
    right = checked(tmp_path, TASK)
    assert right.shown == "32 references score 1, 32 shuffled ones less"
    assert right.warning == "40 of 40 held-out prompts are trained on"
    with pytest.raises(RecipeError, match=r"line 27, in helped, from solution\)"):
        checked(tmp_path, TASK.replace("  # helper", " + None"))


# Rows from files: every kind gives the same ------------------------------------------------------

ROWS = [{"q": f"What is {i}, twice?", "a": str(2 * i), "more": i} for i in range(60)]


class Plain(Task):
    def reward(self, example: Example, answer: Answer) -> float:
        return float(answer.text == example.reference)


def data_config(data: Path | str, **changes: Any) -> TasksConfig:
    return TasksConfig(data=str(data), prompt_column="q", reference_column="a", **changes)


def write_rows(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
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
    task = Plain(data_config(write_rows(tmp_path / f"rows{kind}")))
    test = task.heldout(100)
    train = [task.train(i) for i in range(task.num_train)]
    assert {*test, *train} == {Example(row["q"], row["a"]) for row in ROWS}
    assert len(test) + len(train) == 60 and 1 <= len(test) <= 15
    backwards = Plain(data_config(write_rows(tmp_path / "back.jsonl", ROWS[::-1])))
    assert set(backwards.heldout(100)) == set(test), "the order does not matter"
    self_check(task, "mine")
    task = Plain(data_config(write_rows(tmp_path / "two.jsonl", ROWS[:2])))
    assert (task.num_train, len(task.heldout(5))) == (1, 1), "of a handful of rows too"


def test_a_folder_has_one_file_per_split_and_parts_are_joined(tmp_path: Path) -> None:
    write_rows(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:20])
    write_rows(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[20:30])
    write_rows(tmp_path / "data" / "dev.csv", ROWS[30:33])
    task = Plain(data_config(tmp_path, test_split="dev"))
    assert task.num_train == 30 and task.train(29).reference == "58"
    assert [e.reference for e in task.heldout(2)] == ["60", "62"]
    held = Plain(data_config(tmp_path, test_split=""))
    assert held.num_train + len(held.heldout(99)) == 30
    # Prompts may be messages, and references numbers.
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"q": chat, "a": 2}, {"q": chat[1:], "a": [1, "x"]}]
    task = Plain(data_config(write_rows(tmp_path / "chat" / "train.jsonl", rows).parent))
    assert task.train(0) == Example(tuple(chat), "2") and task.train(1).reference == '[1, "x"]'


@each_case("bad_rows")
def test_bad_data_is_one_line(tmp_path: Path, case: dict[str, str | None]) -> None:
    name, text, line = case.values()
    if text is not None:
        (tmp_path / name).write_text(text)
    data = name if text is None else tmp_path / name if name == "x.txt" else tmp_path
    with refused("tasks.data", line):
        Plain(data_config(data)).train(0)


def test_built_in_tasks_take_ones_own_rows_and_columns(tmp_path: Path) -> None:
    answers = ["48 + 24 = 72\n#### 72", "A lot: <<1000*1.5=1500>>\n#### 1,500", "#### -0.25"]
    rows = [{"q": f"{i}?", "a": text} for i, text in enumerate(answers)]
    write_rows(tmp_path / "train.jsonl", rows)
    gsm8k = Gsm8k(data_config(tmp_path, test_split="train"))
    assert [e.reference for e in gsm8k.heldout(9)] == ["72", "1500", "-1/4"]
    self_check(gsm8k, "gsm8k")
    bare = Gsm8k(data_config(tmp_path, options={"instruction": ""}))
    message = {"role": "user", "content": "1?"}
    assert bare.train(1) == Example((message,), "1500", "A lot: \n#### 1,500")
    write_rows(tmp_path / "dev.jsonl", [{"q": "?", "a": r"It is \boxed{\frac{1}{2}}."}, ROWS[1]])
    math = Mathematics(data_config(tmp_path, train_split="dev", test_split="dev"))
    assert [math.train(i).reference for i in range(2)] == [r"\frac{1}{2}", "2"]
    self_check(math, "math")
    unread = Gsm8k(TasksConfig(data="gone.jsonl"))  # as a verifier has it
    assert unread.reward(Example("", "12"), Answer("#### 12", StopReason.STOP, 1)) == 1.0


@each_case("bad_options")
def test_a_wrong_option_is_one_line(case: dict[str, Any]) -> None:
    kind, options, line = case.values()
    with refused(f"tasks.options.{next(iter(options))}", line):
        make_task(Config(tasks=TasksConfig(kind=kind, options=options)))
    with pytest.raises(RecipeError, match="draws its own problems"):
        make_task(Config(tasks=TasksConfig(kind="arithmetic", data="train.jsonl")))


# Which groups reach the buffer, and graders ------------------------------------------------------


def answers(*lengths: int) -> tuple[Trajectory, ...]:
    """Of these many tokens; those of 128 were truncated."""
    ends = [StopReason.LENGTH if n == 128 else StopReason.STOP for n in lengths]
    return tuple(Trajectory(i, n + 10, n, ends[i], i, i) for i, n in enumerate(lengths))


def filtered(lengths: tuple[int, ...], rewards: tuple[float, ...], *rules: str) -> Group | Drop:
    config = recipe.build({f"buffer.{rule}": True for rule in rules})
    return filter_group(config, Group(7, 5, answers(*lengths), rewards))


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


def verdict(task: Task, case: dict[str, object], stop: StopReason = StopReason.STOP) -> bool:
    example = Example("", str(case["reference"]))
    return task.reward(example, Answer(str(case["answer"]), stop, 1)) == 1.0


@pytest.mark.parametrize(("name", "kind"), [("gsm8k", Gsm8k), ("math", Mathematics)])
def test_every_label_is_met(name: str, kind: type[Task]) -> None:
    labelled, task = cases(f"{name}_cases"), kind(TasksConfig())
    wrong = [case for case in labelled if verdict(task, case) != case["right"]]
    assert wrong == []
    assert len(labelled) >= 150
    assert min(Counter(c["right"] for c in labelled).values()) >= 50, "both verdicts are tested"
    right = next(case for case in labelled if case["right"])
    assert not verdict(task, right, StopReason.LENGTH), "what was cut is not an answer"


def test_a_comparison_may_fail_as_a_verifier_survives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "LIMIT_S", 1)
    with pytest.raises(TimeoutError, match="took longer than"):
        is_equal("9", r"\boxed{9^{9^{9^9}}}")
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        is_equal("", r"\boxed{9}")
    assert is_equal("9", r"\boxed{9}") and not is_equal("9", r"\boxed{" + "9+" * 5000 + "9}")
