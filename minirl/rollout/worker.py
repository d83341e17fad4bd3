"""The rollout worker: a plain loop in its own process around one engine. It never stops generating.

    consumes      Submit, Abort and Continue from the controller, new weights from the store
    waits for     prompts, when it has none; nothing else
    unblocked by  Submit, Continue
    gives         trajectories into the ring, one Finished a step that says which, and Pinned;
                  where a task has several turns, TurnEnded

A loop turn is: read the inbox, look at the version, admit, step, emit. The order matters: a group
that was dispatched after a publication is never begun under the weights before it.

Requests wait here, not in vLLM, until a sequence is free: so none waits under a prefix-cache salt
of another version. While an evaluation runs the version stays pinned and training groups go on
under it: the evaluation goes first, but takes half of the seats at most while others wait.

Where a task has several turns, a turn that the model ended goes into the ring as if it were the
last, and is *parked*: it has no seat and no KV, but its group still runs and an evaluation's still
pins its version. Continue says that it was the last, or gives the reply's tokens: these are put
after it with mask 0, and all tokens so far are the prompt of the next turn. What the model wrote is
never tokenised again; the prefix cache has its KV as long as the version is the same.
"""

import heapq
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from minirl.config import Config
from minirl.records import StopReason, Trajectory
from minirl.rollout.dispatch import ExpectedLength
from minirl.rollout.engine import Engine, Sampling
from minirl.shm.board import BoardWriter, State, Total
from minirl.shm.ring import NOTHING, TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.tasks.turns import Dialogue

IDLE_POLL_S = 0.02  # how often an idle worker looks for new weights
EVAL_SHARE = 0.5  # of the seats, while training groups wait
EVAL_PRIORITY = -1  # before training groups (their id)


@dataclass(frozen=True)
class GroupRequest:
    """One group to sample: a prompt, and a ring cell for each trajectory."""

    group_id: int
    prompt: tuple[int, ...]
    cells: tuple[int, ...]
    is_eval: bool = False  # sampled as [eval] says, under one pinned version


@dataclass(frozen=True)
class Submit:
    groups: tuple[GroupRequest, ...]
    seed: int | None = (
        None  # at η = 0, where a run can be repeated: the engine is idle, and reseeds
    )


@dataclass(frozen=True)
class Abort:
    group_id: int


@dataclass(frozen=True)
class Continue:
    """To TurnEnded: (group id, place, tokens of the reply); no tokens: that turn was the last."""

    replies: tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Stop:
    pass


@dataclass(frozen=True)
class Started:
    """The engine is up and serves its first version."""


@dataclass(frozen=True)
class Pinned:
    """To a Submit with evaluation groups: all of these will be sampled under this version."""

    version: int


@dataclass(frozen=True)
class Finished:
    """Trajectories that are sealed in the ring: (group id, place in the group, descriptor)."""

    trajectories: tuple[tuple[int, int, Trajectory], ...]


@dataclass(frozen=True)
class TurnEnded:
    """The same, of trajectories that go on if the task has a reply."""

    trajectories: tuple[tuple[int, int, Trajectory], ...]


@dataclass(frozen=True)
class Gone:
    """A group of which nothing will come, and whose cells are no longer written to."""

    group_id: int
    why: str  # empty where the controller asked for it


@dataclass
class Request:
    """A trajectory that waits or runs."""

    group: GroupRequest
    index: int
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    num_turns: int = 0
    num_replied: int = 0

    def append_reply(self, tokens: tuple[int, ...]) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([NOTHING] * len(tokens))
        self.num_replied += len(tokens)


