"""docs/write-a-task.md, run: every file is written, every command typed."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import assert_accounted
from test_cli import minirl

from minirl.recipe import check_task, load
from minirl.records import Answer, StopReason
from minirl.run_dir import read_lines
from minirl.tasks.registry import make_task, self_check

PAGE = Path(__file__).parent.parent / "docs" / "write-a-task.md"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks() -> Iterator[tuple[str, str, str]]:
    for match in BLOCK.finditer(PAGE.read_text()):
        yield match[1], match[2] or "", match[3]


COMMANDS = [text.removeprefix("minirl ").split() for kind, _, text in blocks() if kind == "sh"]
LOOK, TRAIN, *LOOKS = COMMANDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    for _, name, text in blocks():
        if name:
            (folder / name).write_text(text)
    return folder


def test_the_task_says_what_is_right_and_an_option_changes_it(folder: Path) -> None:
    config = load(folder / "backwards.toml").config
    check_task(config)
    task = make_task(config)
    assert self_check(task, config.tasks.kind).startswith("32 references score 1, 32 shuffled")
    example = task.train(0)
    assert (example.prompt, example.reference) == ("aap backwards is", "paa")
    assert task.reward(example, Answer(" pxx", StopReason.STOP, 2)) == 0.0
    trained = {task.train(i).prompt for i in range(task.num_train)}
    assert trained.isdisjoint(e.prompt for e in task.heldout(100)) and len(trained) == 180
    task = make_task(load(folder / "backwards.toml", ["tasks.options.letters=1"]).config)
    assert task.reward(example, Answer(" pxx", StopReason.STOP, 2)) == 1.0


def test_a_task_of_several_turns_replies(folder: Path) -> None:
    task = make_task(load(folder / "guess.toml").config)
    example = task.train(6)
    assert example.reference == "59!"
    said = [task.reply(example, (text,)) for text in (" 3!", "99!", " 59!", "what?")]
    assert said == [" More.", " Less.", None, None]
    assert task.reward(example, Answer(" 59!", StopReason.STOP, 2, ("3!", " More.", " 59!"))) == 1.0


@pytest.mark.parametrize("command", [LOOK, *LOOKS])
def test_it_can_be_looked_at(folder: Path, command: list[str]) -> None:
    done = minirl(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "references score 1" in done.stdout and "reference: " in done.stdout
    assert "0 prompts that came before" in done.stdout


@pytest.mark.slow
@pytest.mark.vllm
def test_it_trains_and_goes_on_from_another_folder(
    folder: Path, tied_folder: Path, tmp_path: Path
) -> None:
    model = f"--set=model.path={tied_folder}"  # random weights, in the tiny model's place
    done = minirl(*TRAIN, model, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "backwards-run"
    lines = read_lines(run / "metrics.jsonl")
    assert_accounted(lines, max_staleness=2)
    assert len(lines) == 2 and "backwards is" in (run / "samples.jsonl").read_text()
    resumed = load(run / "recipe.toml").config  # as --resume reads it, here from another folder
    with contextlib.chdir(tmp_path):
        self_check(make_task(resumed), resumed.tasks.kind)
