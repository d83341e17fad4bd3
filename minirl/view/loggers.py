"""Metrics for other people's tools: TensorBoard, Weights & Biases, trackio (`log.to`).

Takes a run directory, gives its metrics.jsonl and evals.jsonl to each logger that the recipe names.
A logger is a process of its own that follows these files. So training never waits for it: one that
raises, hangs, crashes or finds its disk full is noted once, and the files have everything all the
same. On resume it goes on after the checkpoint's step.

What leaves the machine is the metrics and the recipe. Not sent: code,
git state, command line, environment, console output, samples.

A new logger is a class with `write` and `close`, and a line in LOGGERS.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from minirl.config import KEYS, Config, get
from minirl.devices import Placement
from minirl.shm.board import BoardWriter, State
from minirl.workers import SECRET, Died, Fleet, Role, Worker

POLL_S = 1.0  # how often a logger looks for new lines
SLOW_START_S = 60.0  # then it is said that a logger has not begun
END_S = 20.0  # what a logger gets at the end to send what it has
BODY = "minirl.view.loggers:run"


class Logger(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggerSetup:
    """What a logger is spawned with."""

    name: str
    config: Config
    run_dir: str
    last_step: int  # of the checkpoint: lines up to it were logged before


class TensorBoard:
    """Event files in RUN/tensorboard, by tensorboard's own writer: neither torch nor TensorFlow."""

    def __init__(self, setup: LoggerSetup):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(setup.run_dir) / "tensorboard"), flush_secs=10)
        if setup.last_step:  # what an interrupted run logged past its checkpoint is taken back
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=setup.last_step + 1, session_log=start)
            self._writer.add_event(event)

    def write(self, step: int, values: dict[str, float]) -> None:
        pairs = values.items()
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in pairs]
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Project WANDB_PROJECT, else "minirl"; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, setup: LoggerSetup):
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "minirl"),
            name=Path(setup.run_dir).name,
            id=run_id(setup),
            resume="allow",
            dir=setup.run_dir,
            config=recipe_of(setup.config),
            settings=settings,
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Project TRACKIO_PROJECT, else "minirl", in trackio's folder on this machine."""

    def __init__(self, setup: LoggerSetup):
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "minirl"),
            name=f"{Path(setup.run_dir).name}-{run_id(setup)[:6]}",
            config=recipe_of(setup.config),
            resume="allow" if setup.last_step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[[LoggerSetup], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def run_id(setup: LoggerSetup) -> str:
    """The same for every start of one run."""
    return hashlib.sha256(str(Path(setup.run_dir).absolute()).encode()).hexdigest()[:16]


def recipe_of(config: Config) -> dict[str, Any]:
    """Without options whose name says that they hold a key."""
    values = {key: get(config, key) for key in KEYS}
    options = {k: v for k, v in values["tasks.options"].items() if not SECRET.search(k)}
    values |= {"tasks.options": options}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


# -- in the logger's process


def run(setup: LoggerSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a logger: until the controller says that the run has ended."""
    os.nice(10)
    logger = LOGGERS[setup.name](setup)
    board.enter(State.WAITING_FOR_ANSWERS)  # no longer starting
    lines = follow(Path(setup.run_dir) / "metrics.jsonl", setup.last_step)
    evals = follow(Path(setup.run_dir) / "evals.jsonl", setup.last_step - 1)
    is_over = False
    while True:
        for line in next(lines):
            step = int(line.pop("step"))
            logger.write(step, line)
        for line in next(evals):
            numbers = {f"eval/{k}": v for k, v in line.items() if isinstance(v, (int, float))}
            logger.write(int(line["step"]), numbers)
        if is_over:
            logger.close()
            sys.stdout.flush()
            os._exit(0)  # some libraries leave threads that would never let a process end
        if pipe.poll(POLL_S):
            pipe.recv()
            is_over = True  # once more, for what came meanwhile


def follow(path: Path, last_step: int) -> Iterator[list[dict[str, float]]]:
    """At each look the whole lines that are new and past `last_step`."""
    place = 0
    while True:
        fresh = []
        with path.open("rb") as file:
            file.seek(place)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                place += len(raw)
                line = json.loads(raw)
                if line.get("step", -1) > last_step:  # else of before, or a rollback
                    fresh.append(line)
        yield fresh


# -- in the controller


class Loggers:
    """The processes of a run's loggers. `check` is called now and then; it never waits."""

    def __init__(self, config: Config, run_dir: Path, step: int, note: Callable[[str], None]):
        self._note, self._names = note, config.log.to
        self._is_late: set[str] = set()
        self._fleet: Fleet | None = None
        if not self._names:
            return
        self._fleet = Fleet(run_dir / "logs", len(self._names))
        place = Placement("cpu", env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        for rank, name in enumerate(self._names):
            setup = LoggerSetup(name, config, str(run_dir), step)
            self._fleet.spawn(Role.LOG, rank, BODY, setup, place)

    def check(self) -> None:
        if self._fleet is None:
            return
        for worker, message in self._fleet.hear(0):
            if isinstance(message, Died):
                self._off(worker, message.how)
        for worker in self._living():
            if worker.failure:  # it said so, but its library's threads keep it from ending
                self._off(worker, worker.failure.message)
                continue
            row = self._fleet.board.row(worker.row)
            is_late = row.state is State.STARTING and row.since_s > SLOW_START_S
            if is_late and worker.name not in self._is_late:
                self._is_late.add(worker.name)
                name = self._names[worker.rank]
                self._note(f"{name} has not begun after {row.since_s:.0f} s; training goes on")

    def _living(self) -> list[Worker]:
        return [w for w in self._fleet.workers if w.process is not None] if self._fleet else []

    def _off(self, worker: Worker, how: str) -> None:
        assert self._fleet is not None
        self._fleet.retire(worker)
        name = self._names[worker.rank]
        self._note(f"{name} is off, training goes on: {how} (its log: logs/{worker.name}.log)")

    def close(self) -> None:
        """Each gets a while to send the rest; what hangs is left behind."""
        if self._fleet is None:
            return
        self.check()
        for worker in self._living():
            worker.send(None)
        deadline = time.monotonic() + END_S
        for worker in self._living():
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker, message in self._fleet.hear(0):
            if isinstance(message, Died) and (worker.failure or worker.process.exitcode):
                self._off(worker, message.how)
        for worker in self._living():
            if worker.process.is_alive():
                why = (
                    worker.failure.message if worker.failure else f"took over {END_S:.0f} s to end"
                )
                self._off(worker, why)
        self._fleet.kill()

    def kill(self) -> None:
        if self._fleet is not None:
            self._fleet.kill()
