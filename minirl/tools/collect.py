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


@dataclass
class Collector:
    """The controller of an evaluation, as `Loop` is that of training, and its log."""

    config: Config
    folder: Path  # of the weights
    tokenizer: Any
    run_dir: Path  # for logs
    note: Callable[[str], None]
    dialogue: Dialogue | None = None
    is_graded: bool = True  # else there are no verifiers
    workers_replaced: float = 0.0

    @contextmanager
    def running(self, num_cells: int) -> Iterator["Collector"]:
        """With engines that are ready; `num_cells` answers may be in flight at once."""
        kind, available = devices.find_devices(self.config.devices.kind)
        places = devices.place(self.config, kind, available, ranks=False)[0]
        self.ring = TrajectoryRing(num_cells, self.config.max_tokens_per_trajectory)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.workers = Workers(self.run_dir, len(places) + self.config.tasks.verifiers)
        temp = Path(tempfile.mkdtemp(prefix="minirl-"))
        with signals():
            try:
                self._spawn(kind, places, temp)
                while not all(worker.is_ready for worker in self.workers.of(Role.ROLLOUT)):
                    self.collect()
                yield self
            finally:
                with signals(signal.SIG_IGN):
                    self.workers.kill()
                    devices.sweep_temp(temp)

    def _spawn(self, kind: str, places: list[devices.Placement], temp: Path) -> None:
        config, source, seed = self.config, str(self.folder), self.config.seed * 1000 + 1
        first = RolloutSetup(config, source, kind, seed, self.ring, None, self.dialogue)
        spawn_engines(self.workers, first, places, temp)
        if self.is_graded:
            spawn_verifiers(self.workers, VerifierSetup(config, source, self.ring, self.dialogue))
        self.note(f"starting {len(places)} engine{'s'[: len(places) != 1]}")
        num_verifiers = len(self.workers.of(Role.VERIFY))
        self.groups = Groups(config, None, Buffer(1, 0), len(places), num_verifiers, self.note)
        self.supervisor = Supervisor(config, self.workers, self.groups, self, self)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Ended]]:
        """By place, in the order in which they end. A prompt that stands there k times has k
        answers. Where all prompts fit into the ring, one engine and one seed give the same answers
        (not where a task has several turns: replies come when they come)."""
        evaluation = Evaluation(prompts, range(self.ring.num_cells), is_requeued=True)
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
        """None: there is no answer."""
        answer = ended.trajectory
        return self.ring.read(answer.cell, ended.group_id) if answer else None

    def attempt(self, ended: Ended) -> Attempt:
        answer, view = ended.trajectory, self.view(ended)
        if answer is None or view is None:
            return Attempt("", None, 0, REFUSED, ended.error)
        text = readable(texts_of(view, self.tokenizer, self.dialogue))
        return Attempt(
            text, ended.reward, answer.num_written, answer.stop.name.lower(), ended.error
        )

    # -- what the supervisor asks

    def stall_facts(self) -> dict[str, object]:
        return self.groups.facts()

    def keep_batch(self, worker: Worker, why: str) -> str:
        return f"; its log is in {self.run_dir}"

    def roll_back(self, delay_s: float) -> Sends:
        raise AssertionError("there are no ranks")

    def stalled(self, report: str) -> Path:
        path = self.run_dir / "stall.txt"
        path.write_text(report)
        return path
