"""Answers without a trainer. Takes prompts and a folder of weights, gives graded answers.

The same rollout workers and verifiers as in training, on all devices of the machine: vLLM loads the
folder's own weights. A plain loop:

    feed      while there are free cells, send prompts to the engines, one group per answer
    collect   answers to grade, rewards, deaths

An engine that dies is replaced and its prompts are requeued. A reward that hangs or takes its
verifier down costs that one answer, and so does a reply that fails, where a task has several turns:
such an answer has no reward, and an error that says why (rule 7). However it ends, nothing is left
but logs.
"""

import random
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl import devices
from minirl.config import Config
from minirl.conversations import Conversations
from minirl.errors import Stalled
from minirl.launch import spawn_engines, spawn_verifiers
from minirl.records import Prompt, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import (
    Finished,
    Gone,
    GroupRequest,
    RolloutSetup,
    Started,
    Submit,
    TurnEnded,
)
from minirl.shm.board import State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.grading import GradingQueue
from minirl.tasks.turns import Dialogue, readable, texts_of
from minirl.tasks.verifier import Ask, Grade, Graded, Replied, VerifierSetup
from minirl.workers import LISTEN_S, Died, Role, Worker, Workers, signals

START_LIMIT_S = 1800.0  # loading a large model and capturing graphs takes its time
MAX_STARTS = 3
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
    """With engines that are up, and verifiers unless nothing is to be graded."""
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
            for _ in places:
                workers.wait_for(Started, START_LIMIT_S)
            yield Collector(config, workers, ring, tokenizer, note, dialogue)
        finally:
            with signals(signal.SIG_IGN):
                workers.kill()
                devices.sweep_temp(temp)


