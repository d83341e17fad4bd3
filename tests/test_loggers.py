"""Loggers follow a run in threads of their own; one that fails costs a note."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minirl.config import Config
from minirl.view import loggers
from minirl.view.loggers import Logger, Loggers

ANSWER = {"prompt": "2 + 2?", "reference": "4", "answer": "four", "reward": 1.0}


def log_of(folder: Path, step: int, *names: str) -> Any:
    """A RunLog that resumes at a step, as far as a logger looks at it."""
    notes: list[str] = []
    config = replace(Config(), log=replace(Config().log, to=names))
    given = {"config": config, "run_dir": folder, "note": notes.append}
    log = SimpleNamespace(**given, step=step, notes=notes, metrics=[], evals=[])
    train(log, *range(1, step + 1))
    return log


def train(log: Any, *steps: int) -> None:
    for step in steps:
        log.metrics.append({"step": step, "reward/mean": step / 10})
        log.evals.append({"step": step, "accuracy": 0.5, "low": None, "answers": [ANSWER]})


def test_a_logger_may_raise_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def raises(*_: object) -> Logger:
        raise ValueError("no such project")

    table = lambda columns, data: (columns, data)  # noqa: E731
    keeps = Logger(lambda *line: written.append(line), lambda: written.append("over"), table)
    monkeypatch.setattr(loggers, "LOGGERS", {"tensorboard": lambda *_: keeps, "wandb": raises})
    monkeypatch.setattr(loggers, "POLL_S", 600.0)
    monkeypatch.setattr(loggers, "END_S", 120.0)
    log = log_of(tmp_path, 2, "wandb", "tensorboard")
    several = Loggers(log)
    train(log, 3)
    several.close()
    evaluation = {"eval/accuracy": 0.5, "answers": ([*ANSWER], [["2 + 2?", "4", "four", "1.0"]])}
    assert written == [(3, {"reward/mean": 0.3}), (2, evaluation), (3, evaluation), "over"]
    assert log.notes == ["wandb is off, training continues: ValueError: no such project"]
    monkeypatch.setattr(loggers, "END_S", 0.0)
    hangs = threading.Event().wait  # until the process ends
    monkeypatch.setattr(loggers, "LOGGERS", {"tensorboard": lambda *_: hangs()})
    log = log_of(tmp_path, 0, "tensorboard")
    Loggers(log).close()
    assert log.notes == ["tensorboard is left behind: no end within 0 s"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_real_logger_keeps_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip(name)
    for last_step in (0, 2):
        log = log_of(tmp_path, last_step, name)
        several = Loggers(log)
        train(log, *range(last_step + 1, last_step + 4))
        several.close()
        assert not log.notes
    assert any((tmp_path / name).rglob("*"))
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        found = [(e.step, e.value) for e in events.Scalars("reward/mean")]
        assert found == [(step, pytest.approx(step / 10)) for step in (1, 2, 3, 4, 5)]