class RolloutWorker:
    def __init__(
        self,
        config: Config,
        engine: Engine,
        ring: TrajectoryRing,
        board: BoardWriter,
        pipe: Connection,
        has_turns: bool = False,
    ):
        self.config, self.engine, self.ring = config, engine, ring
        self.board, self.pipe, self.has_turns = board, pipe, has_turns
        self.parked: dict[tuple[int, int], Request] = {}  # by group and place: wait for a reply
        self.running: dict[int, Request] = {}
        self.waiting: list[tuple[int, int, Request]] = []  # heap of (group id, key, request)
        self.waiting_eval: deque[tuple[int, Request]] = deque()
        self.next_key = 0
        self.num_running_eval = 0
        self.stopped = False
        self.expected = ExpectedLength(config.rollout.max_new_tokens)
        self.num_running: Counter[int] = Counter()  # by group: its trajectories share a prompt's KV
        self.num_prompt_tokens = 0  # of the groups that run
        self.recomputing: set[int] = set()  # whose KV is gone since a reload

    def loop(self) -> None:
        while not self.stopped:
            self.turn()

    def turn(self) -> None:
        self.read_inbox()
        self.look_at_version()
        self.admit()
        if self.engine.is_busy:
            if self.recomputing:
                self.board.enter(State.GENERATING, phase="prefill after a reload")
            else:
                self.board.enter(State.GENERATING)
            self.step()

    @property
    def is_pinned(self) -> bool:
        """An evaluation waits or runs."""
        is_parked = any(request.group.is_eval for request in self.parked.values())
        return bool(self.num_running_eval or self.waiting_eval or is_parked)

    def read_inbox(self) -> None:
        is_idle = not self.engine.is_busy and not self.waiting and not self.waiting_eval
        if is_idle:
            self.board.enter(State.WAITING_FOR_PROMPTS)
        while not self.stopped and self.pipe.poll(IDLE_POLL_S if is_idle else 0):
            message = self.pipe.recv()
            is_idle = False
            if isinstance(message, Submit):
                self.enqueue(message)
            elif isinstance(message, Abort):
                self.abort(message.group_id)
            elif isinstance(message, Continue):
                self.go_on(message)
            else:
                self.stopped = True

    def look_at_version(self) -> None:
        if not self.engine.is_behind or (self.is_pinned and self.engine.version >= 0):
            return
        self.board.enter(State.RELOADING, behind=self.engine.version)
        self.board.add(Total.RELOAD_S, self.engine.reload())
        self.board.add(Total.RELOADS, 1)
        if self.config.rollout.on_update == "recompute":
            self.recomputing = set(self.running)
        self.board.serving(self.engine.version, len(self.running))

    def enqueue(self, submit: Submit) -> None:
        if submit.seed is not None:
            self.engine.reseed(submit.seed)
            self.expected = ExpectedLength(self.config.rollout.max_new_tokens)  # nothing remembered
        if any(group.is_eval for group in submit.groups):
            self.look_at_version()  # pins the newest version there is, or the one that is pinned
            self.pipe.send(Pinned(self.engine.version))
        for group in submit.groups:
            for index in range(len(group.cells)):
                self.queue(Request(group, index))

    def queue(self, request: Request) -> None:
        if request.group.is_eval:
            self.waiting_eval.append((self.next_key, request))
        else:
            heapq.heappush(self.waiting, (request.group.group_id, self.next_key, request))
        self.next_key += 1

    def go_on(self, message: Continue) -> None:
        for group_id, place, tokens in message.replies:
            request = self.parked.pop((group_id, place), None)
            if request is None:  # its group was given up in the meantime
                continue
            if tokens:
                request.append_reply(tokens)
                self.queue(request)
            else:
                self.expected.saw(len(request.tokens))

    def has_room(self) -> bool:
        """For one more sequence, and for the KV of all at their expected lengths. With less room
        vLLM would throw running sequences out and compute their KV again later.
        """
        if len(self.running) >= self.config.rollout.max_num_seqs:
            return False
        written = self.expected.tokens * (len(self.running) + 1)
        return not self.running or self.num_prompt_tokens + written <= self.engine.kv_tokens

    def next_waiting(self) -> tuple[int, int, Request]:
        """(vLLM's priority, key, request) of the one that is to run next."""
        share = max(1, int(EVAL_SHARE * self.config.rollout.max_num_seqs))
        if self.waiting_eval and (self.num_running_eval < share or not self.waiting):
            key, request = self.waiting_eval.popleft()
            return EVAL_PRIORITY, key, request
        return heapq.heappop(self.waiting)

    def admit(self) -> None:
        while (self.waiting or self.waiting_eval) and self.has_room():
            priority, key, request = self.next_waiting()
            try:
                prompt = request.group.prompt
                if request.tokens:
                    prompt = (*prompt, *request.tokens)
                self.engine.add(key, prompt, self.sampling(request), priority)
            except ValueError as refusal:
                self.forget(request.group.group_id)
                self.pipe.send(Gone(request.group.group_id, str(refusal).splitlines()[0]))
                continue
            self.begin(key, request)
        self.board.serving(self.engine.version, len(self.running))

    def begin(self, key: int, request: Request) -> None:
        group = request.group
        self.running[key] = request
        self.num_running_eval += group.is_eval
        if self.board.tracer is not None:
            self.board.tracer.begin_sequence(key)
        self.num_prompt_tokens += 0 if self.num_running[group.group_id] else len(group.prompt)
        self.num_running[group.group_id] += 1

    def leave(self, key: int) -> Request:
        request = self.running.pop(key)
        group = request.group
        self.num_running_eval -= group.is_eval
        self.recomputing.discard(key)
        if self.board.tracer is not None:
            self.board.tracer.end_sequence(key, group.group_id, facts_of(request))
        self.num_running[group.group_id] -= 1
        if not self.num_running[group.group_id]:
            del self.num_running[group.group_id]
            self.num_prompt_tokens -= len(group.prompt)
        return request

    def sampling(self, request: Request) -> Sampling:
        rollout = self.config.rollout
        room = rollout.max_new_tokens - len(request.tokens)
        if request.group.is_eval:
            return Sampling(room, self.config.eval.temperature)
        return Sampling(
            room,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.min_p,
        )

    def step(self) -> None:
        finished, ended = [], []
        num_tokens = 0
        version = self.engine.version
        for chunk in self.engine.step():
            request = self.running[chunk.key]
            request.tokens.extend(chunk.tokens)
            request.logprobs.extend(chunk.logprobs)
            request.versions.extend([version] * len(chunk.tokens))
            num_tokens += len(chunk.tokens)
            if self.recomputing:
                self.recomputing.discard(chunk.key)
            if chunk.stop is not None:
                self.leave(chunk.key)
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
            self.pipe.send(Finished(tuple(finished)))
        if ended:
            self.pipe.send(TurnEnded(tuple(ended)))

    def seal(self, request: Request, stop: StopReason) -> tuple[int, int, Trajectory]:
        group, cell = request.group, request.group.cells[request.index]
        self.ring.write(
            cell,
            group.group_id,
            group.prompt,
            request.tokens,
            request.logprobs,
            request.versions,
        )
        descriptor = Trajectory(
            cell=cell,
            length=len(group.prompt) + len(request.tokens),
            num_written=len(request.tokens) - request.num_replied,
            stop=stop,
            head_version=request.versions[0],
            tail_version=request.versions[-1],
            num_replied=request.num_replied,
            num_turns=request.num_turns,
        )
        return group.group_id, request.index, descriptor

    def abort(self, group_id: int) -> None:
        """Always answered, so that the controller knows when the cells are free."""
        self.forget(group_id)
        self.pipe.send(Gone(group_id, ""))

    def forget(self, group_id: int) -> None:
        keys = [key for key, r in self.running.items() if r.group.group_id == group_id]
        self.engine.abort(keys)
        for key in keys:
            self.leave(key)
        self.waiting = [entry for entry in self.waiting if entry[2].group.group_id != group_id]
        heapq.heapify(self.waiting)
        left = [entry for entry in self.waiting_eval if entry[1].group.group_id != group_id]
        self.waiting_eval = deque(left)
        self.parked = {at: request for at, request in self.parked.items() if at[0] != group_id}


def facts_of(request: Request) -> dict[str, object]:
    """For the timeline."""
    return {
        "place": request.index,
        "tokens": len(request.tokens),
        "versions": [request.versions[0], request.versions[-1]] if request.versions else [],
        **({"evaluation": True} if request.group.is_eval else {}),
    }


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
    config = setup.config
    if setup.dialogue is not None:  # its stop texts end a turn, the recipe's too
        stop = (*config.rollout.stop, *setup.dialogue.stop)
        config = replace(config, rollout=replace(config.rollout, stop=stop))
    engine = Engine(config, setup.folder, setup.kind, setup.store, setup.seed)
    if setup.store is not None:
        board.enter(State.RELOADING)
        engine.reload()  # waits for the trainer's first version
    pipe.send(Started())
    has_turns = setup.dialogue is not None
    worker = RolloutWorker(config, engine, setup.ring, board, pipe, has_turns)
    worker.loop()
    engine.shutdown()
