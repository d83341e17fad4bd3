"""The rollout worker: a loop around one engine, in its own process. It never stops generating.

    consumes  Submit, Abort and Continue from the controller, new weights from the store
    waits for prompts, when it has none; unblocked by Submit and Continue
    gives     trajectories into the ring, and Finished, Pinned, Gone

Requests wait here, not in vLLM, until a sequence is free: so none waits under a prefix-cache salt
of another version. What the model wrote in earlier turns is never tokenised again.
"""

import heapq
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection

from minirl import messages
from minirl.config import Config
from minirl.messages import GroupRequest
from minirl.records import StopReason, Trajectory
from minirl.rollout.dispatch import ExpectedLength
from minirl.rollout.engine import Engine, Sampling
from minirl.shm.board import BEAT_S, BoardWriter, State, Total
from minirl.shm.ring import NOTHING, TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.tasks.turns import Dialogue

IDLE_POLL_S = 0.02  # how often an idle worker looks for new weights
PATIENCE = 50  # polls without a prompt, right after a reload, until it is the trainer's turn
EVAL_SHARE = 0.5  # of the seats, while training groups wait
EVAL_PRIORITY = -1  # before training groups (their id)


@dataclass
class Request:
    """A trajectory that waits or runs."""

    group: GroupRequest
    index: int
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    num_turns: int = 0

    def append(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(tokens))


Waiting = list[tuple[int, int, Request]]  # a heap of (vLLM's priority, key, request)


@dataclass(frozen=True)
class RolloutSetup:
    """What a worker is spawned with."""

    config: Config
    folder: str  # of the model: its config.json, and its weights where there is no store
    kind: str
    seed: int
    ring: TrajectoryRing
    store: WeightStore | None
    dialogue: Dialogue | None = None  # of a task with several turns


