"""Metrics for other tools: TensorBoard, Weights & Biases, trackio (`log.to`).

Takes a run directory. One daemon thread per logger reads metrics.jsonl and evals.jsonl again and
again: the files are its queue, so training never waits for a logger. Gives each logger the metrics,
the recipe, and the answers of an evaluation where it has a table. After a rollback, steps that are
trained again are not logged again. Leaves out: code, git state, command line, environment.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from minirl.config import KEYS, Config, get
from minirl.run_dir import Line, read_lines

POLL_S = 10.0
END_S = 20.0  # for the last lines


class Logger(NamedTuple):
    write: Callable[[int, Line], None]
    close: Callable[[], None]
    table: Any = None


def open_tensorboard(config: Config, run_dir: Path, last_step: int) -> Logger:
    """Event files in RUN/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1)

    def write(step: int, values: Line) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Logger(write, writer.close)


def open_wandb(config: Config, run_dir: Path, last_step: int) -> Logger:
    """WANDB_MODE=offline keeps it on this machine."""
    import wandb

    off = ("disable_code", "disable_git", "disable_job_creation", "x_disable_meta")
    flags = dict.fromkeys((*off, "x_disable_stats", "silent"), True)
    settings = wandb.Settings(console="off", save_code=False, **flags)
    facts = facts_of(config, run_dir, "WANDB_PROJECT")
    run = wandb.init(**facts, id=facts["name"], dir=str(run_dir), settings=settings)
    # wandb's own counter would refuse steps that are redone and evaluations that end late.
    run.define_metric("*", step_metric="step")
    return Logger(lambda step, v: run.log({"step": step, **v}), run.finish, wandb.Table)


def open_trackio(config: Config, run_dir: Path, last_step: int) -> Logger:
    """In trackio's folder on this machine."""
    import trackio

    off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(**facts_of(config, run_dir, "TRACKIO_PROJECT"), **off)
    return Logger(lambda step, v: run.log(v, step=step), run.finish, trackio.Table)


def facts_of(config: Config, run_dir: Path, variable: str) -> Line:
    """The name is the same for every start of one run."""
    mark = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:6]
    names = {"project": os.environ.get(variable, "minirl"), "name": f"{run_dir.name}-{mark}"}
    return {**names, "config": {key: get(config, key) for key in KEYS}, "resume": "allow"}


LOGGERS = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}


class Loggers:
    """The loggers of a run. `last_step` is that of the checkpoint from which it resumes. The first
    exception turns a logger off with one note; one that hangs is left behind at the end."""

    def __init__(self, config: Config, run_dir: Path, last_step: int, note: Callable[[str], None]):
        self._note, self._is_over = note, Event()
        self._threads = []
        for name in config.log.to:
            args = (name, config, run_dir, last_step)
            self._threads.append(Thread(target=self._run, args=args, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self, name: str, config: Config, run_dir: Path, last_step: int) -> None:
        sent = {"metrics": last_step, "evals": last_step - 1}
        try:
            logger, is_over = LOGGERS[name](config, run_dir, last_step), False
            while not is_over:
                is_over = self._is_over.wait(POLL_S)  # then one more pass, for the last lines
                for file in sent:
                    for line in read_lines(run_dir / f"{file}.jsonl"):
                        if line["step"] > sent[file]:
                            sent[file] = line["step"]
                            values = _values(line, "eval/" if file == "evals" else "", logger.table)
                            logger.write(line["step"], values)
            logger.close()
        except Exception as error:  # a foreign library may raise anything; none of it ends the run
            self._note(f"{name} is off, training continues: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(END_S)
            if thread.is_alive():
                self._note(f"{thread.name} is left behind: it did not end within {END_S:.0f} s")


def _values(line: Line, prefix: str, table: Any) -> Line:
    numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
    values = {f"{prefix}{name}": value for name, value in numbers.items()}
    if table is not None and (answers := line.get("answers")):
        rows = [[str(value) for value in answer.values()] for answer in answers]
        values["answers"] = table(columns=[*answers[0]], data=rows)
    return values
