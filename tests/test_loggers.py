"""Loggers follow the files of a run from threads of their own; one that fails costs a note."""

import errno
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import minirl

from minirl import recipe
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.view import loggers
from minirl.view.loggers import Logger, Loggers

LIMIT_S = 120.0
ANSWER = {"prompt": "2 + 2?", "reference": "4", "answer": "four", "reward": 1.0}
Written = list[tuple[Any, ...]]


def with_loggers(*names: str) -> Config:
    return replace(Config(), log=replace(Config().log, to=names))


def append(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\n")


def append_evaluation(folder: Path, step: int) -> None:
    line = {"step": step, "version": step, "accuracy": 0.5, "low": None, "answers": [ANSWER]}
    with (folder / "evals.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def keeper(written: Written) -> Callable[[Config, Path, int], Logger]:
    """A logger that writes down what it is given."""

    def open_keeper(config: Config, run_dir: Path, last_step: int) -> Logger:
        written.append(("open", last_step))
        return Logger(lambda *line: written.append(line), lambda: written.append(("close",)))

    return open_keeper


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "POLL_S", 0.02)
    monkeypatch.setattr(loggers, "END_S", LIMIT_S)


def test_a_logger_that_raises_or_hangs_is_noted_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: Written = []
    released = threading.Event()

    def raises(*_: object) -> Logger:
        raise ValueError("no such project")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def hangs(*_: object) -> Logger:
        released.wait()
        raise AssertionError

    monkeypatch.setitem(loggers.LOGGERS, "raises", raises)
    monkeypatch.setitem(loggers.LOGGERS, "full", lambda *_: Logger(full, lambda: None))
    monkeypatch.setitem(loggers.LOGGERS, "hangs", hangs)
    monkeypatch.setitem(loggers.LOGGERS, "keeps", keeper(written))
    monkeypatch.setattr(loggers, "END_S", 1.0)
    notes: list[str] = []
    several = Loggers(with_loggers("keeps", "raises", "full", "hangs"), tmp_path, 0, notes.append)
    append(tmp_path, 1, 2)
    wait_until(lambda: len(notes) >= 2)
    append(tmp_path, 3)
    several.close()
    assert sorted(notes) == [
        "full is off, training continues: OSError: [Errno 28] No space left on device",
        "hangs is left behind: it did not end within 1 s",
        "raises is off, training continues: ValueError: no such project",
    ]
    lines = [(step, {"reward/mean": step / 10}, []) for step in (1, 2, 3)]
    assert written == [("open", 0), *lines, ("close",)]
    released.set()


def test_a_resume_begins_at_the_end_and_half_a_line_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a rollback opens the logger again, at the step from which the trainer continues."""
    written: Written = []
    monkeypatch.setitem(loggers.LOGGERS, "keeps", keeper(written))
    append(tmp_path, 1, 2)
    several = Loggers(with_loggers("keeps"), tmp_path, 2, pytest.fail)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
        file.flush()
        time.sleep(0.1)
        file.write('ard/mean": 0.3}\n{"rolled_back_to": 2}\n')
    append(tmp_path, 3)
    several.close()
    line = (3, {"reward/mean": 0.3}, [])
    assert written == [("open", 2), line, ("close",), ("open", 2), line, ("close",)]


def test_an_evaluation_gives_numbers_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: Written = []
    monkeypatch.setitem(loggers.LOGGERS, "keeps", keeper(written))
    several = Loggers(with_loggers("keeps"), tmp_path, 0, pytest.fail)
    append_evaluation(tmp_path, 4)
    several.close()
    row = [4, 4, "2 + 2?", "4", "four", "1.0"]
    assert written[1] == (4, {"eval/version": 4, "eval/accuracy": 0.5}, [row])


def log_three_steps(folder: Path, config: Config, last_step: int = 0) -> None:
    notes: list[str] = []
    several = Loggers(config, folder, last_step, notes.append)
    append(folder, *range(last_step + 1, last_step + 4))
    append_evaluation(folder, last_step + 3)
    several.close()
    assert notes == []


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_three_steps(tmp_path, with_loggers("tensorboard"))
    log_three_steps(tmp_path, with_loggers("tensorboard"), last_step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (step, pytest.approx(step / 10)) for step in (1, 2, 3, 4, 5)
    ]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [5]


def test_wandb_offline_keeps_metrics_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_three_steps(tmp_path, with_loggers("wandb"))

    def is_kept() -> bool:  # its service writes the file a moment after `finish`
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
        return b"reward/mean" in kept and b"answers" in kept

    wait_until(is_kept)


def test_trackio_keeps_metrics_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by the import
    pytest.importorskip("trackio")
    log_three_steps(tmp_path, with_loggers("trackio"))
    assert list((tmp_path / "trackio").glob("*.db"))


def test_a_package_that_is_missing_is_one_line_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        recipe.check_loggers(with_loggers("wandb"))
    assert str(caught.value) == (
        'log.to = ["wandb"]: wandb is not installed; pip install "minirl[wandb]", or take it out'
    )
    (tmp_path / "mine.toml").write_text('[log]\nto = ["wand"]\n')
    done = minirl("train", "mine.toml", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert 'did you mean "wandb"?' in done.stderr
