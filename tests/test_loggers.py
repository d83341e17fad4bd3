"""Loggers follow metrics.jsonl from processes of their own; one that fails costs a note."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import minirl

from minirl import rules
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.view import loggers
from minirl.view.loggers import Loggers, LoggerSetup
from minirl.workers import Role

LIMIT_S = 60.0


def with_loggers(*names: str) -> Config:
    return replace(Config(), log=replace(Config().log, to=names))


def append(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\n")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "evals.jsonl").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *_path()]))
    return tmp_path


def _path() -> list[str]:
    return [path for path in (os.environ.get("PYTHONPATH"),) if path]


def test_a_logger_that_raises_or_hangs_is_noted_once_and_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "BODY", "logger_bodies:run")
    monkeypatch.setattr(loggers, "SLOW_START_S", 1.0)
    monkeypatch.setattr(loggers, "END_S", 5.0)
    notes: list[str] = []
    names = ("raises_at_once", "disk_full", "hangs", "keeps")
    several = Loggers(with_loggers(*names), folder, 0, notes.append)
    append(folder, 1, 2)

    def all_noted() -> bool:
        several.check()
        return len(notes) >= 3

    wait_until(all_noted)
    append(folder, 3)
    for _ in range(5):
        several.check()
    started = time.monotonic()
    several.check()
    assert time.monotonic() - started < 0.5
    several.close()
    text = "\n".join(notes)
    assert text.count("raises_at_once is off") == 1 and "ValueError: no such project" in text
    assert text.count("disk_full is off") == 1 and "No space left on device" in text
    assert text.count("hangs has not begun after") == 1
    assert text.count("hangs is off, training goes on: took over 5 s to end") == 1
    assert "keeps is off" not in text
    kept = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    assert kept == [[step, {"reward/mean": step / 10}] for step in (1, 2, 3)]


def test_no_loggers_no_processes(folder: Path) -> None:
    none = Loggers(Config(), folder, 0, pytest.fail)
    none.check()
    none.close()
    none.kill()
    assert Role.LOG == "log"


def test_half_a_line_waits_and_resume_begins_after_the_checkpoint(tmp_path: Path) -> None:
    append(tmp_path, 1, 2, 3)
    lines = loggers.follow(tmp_path / "metrics.jsonl", last_step=2)
    assert [line["step"] for line in next(lines)] == [3]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
        file.flush()
        assert next(lines) == []
        file.write('ard/mean": 0.5}\n')
    assert next(lines) == [{"step": 4, "reward/mean": 0.5}]
    assert next(lines) == []


def test_tensorboard_reads_back_what_was_written(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    notes: list[str] = []
    board = Loggers(with_loggers("tensorboard"), folder, 0, notes.append)
    append(folder, 1, 2, 3)
    board.close()
    assert notes == []
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (step, pytest.approx(step / 10)) for step in (1, 2, 3)
    ]
    append(folder, 4)
    again = Loggers(with_loggers("tensorboard"), folder, 2, notes.append)
    again.close()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]


def test_wandb_offline_keeps_metrics_and_no_secrets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SOME_API_KEY", "hunter2hunter2")
    config = with_loggers("wandb")
    config = replace(config, tasks=replace(config.tasks, options={"judge_api_key": "hunter2"}))
    notes: list[str] = []
    several = Loggers(config, folder, 0, notes.append)
    append(folder, 1, 2, 3)
    several.close()
    assert notes == []
    kept = b"".join(path.read_bytes() for path in folder.rglob("*.wandb"))
    assert b"reward/mean" in kept
    everything = b"".join(p.read_bytes() for p in (folder / "wandb").rglob("*") if p.is_file())
    assert b"hunter2" not in everything


def test_trackio_keeps_metrics_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    notes: list[str] = []
    several = Loggers(with_loggers("trackio"), folder, 0, notes.append)
    append(folder, 1, 2, 3)
    several.close()
    assert notes == []
    assert list((folder / "trackio").glob("*.db"))


def test_a_package_that_is_missing_is_one_line_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        rules.check_loggers(with_loggers("wandb"))
    assert str(caught.value) == (
        'log.to = ["wandb"]: wandb is not installed; pip install "minirl[wandb]", or take it out'
    )
    (tmp_path / "mine.toml").write_text('[log]\nto = ["wand"]\n')
    done = minirl("train", "mine.toml", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert 'did you mean "wandb"?' in done.stderr


def test_one_run_has_one_id(tmp_path: Path) -> None:
    setup = LoggerSetup("wandb", Config(), str(tmp_path), 0)
    assert loggers.run_id(setup) == loggers.run_id(replace(setup, last_step=7))