def run(setup: RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a rollout process."""
    config, has_turns = setup.config, setup.dialogue is not None
    if setup.dialogue is not None:  # its stop texts end a turn, the recipe's too
        stop = (*config.rollout.stop, *setup.dialogue.stop)
        config = replace(config, rollout=replace(config.rollout, stop=stop))
    if config.takes_turns:
        wait_for_turn(board)
    engine = Engine(config, setup.folder, setup.kind, setup.store, setup.seed)
    if setup.store is not None:
        while not engine.is_behind:  # before the trainer's first version
            board.enter(State.RELOADING)
            time.sleep(BEAT_S)
        engine.reload()
    pipe.send(messages.Started())
    RolloutWorker(config, engine, setup.ring, board, pipe, has_turns).loop()
    engine.shutdown()


def wait_for_turn(board: BoardWriter) -> None:
    """A restarted engine needs memory that the trainer may be using."""
    while any(row.state is State.TRAINING for row in board.board.rows):
        board.enter(State.STARTING)
        time.sleep(BEAT_S)


@dataclass
class RolloutWorker:
    config: Config
    engine: Engine
    ring: TrajectoryRing
    board: BoardWriter
    pipe: Connection
    has_turns: bool = False

    def __post_init__(self) -> None:
        self.waiting: Waiting = []
        self.waiting_eval: Waiting = []
        self.running: dict[int, Request] = {}
        # By group and place: turns that the model ended. They have no seat and no KV, but their
        # group still runs, and an evaluation's still pins its version.
        self.parked: dict[tuple[int, int], Request] = {}
        self.expected = ExpectedLength(self.config.rollout.max_new_tokens)
        self.keys = count()
        self.stopped = False
        self.polls_left = PATIENCE  # until an idle engine sleeps, where it takes turns

    def loop(self) -> None:
        while not self.stopped:
            self.turn()

    def turn(self) -> None:
        """The order matters: a group that was dispatched after a publication never begins under
        the weights before it."""
        self.read_inbox()
        self.look_at_version()
        self.admit()
        if self.engine.is_busy:
            self.board.enter(State.GENERATING)
            self.step()

    @property
    def is_pinned(self) -> bool:
        """While an evaluation waits or runs, its version stays, for training groups too."""
        begun = (*self.running.values(), *self.parked.values())
        return bool(self.waiting_eval) or any(request.group.is_eval for request in begun)

    def read_inbox(self) -> None:
        is_idle = not (self.engine.is_busy or self.waiting or self.waiting_eval)
        if is_idle:
            self.rest()
        while not self.stopped and self.pipe.poll(IDLE_POLL_S if is_idle else 0):
            message = self.pipe.recv()
            is_idle = False
            if isinstance(message, messages.Submit):
                self.enqueue(message)
            elif isinstance(message, messages.Abort):  # always answered: then the cells are free
                self.forget(message.group_id)
                self.pipe.send(messages.Gone(message.group_id, ""))
            elif isinstance(message, messages.Continue):
                self.resume(message)
            else:
                self.stopped = True

    def rest(self) -> None:
        """For the trainer's turn, where they take turns. It sleeps at once after work; where it or
        the trainer was restarted with a batch ready, after a while. The board shows it
        (`Loop.learn`)."""
        if self.config.takes_turns and not self.parked and not self.engine.is_asleep:
            self.polls_left -= 1
            if self.polls_left < 0:
                self.engine.sleep()
        self.board.enter(State.SLEEPING if self.engine.is_asleep else State.WAITING_FOR_PROMPTS)

    def look_at_version(self) -> None:
        if not self.engine.is_behind or (self.is_pinned and self.engine.version >= 0):
            return
        self.board.enter(State.RELOADING, behind=self.engine.version)
        self.board.add(Total.RELOAD_S, self.engine.reload())
        self.board.add(Total.RELOADS, 1)
        self.polls_left = PATIENCE
        self.board.serving(self.engine.version, len(self.running))

    def enqueue(self, submit: messages.Submit) -> None:
        if self.engine.is_asleep:
            self.engine.wake()
            self.look_at_version()  # before it reseeds: the canary may draw too
        if submit.seed is not None:
            self.engine.reseed(submit.seed)
            self.expected = ExpectedLength(self.config.rollout.max_new_tokens)  # nothing remembered
        if any(group.is_eval for group in submit.groups):
            self.look_at_version()  # pins the newest version there is, or the one that is pinned
            self.pipe.send(messages.Pinned(self.engine.version))
        for group in submit.groups:
            for index in range(len(group.cells)):
                self.queue(Request(group, index))

    def queue(self, request: Request) -> None:
        is_eval, group_id = request.group.is_eval, request.group.group_id
        heap = self.waiting_eval if is_eval else self.waiting
        heapq.heappush(heap, (EVAL_PRIORITY if is_eval else group_id, next(self.keys), request))

    def resume(self, message: messages.Continue) -> None:
        for group_id, place, tokens in message.replies:
            request = self.parked.pop((group_id, place), None)
            if request is not None and tokens:  # its group was not aborted in the meantime
                request.append(tokens, [0.0] * len(tokens), NOTHING)
                self.queue(request)

    def admit(self) -> None:
        share = max(1, int(EVAL_SHARE * self.config.rollout.max_num_seqs))
        while (self.waiting or self.waiting_eval) and self.has_room():
            num_eval = sum(request.group.is_eval for request in self.running.values())
            has_share = not self.waiting or num_eval < share
            is_eval = self.waiting_eval and has_share
            priority, key, request = heapq.heappop(self.waiting_eval if is_eval else self.waiting)
            group = request.group
            prompt = (*group.prompt, *request.tokens) if request.tokens else group.prompt
            try:
                self.engine.add(key, prompt, self.sampling(request), priority)
            except ValueError as refusal:
                self.forget(group.group_id)
                self.pipe.send(messages.Gone(group.group_id, str(refusal).splitlines()[0]))
                continue
            self.running[key] = request
        self.board.serving(self.engine.version, len(self.running))

    def has_room(self) -> bool:
        """For one more sequence, and for the KV of all at their expected lengths. With less room
        requests would wait in vLLM, and running ones would be preempted."""
        num = len(self.running) + 1
        prompts = {r.group.group_id: len(r.group.prompt) for r in self.running.values()}
        needed = sum(prompts.values()) + self.expected.tokens * num  # a group shares a prompt's KV
        is_free = num <= self.config.rollout.max_num_seqs and needed <= self.engine.kv_tokens
        return is_free or not self.running

    def sampling(self, request: Request) -> Sampling:
        rollout = self.config.rollout
        room = rollout.max_new_tokens - len(request.tokens)
        if request.group.is_eval:
            return Sampling(room, self.config.eval.temperature)
        return Sampling(room, rollout.temperature, rollout.top_p, rollout.top_k)

    def step(self) -> None:
        finished, ended = [], []
        num_tokens = self.polls_left = 0
        for chunk in self.engine.step():
            request = self.running[chunk.key]
            request.append(chunk.tokens, chunk.logprobs, chunk.version)
            num_tokens += len(chunk.tokens)
            if chunk.stop is None:
                continue
            del self.running[chunk.key]
            request.num_turns += 1
            if self.has_turns and chunk.stop is StopReason.STOP:
                self.parked[request.group.group_id, request.index] = request
                ended.append(self.seal(request, chunk.stop))
            else:
                self.expected.saw(len(request.tokens))
                finished.append(self.seal(request, chunk.stop))
        self.board.add(Total.TOKENS, num_tokens)
        self.board.add(Total.STEPS, 1)
        if finished:
            self.pipe.send(messages.Finished(tuple(finished)))
        if ended:
            self.pipe.send(messages.Finished(tuple(ended), are_turns=True))

    def seal(self, request: Request, stop: StopReason) -> tuple[int, int, Trajectory]:
        group, tokens, versions = request.group, request.tokens, request.versions
        cell, length = group.cells[request.index], len(group.prompt) + len(tokens)
        self.ring.write(cell, group.group_id, group.prompt, tokens, request.logprobs, versions)
        num_replied, turns = versions.count(NOTHING), request.num_turns
        num_written, ends = len(tokens) - num_replied, (versions[0], versions[-1])
        said = Trajectory(cell, length, num_written, stop, *ends, num_replied, turns)
        return group.group_id, request.index, said

    def forget(self, group_id: int) -> None:
        keys = [key for key, r in self.running.items() if r.group.group_id == group_id]
        self.engine.abort(keys)
        for key in keys:
            del self.running[key]
        for heap in (self.waiting, self.waiting_eval):
            heap[:] = [entry for entry in heap if entry[2].group.group_id != group_id]
            heapq.heapify(heap)
        self.parked = {at: request for at, request in self.parked.items() if at[0] != group_id}
