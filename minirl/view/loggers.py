"""Metrics for other tools: TensorBoard, Weights & Biases (`log.to`).

Takes the log of a run. One daemon thread per logger looks for new lines every few seconds, so that
training never waits for a logger. Gives each logger the metrics, the recipe, and the answers of an
evaluation where it has a table. After a rollback, steps that are trained again are not logged
again. Leaves out: code, git state, command line, environment.
"""

import hashlib
import os
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, NamedTuple

from minirl.config import KEYS, get
from minirl.run_dir import Line
from minirl.run_log import RunLog

POLL_S = 10.0
END_S = 20.0  # for the last lines


class Logger(NamedTuple):
    write: Callable[[int, Line], None]
    close: Callable[[], None]
    table: Any = None


def open_tensorboard(log: RunLog) -> Logger:
    """Event files in RUN/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(log.run_dir / "tensorboard"), purge_step=log.step + 1)

    def write(step: int, values: Line) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Logger(write, writer.close)


def open_wandb(log: RunLog) -> Logger:
    """WANDB_MODE=offline keeps it on this machine. Every start of one run has the same name."""
    import wandb

    off = ("disable_code", "disable_git", "disable_job_creation", "x_disable_meta")
    flags = dict.fromkeys((*off, "x_disable_stats", "silent"), True)
    mark = hashlib.sha256(str(log.run_dir.absolute()).encode()).hexdigest()[:6]
    name = f"{log.run_dir.name}-{mark}"
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "minirl"),
        name=name,
        id=name,
        config={key: get(log.config, key) for key in KEYS},
        resume="allow",
        dir=str(log.run_dir),
        settings=wandb.Settings(console="off", save_code=False, **flags),
    )
    # wandb's own counter would refuse steps that are redone and evaluations that end late.
    run.define_metric("*", step_metric="step")
    return Logger(lambda step, v: run.log({"step": step, **v}), run.finish, wandb.Table)


LOGGERS = {"tensorboard": open_tensorboard, "wandb": open_wandb}


class Loggers:
    """The first exception turns a logger off with one note; one that hangs is left behind."""

    def __init__(self, log: RunLog):
        self._log, self._is_over, names = log, Event(), log.config.log.to
        self._threads = [Thread(target=self._run, args=(n,), name=n, daemon=True) for n in names]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        sent = {"": self._log.step, "eval/": self._log.step - 1}  # the last step of each kind
        try:
            logger, is_over = LOGGERS[name](self._log), False
            while not is_over:
                is_over = self._is_over.wait(POLL_S)  # then one more pass, for the last lines
                for prefix in sent:
                    lines: list[Line] = self._log.evals if prefix else self._log.metrics
                    for line in [line for line in lines if line["step"] > sent[prefix]]:
                        sent[prefix] = line["step"]
                        logger.write(line["step"], _values(line, prefix, logger.table))
            logger.close()
        except Exception as error:  # a foreign library may raise anything; none of it ends the run
            self._log.note(f"{name} is off, training continues: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(END_S)
            if thread.is_alive():
                self._log.note(f"{thread.name} is left behind: no end within {END_S:.0f} s")


def _values(line: Line, prefix: str, table: Any) -> Line:
    numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
    values: Line = {f"{prefix}{name}": value for name, value in numbers.items()}
    if table is not None and (answers := line.get("answers")):
        rows = [[str(value) for value in answer.values()] for answer in answers]
        values["answers"] = table(columns=[*answers[0]], data=rows)
    return values
