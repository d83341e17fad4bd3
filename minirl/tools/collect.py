"""Answers without a trainer. Takes prompts and a folder of weights, gives graded answers.

The same engines, verifiers, `Groups` and `Supervisor` as in training, on all devices of the
machine: vLLM loads the folder's own weights, and all prompts are one evaluation. An engine that
dies is restarted and its prompts are requeued. A reward that hangs or takes its verifier down costs
that one answer, and so does a reply that fails: such an answer has no reward, and an error that
says why (rule 7). However it ends, nothing is left but logs.
"""

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl import devices
from minirl.buffer import Buffer
from minirl.config import Config
from minirl.evaluation import Ended, Evaluation
from minirl.groups import Groups, Sends
from minirl.launch import spawn_engines, spawn_verifiers
from minirl.messages import Died, Role, Started
from minirl.records import Prompt
from minirl.rollout.worker import RolloutSetup
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.supervisor import Supervisor
from minirl.tasks.turns import Dialogue, readable, texts_of
from minirl.tasks.verifier import VerifierSetup
from minirl.workers import LISTEN_S, Worker, Workers, signals

REFUSED = "refused"


@dataclass(frozen=True)
class Attempt:
    """An answer to one prompt."""

    text: str
    reward: float | None  # None: it failed, as `error` says
    length: int  # written tokens
    stop: str  # REFUSED: the engine did not take the prompt
    error: str = ""


@contextmanager
def collecting(
    config: Config,
    folder: Path,
    tokenizer: Any,
    num_cells: int,
    log_dir: Path,
    note: Callable[[str], None],
    dialogue: Dialogue | None = None,
    is_graded: bool = True,
) -> Iterator["Collector"]:
    """With engines that start, and verifiers unless nothing is to be graded."""
    kind, available = devices.find_devices(config.devices.kind)
    places = devices.place(config, kind, available, ranks=False)[0]
    log_dir.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix="minirl-"))
    workers = Workers(log_dir, len(places) + config.tasks.verifiers)
    with signals():
        try:
            ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
            seed, source = config.seed * 1000 + 1, str(folder)
            first = RolloutSetup(config, source, kind, seed, ring, None, dialogue)
            spawn_engines(workers, first, places, temp)
            if is_graded:
                spawn_verifiers(workers, VerifierSetup(config, source, ring, dialogue))
            note(f"starting {len(places)} engine{'s'[: len(places) != 1]}")
            collector = Collector(config, workers, ring, tokenizer, note, dialogue)
            while not all(worker.is_ready for worker in workers.of(Role.ROLLOUT)):
                collector.collect()
            yield collector
        finally:
            with signals(signal.SIG_IGN):
                workers.kill()
                devices.sweep_temp(temp)


@dataclass
class Collector:
    config: Config
    workers: Workers
    ring: TrajectoryRing
    tokenizer: Any
    note: Callable[[str], None]
    dialogue: Dialogue | None

    def __post_init__(self) -> None:
        engines, verifiers = (len(self.workers.of(role)) for role in (Role.ROLLOUT, Role.VERIFY))
        self.groups = Groups(self.config, None, Buffer(1, 0), engines, verifiers, self.note)
        self.supervisor = Supervisor(self.config, self.workers, self.groups, self, self)
        self.run_dir = self.workers.log_dir
        self.workers_replaced = 0.0

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Ended]]:
        """By place, in the order in which they end. A prompt that stands there k times has k
        answers. Where all prompts fit into the ring, one engine and one seed give the same answers
        (not where a task has several turns: replies come when they come)."""
        evaluation = Evaluation(prompts, range(self.ring.num_cells))
        while not evaluation.is_done:
            self.workers.deliver(self.groups.evaluate(evaluation))
            self.collect()
            yield from evaluation.take_ended()

    def collect(self) -> None:
        for worker, message in self.workers.receive(LISTEN_S):
            self.supervisor.received(worker, message)
            if isinstance(message, Started):
                worker.is_ready = True
            elif isinstance(message, Died):
                self.workers.deliver(self.supervisor.on_death(worker, message))
            else:
                self.workers.deliver(self.groups.handle(worker.rank, message, 0.0))
        self.workers.deliver(self.supervisor.check())

    def view(self, ended: Ended) -> TrajectoryView | None:
        if ended.trajectory is None:
            return None
        return self.ring.read(ended.trajectory.cell, ended.group_id)

    def attempt(self, ended: Ended) -> Attempt:
        if ended.trajectory is None:
            return Attempt("", None, 0, REFUSED, ended.error)
        view = self.ring.read(ended.trajectory.cell, ended.group_id)
        text = readable(texts_of(view, self.tokenizer, self.dialogue))
        stop = ended.trajectory.stop.name.lower()
        return Attempt(text, ended.reward, ended.trajectory.num_written, stop, ended.error)

    # -- what the supervisor asks

    def stall_facts(self) -> dict[str, object]:
        return self.groups.stall_facts()

    def keep_batch(self, worker: Worker, why: str) -> str:
        return f"; its log is in {self.workers.log_dir}"

    def roll_back(self, step: int, version: int) -> Sends:
        raise AssertionError("there are no ranks")

    def stalled(self, report: str) -> Path:
        path = self.workers.log_dir / "stall.txt"
        path.write_text(report)
        return path