@dataclass
class Collector:
    """Group ids are places in `prompts`. A prompt that stands there k times has k answers."""

    config: Config
    workers: Workers
    ring: TrajectoryRing
    tokenizer: Any
    note: Callable[[str], None]
    dialogue: Dialogue | None

    def __post_init__(self) -> None:
        self.engines = self.workers.of(Role.ROLLOUT)
        self.verifiers = {worker.name: worker for worker in self.workers.of(Role.VERIFY)}
        self.dispatcher = Dispatcher(len(self.engines), self.config.rollout.max_new_tokens)
        self.grading = GradingQueue()
        queues = self.dispatcher, self.grading
        self.conversations = Conversations(self.config, *queues, in_step=False)
        self.prompts: Sequence[Prompt] = ()
        self.to_ask: list[int] = []  # the next is the last
        self.free = list(range(self.ring.num_cells))
        self.cells: dict[int, int] = {}  # by group, while it is asked or graded
        self.is_seeded: set[int] = set()
        self.done: dict[int, Attempt] = {}

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Attempt]]:
        """By place, in the order in which they are done. A cell is used again when its answer was
        taken."""
        self.prompts, self.to_ask = prompts, list(range(len(prompts)))[::-1]
        num_left = len(prompts)
        while num_left:
            self.feed()
            self.collect()
            for place, attempt in self.done.items():
                yield place, attempt
                self.free.append(self.cells.pop(place))
            num_left -= len(self.done)
            self.done.clear()

    def feed(self) -> None:
        requests: dict[int, list[GroupRequest]] = defaultdict(list)
        while self.to_ask and self.free:
            group_id = self.to_ask.pop()
            self.cells[group_id] = self.free.pop()
            cells, tokens = (self.cells[group_id],), self.prompts[group_id].tokens
            engine = self.dispatcher.assign(group_id, 1)
            requests[engine].append(GroupRequest(group_id, tokens, cells, is_eval=True))
        for engine, groups in requests.items():
            self.engines[engine].send(Submit(tuple(groups), self.seed(engine)))

    def seed(self, engine: int) -> int | None:
        """Once per engine: where all prompts fit at once, one engine and one seed give the same
        answers (not where a task has several turns: replies come when they come)."""
        if engine in self.is_seeded:
            return None
        self.is_seeded.add(engine)
        return random.Random(f"{self.config.seed}/exam/{engine}").getrandbits(31)

    def collect(self) -> None:
        for worker, message in self.workers.receive(LISTEN_S):
            self.handle(worker, message)
        for engine, replies in self.conversations.outgoing():
            self.engines[engine].send(replies)
        for name, request in self.grading.assign(self.verifiers):
            self.verifiers[name].send(request)
        self.end_slow_rewards()
        self.check_heartbeats()

    def handle(self, worker: Worker, message: object) -> None:
        match message:
            case Finished():
                for group_id, _, trajectory in message.trajectories:
                    self.on_answer(group_id, trajectory)
            case TurnEnded():
                for group_id, place, trajectory in message.trajectories:
                    example = self.prompts[group_id].example
                    self.conversations.ask(group_id, place, example, trajectory)
            case Gone():
                self.dispatcher.forget(message.group_id)
                self.conversations.forget(message.group_id)
                self.done[message.group_id] = Attempt("", None, 0, REFUSED, message.why)
            case Graded():
                self.on_graded(self.grading.done(worker.name), message)
            case Replied():
                self.on_reply(self.grading.done(worker.name), message)
            case Died():
                self.on_death(worker, message)

    def on_answer(self, group_id: int, trajectory: Trajectory) -> None:
        self.dispatcher.trajectory_done(group_id, trajectory.num_written)
        if self.verifiers:
            example = self.prompts[group_id].example
            self.grading.add(Grade(group_id, example, (trajectory,), max_failures=1))
        else:
            self.finish(group_id, trajectory)

    def on_graded(self, request: Grade | Ask | None, message: Graded) -> None:
        assert isinstance(request, Grade)
        reward, trajectory = message.rewards[0], request.trajectories[0]
        self.finish(request.group_id, trajectory, reward, message.error if reward is None else "")

    def on_reply(self, request: Grade | Ask | None, message: Replied) -> None:
        assert isinstance(request, Ask)
        if message.error:
            self.fail(request, message.error)
        elif self.conversations.is_awaited(request):
            ended = self.conversations.reply(request, message.tokens)
            if ended is not None:
                self.on_answer(request.group_id, ended)

    def fail(self, request: Grade | Ask, why: str) -> None:
        """An answer whose reply failed ends there, and is not graded."""
        if isinstance(request, Grade):
            self.finish(request.group_id, request.trajectories[0], None, why)
        elif self.conversations.is_awaited(request):
            self.conversations.reply(request, ())
            self.dispatcher.forget(request.group_id)
            self.finish(request.group_id, request.trajectory, None, why)

    def finish(
        self, group_id: int, trajectory: Trajectory, reward: float | None = None, error: str = ""
    ) -> None:
        view = self.ring.read(trajectory.cell, group_id)
        text = readable(texts_of(view, self.tokenizer, self.dialogue))
        length, stop = trajectory.num_written, trajectory.stop.name.lower()
        self.done[group_id] = Attempt(text, reward, length, stop, error)

    def on_death(self, worker: Worker, death: Died) -> None:
        if death.is_final or (worker.role is Role.ROLLOUT and worker.num_starts >= MAX_STARTS):
            raise self.workers.exit_error(worker, death)
        self.note(f"{worker.name} {death.how}: replaced")
        if worker.role is Role.VERIFY:
            self.replace_verifier(worker, f"its verifier {death.how}")
            return
        self.workers.replace(worker)
        self.conversations.lost(worker.rank)
        for group_id in self.dispatcher.lost(worker.rank):
            self.free.append(self.cells.pop(group_id))
            self.to_ask.append(group_id)

    def replace_verifier(self, verifier: Worker, why: str) -> None:
        self.workers.replace(verifier)
        request = self.grading.done(verifier.name)
        if request is not None:
            self.fail(request, why)

    def end_slow_rewards(self) -> None:
        limit_s = self.config.tasks.timeout_s
        for name, verifier in self.verifiers.items():
            row = self.workers.board.row(verifier.row)
            if row.state is State.GRADING and row.since_s > limit_s and self.grading.is_busy(name):
                self.replace_verifier(verifier, f"took longer than tasks.timeout_s = {limit_s:g}")

    def check_heartbeats(self) -> None:
        """Rule 8: an engine that hangs ends it."""
        for worker in self.engines:
            row = self.workers.board.row(worker.row)
            limit_s = START_LIMIT_S if row.state is State.STARTING else self.config.log.stall_s
            if row.beat_s > limit_s and row.state is not State.WAITING_FOR_PROMPTS:
                silent = f"{worker.name} gave no sign of life for {row.beat_s:.0f} s"
                raise Stalled(f"{silent}; stacks:\n{self.workers.stacks()}")
