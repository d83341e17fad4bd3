"""Loggers read the files of a run in threads of their own; one that fails costs a note."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minirl import recipe
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.view import loggers
from minirl.view.loggers import Logger, Loggers

ANSWER = {"prompt": "2 + 2?", "reference": "4", "answer": "four", "reward": 1.0}


def with_loggers(*names: str) -> Config:
    return replace(Config(), log=replace(Config().log, to=names))


def log_steps(folder: Path, *steps: int, torn: str = "") -> None:
    """And an evaluation at the last."""
    evaluation = {"step": steps[-1], "accuracy": 0.5, "low": None, "answers": [ANSWER]}
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) for step in steps]
    for name, texts in (("metrics", [torn, *lines]), ("evals", [json.dumps(evaluation)])):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write("\n".join(texts) + "\n")


def test_a_logger_that_raises_or_hangs_is_noted_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    notes: list[str] = []

    def raises(*_: object) -> Logger:
        raise ValueError("no such project")

    table = lambda columns, data: (columns, data)  # noqa: E731
    keeps = Logger(lambda *line: written.append(line), lambda: written.append("over"), table)
    hangs = threading.Event().wait  # until the process ends
    openers = {"trackio": lambda *_: keeps, "wandb": raises, "tensorboard": lambda *_: hangs()}
    monkeypatch.setattr(loggers, "LOGGERS", openers)
    monkeypatch.setattr(loggers, "END_S", 120.0)
    log_steps(tmp_path, 1, 2)  # before the resume
    several = Loggers(with_loggers("wandb", "trackio"), tmp_path, 2, notes.append)
    log_steps(tmp_path, 3, torn='{"step": 9, "rew\n{"rolled_back_to": 2}')
    several.close()
    evaluation = {"eval/accuracy": 0.5, "answers": ([*ANSWER], [["2 + 2?", "4", "four", "1.0"]])}
    assert len(written) == 4 and written[-1] == "over"
    assert all(e in written for e in [(3, {"reward/mean": 0.3}), (2, evaluation), (3, evaluation)])
    monkeypatch.setattr(loggers, "END_S", 0.0)
    Loggers(with_loggers("tensorboard"), tmp_path, 0, notes.append).close()
    assert notes == [
        "wandb is off, training continues: ValueError: no such project",
        "tensorboard is left behind: it did not end within 0 s",
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_real_logger_keeps_metrics_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by the import
    pytest.importorskip(name)
    notes: list[str] = []
    for last_step in (0, 2):
        several = Loggers(with_loggers(name), tmp_path, last_step, notes.append)
        log_steps(tmp_path, *range(last_step + 1, last_step + 4))
        several.close()
    assert not notes and any((tmp_path / name).rglob("*"))
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        found = [(e.step, e.value) for e in events.Scalars("reward/mean")]
        assert found == [(step, pytest.approx(step / 10)) for step in (1, 2, 3, 4, 5)]


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    rule = r'log.to = \["wandb"\]: wandb is not installed; pip install "minirl\[wandb\]", or take'
    with pytest.raises(RecipeError, match=rule):
        recipe.check_loggers(with_loggers("wandb"))
