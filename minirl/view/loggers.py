"""Metrics for other tools: TensorBoard, Weights & Biases, trackio (`log.to`).

Takes a run directory. One daemon thread per logger follows its metrics.jsonl and evals.jsonl, so
training never waits for a logger: the files are its queue. The first exception turns a logger off
with one note; one that hangs is left behind at the end of the run.

Gives each logger the metrics, the recipe, and the answers of an evaluation where the logger has a
table. Leaves out: code, git state, command line, environment, console output.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from minirl.config import KEYS, Config, get

POLL_S = 1.0
END_S = 20.0  # at the end of a run, for all loggers together
FILES = {"metrics.jsonl": "", "evals.jsonl": "eval/"}  # and the prefix of their names
COLUMNS = ("step", "version", "prompt", "reference", "answer", "reward")
Values = dict[str, Any]
Rows = list[list[Any]]


@dataclass(frozen=True)
class Logger:
    write: Callable[[int, Values, Rows], None]  # step, numbers, answers
    close: Callable[[], None]


def open_tensorboard(config: Config, run_dir: Path, last_step: int) -> Logger:
    """Event files in RUN/tensorboard. It has no table."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = last_step + 1 if last_step else None
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(step: int, values: Values, answers: Rows) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Logger(write, writer.close)


def open_wandb(config: Config, run_dir: Path, last_step: int) -> Logger:
    """Project WANDB_PROJECT, else "minirl"; WANDB_MODE=offline keeps it on this machine."""
    import wandb

    off = ("disable_code", "disable_git", "disable_job_creation", "x_disable_meta")
    settings = dict.fromkeys((*off, "x_disable_stats", "silent"), True)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "minirl"),
        name=run_dir.name,
        id=run_id(run_dir),
        resume="allow",
        dir=str(run_dir),
        config=recipe_of(config),
        settings=wandb.Settings(console="off", save_code=False, **settings),
    )
    # The step is a value: wandb's own counter would refuse an evaluation that ends after later
    # steps, and steps that are redone.
    run.define_metric("*", step_metric="step")
    return _with_table(lambda step, values: run.log({"step": step, **values}), run, wandb.Table)


def open_trackio(config: Config, run_dir: Path, last_step: int) -> Logger:
    """Project TRACKIO_PROJECT, else "minirl", in trackio's folder on this machine."""
    import trackio

    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "minirl"),
        name=f"{run_dir.name}-{run_id(run_dir)[:6]}",
        config=recipe_of(config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _with_table(lambda step, values: run.log(values, step=step), run, trackio.Table)


def _with_table(log: Callable[[int, Values], None], run: Any, table: Any) -> Logger:
    def write(step: int, values: Values, answers: Rows) -> None:
        if answers:
            values = {**values, "answers": table(columns=[*COLUMNS], data=answers)}
        log(step, values)

    return Logger(write, run.finish)


LOGGERS: dict[str, Callable[[Config, Path, int], Logger]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}


def run_id(run_dir: Path) -> str:
    """The same for every start of one run."""
    return hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]


def recipe_of(config: Config) -> Values:
    values = {key: get(config, key) for key in KEYS}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


class Loggers:
    """The loggers of a run. `last_step` is that of the checkpoint from which it resumes."""

    def __init__(self, config: Config, run_dir: Path, last_step: int, note: Callable[[str], None]):
        self._config, self._run_dir, self._note = config, run_dir, note
        self._is_over = Event()
        self._threads = []
        for name in config.log.to:
            news = {prefix: follow(run_dir / file) for file, prefix in FILES.items()}
            for lines in news.values():
                next(lines)  # here, so that a line of this run cannot come before the thread
            thread = Thread(target=self._run, args=(name, news, last_step), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, name: str, news: dict[str, Iterator[list[Values]]], last_step: int) -> None:
        try:
            logger = LOGGERS[name](self._config, self._run_dir, last_step)
            is_over = False
            while not is_over:
                is_over = self._is_over.wait(POLL_S)  # then one more pass, for the last lines
                for prefix, lines in news.items():
                    for line in next(lines):
                        if "rolled_back_to" not in line:
                            logger.write(*_split(line, prefix))
                        elif not prefix:  # open it again: later points are taken back
                            logger.close()
                            last_step = line["rolled_back_to"]
                            logger = LOGGERS[name](self._config, self._run_dir, last_step)
            logger.close()
        except Exception as error:  # a foreign library may raise anything; none of it ends the run
            self._note(f"{name} is off, training continues: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._is_over.set()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._note(f"{thread.name} is left behind: it did not end within {END_S:.0f} s")


def follow(path: Path) -> Iterator[list[Values]]:
    """At each `next` the whole lines since the last. Begins at the end of the file: earlier lines
    were logged before a resume."""
    with path.open("a+", errors="replace") as file:
        file.seek(0, os.SEEK_END)
        rest = ""
        while True:
            *lines, rest = (rest + file.read()).split("\n")
            yield [json.loads(line) for line in lines if line.startswith("{")]


def _split(line: Values, prefix: str) -> tuple[int, Values, Rows]:
    step, version, answers = line.pop("step"), line.get("version"), line.pop("answers", [])
    values = {f"{prefix}{k}": v for k, v in line.items() if isinstance(v, (int, float))}
    rows = [[step, version, *(str(a.get(key)) for key in COLUMNS[2:])] for a in answers]
    return step, values, rows
