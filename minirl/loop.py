"""Read this first. The controller: one loop that never stops, and loads no model.

                     prompts                          finished trajectories (shared memory)
   tasks ──► controller ──► rollout workers (vLLM) ──► verifiers ──► buffer ──► trainer ranks (DDP)
                 ▲                 ▲                                                │
                 │                 └────── weights, version n+1 (shared memory) ◄───┘
                 └── slots come back when version n+1 is published

Each turn of the loop:

    feed      while the buffer has slots, send prompts to the rollout workers
    collect   hear what workers say: trajectories to grade, rewards, published versions, deaths
    learn     when the trainer is free and a batch is ready, send it

The controller sends and hears only small descriptors; tokens and weights stay in shared memory.
At η = 0 the same loop is synchronous: a batch is fed only when nothing runs, and evaluations have
the engines to themselves, so that one seed gives one run.

Leaves out: the bound on staleness (buffer.py), what is done about workers that die or freeze
(recovery.py, faults.py), who runs where (launch.py), the looks (console.py).
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from minirl.buffer import Buffer, Drop, Ticket
from minirl.config import Config
from minirl.conversations import Conversations
from minirl.evaluation import Evaluation, is_evaluation
from minirl.faults import RANKS, Faults
from minirl.metrics import Guard
from minirl.recipe import to_toml
from minirl.records import Prompt, Trajectory
from minirl.recovery import Recovery, Sampling
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import (
    Abort,
    Finished,
    Gone,
    GroupRequest,
    Pinned,
    Started,
    Submit,
    TurnEnded,
)
from minirl.run_log import RunLog
from minirl.shm.board import Total
from minirl.tasks.grading import GradingQueue
from minirl.tasks.prompts import PromptStream
from minirl.tasks.rewards import filter_group
from minirl.tasks.verifier import Ask, Grade, Graded, Replied
from minirl.train.messages import CheckpointState, Ready, Save, Saved, Train, Trained
from minirl.workers import Died, Fleet, Role, Worker

LISTEN_S = 0.2  # how long a turn waits for news at most
LEAST_BUSY_S = 0.5


class Speedometer:
    """Tokens a second of each engine while it had something to do, since the last look."""

    def __init__(self, fleet: Fleet, engines: list[Worker]):
        self._board, self._rows = fleet.board, [engine.row for engine in engines]
        self._before = [self._look(row) for row in self._rows]

    def _look(self, row: int) -> tuple[float, float]:
        idle_s = self._board.total(row, Total.IDLE_S)
        return self._board.total(row, Total.TOKENS), time.monotonic() - idle_s

    def read(self) -> Iterator[tuple[int, float]]:
        for engine, row in enumerate(self._rows):
            (tokens, busy_s), before = self._look(row), self._before[engine]
            if busy_s - before[1] > LEAST_BUSY_S:  # less says nothing
                self._before[engine] = (tokens, busy_s)
                yield engine, max(1.0, (tokens - before[0]) / (busy_s - before[1]))


class Loop(Recovery):
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        stream: PromptStream,
        heldout: list[Prompt],
        buffer: Buffer,
        log: RunLog,
    ):
        super().__init__()
        self.config, self.fleet, self.stream, self.heldout = config, fleet, stream, heldout
        self.buffer, self.log = buffer, log
        self.engines, self.ranks = fleet.of(Role.ROLLOUT), fleet.of(Role.TRAIN)
        self.verifiers = {worker.name: worker for worker in fleet.of(Role.VERIFY)}
        self.dispatcher = Dispatcher(len(self.engines), config.rollout.max_new_tokens)
        self.speedometer = Speedometer(fleet, self.engines)
        self.grading = GradingQueue()
        self.conversations = Conversations(
            config, self.dispatcher, self.grading, in_step=config.is_synchronous
        )
        self.guard = Guard(config.train.num_minibatches)
        self.faults = Faults(config, fleet, log)
        self.step = self.saved_step = log.step
        self.has_begun = False  # all workers are up
        self.is_interrupted = False  # set from outside: finish the step, save, end
        self.wants_save = False  # set from outside: save a checkpoint when the trainer is free
        self.up = set()  # engines and ranks that have started
        self.sampling = {}
        self.prompts: dict[int, Prompt] = {}  # of groups that are not trained or dropped yet
        self.batch = None  # in training
        self.evaluation = None
        self.evaluated_version = 0
        self.is_evaluation_due = False  # again, after the batch that is in training
        self.is_saving = False
        self.unsaved = ""  # why the last checkpoint could not be written
        self.has_finished = False
        self.last_news = self.last_saved = time.monotonic()
        self.awaits = ""

    def run(self) -> None:
        num_all = len(self.engines + self.ranks)
        self.wait_for("workers to start", lambda: len(self.up) == num_all or self.is_interrupted)
        if len(self.up) < num_all:
            return  # interrupted: there is nothing to save
        self.has_begun = True
        self.log.begin()
        if self.log.wants_evaluation:
            self.start_evaluation()
        while self.goes_on or not self.has_finished:  # again where a trainer goes back at the end
            self.awaits = "groups and steps"
            while self.goes_on:
                self.feed()
                self.collect()
                self.learn()
            self.finish()

    @property
    def goes_on(self) -> bool:
        return self.step < self.config.train.steps and not self.is_interrupted

    def finish(self) -> None:
        """The checkpoint first: the last evaluation may take long, and is done again on resume."""
        self.wait_for("the running step", lambda: self.batch is None)
        if not self.is_interrupted:
            self.wait_for("evaluation", lambda: self.evaluation is None)
            if not self.goes_on and not self.log.is_evaluated(self.step):
                self.start_evaluation()
        if self.saved_step != self.step:
            self.save()
        self.wait_for("the checkpoint", lambda: not self.is_saving)
        if not self.is_interrupted:
            self.wait_for("the last evaluation", lambda: self.evaluation is None)
        self.has_finished = True

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        self.log.note(f"waiting for {what}")
        self.awaits = what
        while not is_there():
            self.collect()

    # -- feed

    def feed(self) -> None:
        """Begins as many groups as the buffer says, of those that the rest of the run needs."""
        if self.config.is_synchronous and (self.evaluation or self.is_saving):
            return
        if not self.ranks_are_up:  # engines still serve weights that were given up
            return
        needed = (self.config.train.steps - self.step) * self.buffer.batch_size
        requests: dict[int, list[GroupRequest]] = defaultdict(list)
        oldest_served = min(self.version_served_by(i) for i in range(len(self.engines)))
        for _ in range(self.buffer.num_to_begin(needed)):
            if not self.buffer.can_admit(oldest_served):
                break
            prompt = self.stream.next()
            if len(prompt.tokens) <= self.config.tasks.max_prompt_tokens:
                engine, request = self.admit(prompt)
                requests[engine].append(request)
            else:
                ticket = self.buffer.admit(prompt.index, self.buffer.version)
                self.drop(ticket.group_id, Drop.TOO_LONG)
        self.submit(requests)

    def submit(self, requests: dict[int, list[GroupRequest]]) -> None:
        """One message an engine, so that a synchronous engine begins with all it will get."""
        for engine, groups in requests.items():
            self.engines[engine].send(Submit(tuple(groups), self.seed(engine, groups[0].group_id)))

    def seed(self, engine: int, group_id: int) -> int | None:
        """Fixed at η = 0, where a run can be repeated; elsewhere engines just go on drawing. By the
        prompt, not by the group: a step that is done again has new groups of the same prompts."""
        if not self.config.is_synchronous:
            return None
        first = group_id if is_evaluation(group_id) else self.prompts[group_id].index
        return random.Random(f"{self.config.seed}/{self.step}/{first}/{engine}").getrandbits(31)

    @property
    def ranks_are_up(self) -> bool:
        return all(rank.name in self.up for rank in self.ranks)

    def admit(self, prompt: Prompt) -> tuple[int, GroupRequest]:
        size = self.config.rollout.group_size
        engine = self.dispatcher.assign(self.buffer.next_id, size)
        bound = self.version_served_by(engine)
        ticket = self.buffer.admit(prompt.index, bound, time.monotonic())
        self.prompts[ticket.group_id] = prompt
        self.sampling[ticket.group_id] = Sampling(engine, prompt, {})
        cells = tuple(range(ticket.slot * size, (ticket.slot + 1) * size))
        return engine, GroupRequest(ticket.group_id, prompt.tokens, cells)

    def version_served_by(self, engine: int) -> int:
        """New groups begin under the newest weights, except where an evaluation pins older ones."""
        served = self.fleet.board.row(self.engines[engine].row).version
        if self.evaluation is None or served < 0:
            return self.buffer.version
        return min(served, self.buffer.version)

    # -- collect

    def collect(self) -> None:
        for worker, message in self.fleet.hear(LISTEN_S):
            self.last_news = time.monotonic()
            match message:
                case Started() | Ready():
                    self.up.add(worker.name)
                case Finished():
                    self.faults.restarts.proved(worker.name)
                    for group_id, place, trajectory in message.trajectories:
                        self.on_trajectory(group_id, place, trajectory)
                case TurnEnded():
                    for group_id, place, trajectory in message.trajectories:
                        self.on_turn(group_id, place, trajectory)
                case Pinned():
                    if self.evaluation is not None:
                        self.evaluation.pinned(worker.rank, message.version)
                case Gone():
                    self.on_gone(message)
                case Graded():
                    self.on_graded(worker, message)
                case Replied():
                    self.on_reply(worker, message)
                case Trained():
                    self.on_trained(message)
                case Saved():
                    self.on_saved(message)
                case Died():
                    self.on_death(worker, message)
        for engine, replies in self.conversations.outgoing():
            self.engines[engine].send(replies)
        for name, request in self.grading.assign(self.verifiers):
            self.verifiers[name].send(request)
        self.watch()

    def on_trajectory(self, group_id: int, place: int, trajectory: Trajectory) -> None:
        self.dispatcher.trajectory_done(group_id, trajectory.num_written)
        if is_evaluation(group_id):
            assert self.evaluation is not None
            self.evaluation.answered(trajectory)
            prompt = self.evaluation.prompt(group_id)
            self.grading.add(Grade(group_id, prompt.example, (trajectory,)))
            return
        group = self.sampling[group_id]
        group.done[place] = trajectory
        if len(group.done) == self.config.rollout.group_size and not group.is_aborting:
            del self.sampling[group_id]
            in_order = tuple(group.done[i] for i in range(len(group.done)))
            limit = self.config.tasks.max_failures
            self.grading.add(Grade(group_id, group.prompt.example, in_order, limit))

    def on_turn(self, group_id: int, place: int, trajectory: Trajectory) -> None:
        if is_evaluation(group_id):
            assert self.evaluation is not None
            example = self.evaluation.prompt(group_id).example
        elif self.sampling[group_id].is_aborting:
            return
        else:
            example = self.sampling[group_id].prompt.example
        self.conversations.ask(group_id, place, example, trajectory)

    def on_reply(self, verifier: Worker, replied: Replied) -> None:
        self.faults.restarts.proved(verifier.name)
        request = self.grading.done(verifier.name)
        assert isinstance(request, Ask) and request.group_id == replied.group_id
        if replied.error:
            self.reply_failed(request, Drop.REPLY_ERROR, replied.error)
        elif self.conversations.is_awaited(request):
            ended = self.conversations.reply(request, replied.tokens)
            if ended is not None:
                self.on_trajectory(request.group_id, request.place, ended)

    def reply_failed(self, request: Ask, reason: Drop, why: str) -> None:
        """Its group is dropped when the engine has let go of it (`on_gone`)."""
        group_id, engine = request.group_id, self.dispatcher.worker_of(request.group_id)
        group = self.sampling.get(group_id)  # none: an evaluation's
        if not self.conversations.is_awaited(request) or (group and group.is_aborting):
            return
        self.log.note(f"no reply for group {group_id} ({reason}): {why}")
        self.conversations.forget(group_id)
        if group is not None:
            group.is_aborting, group.why = True, reason
        assert engine is not None
        self.engines[engine].send(Abort(group_id))

    def on_gone(self, gone: Gone) -> None:
        """An engine gave a group up: because it was asked to, or because it would not take it."""
        self.dispatcher.forget(gone.group_id)
        self.conversations.forget(gone.group_id)
        if is_evaluation(gone.group_id):
            assert self.evaluation is not None
            self.evaluation.failed()
            self.end_evaluation_when_done()
        else:
            group = self.sampling.pop(gone.group_id, None)
            if group is None:
                return  # a refusal and an abort have crossed: it was told before
            self.drop(gone.group_id, Drop.REFUSED if gone.why else group.why)
        if gone.why:
            self.log.note(f"the engine refused group {gone.group_id}: {gone.why}")

    def on_graded(self, verifier: Worker, graded: Graded) -> None:
        self.faults.restarts.proved(verifier.name)
        request = self.grading.done(verifier.name)
        assert isinstance(request, Grade) and request.group_id == graded.group_id
        if not graded.rewards:
            self.no_reward(request, Drop.REWARD_ERROR, graded.error)
        elif is_evaluation(request.group_id):
            assert self.evaluation is not None
            assert graded.rewards[0] is not None
            self.evaluation.texts[request.group_id] = graded.texts[0]
            self.evaluation.graded(request.group_id, graded.rewards[0])
            self.end_evaluation_when_done()
        else:
            self.on_rewards(request, graded)

    def on_rewards(self, request: Grade, graded: Graded) -> None:
        if request.group_id in self.given_up:
            self.drop(request.group_id, Drop.WORKER_DIED)
            return
        prompt = self.prompts[request.group_id]
        ticket = (request.group_id, prompt.index)
        group = filter_group(self.config, ticket, request.trajectories, graded.rewards)
        if isinstance(group, Drop):
            self.drop(request.group_id, group)
            return
        pairs = zip(graded.texts, graded.rewards, strict=True)
        texts = tuple(text for text, reward in pairs if reward is not None)
        self.log.keep_texts(request.group_id, prompt, texts)
        self.buffer.finish(group, time.monotonic())

    def reward_failed(self, request: Grade | Ask, place: int, reason: Drop, why: str) -> None:
        """One reward took its verifier down: the rest is graded again, if one more may fail."""
        if isinstance(request, Ask):
            is_late = reason is Drop.REWARD_TIMEOUT
            self.reply_failed(request, Drop.REPLY_TIMEOUT if is_late else Drop.REPLY_ERROR, why)
            return
        skip = (*request.skip, place)
        if len(skip) > request.max_failures:
            self.no_reward(request, reason, why)
        else:
            self.log.note(f"no reward for one answer of group {request.group_id}: {why}")
            self.grading.add(replace(request, skip=skip))

    def no_reward(self, request: Grade, reason: Drop, why: str) -> None:
        """Rule 7: a verifier that fails is never a reward of 0."""
        self.log.note(f"no reward for group {request.group_id} ({reason}): {why}")
        if is_evaluation(request.group_id):
            assert self.evaluation is not None
            self.evaluation.failed()
            self.end_evaluation_when_done()
        else:
            self.drop(request.group_id, reason)

    def drop(self, group_id: int, reason: Drop) -> None:
        """For good, unless a fault did it: then the prompt is given again under a new group id."""
        if group_id in self.given_up:
            reason = Drop.WORKER_DIED
        self.forget(self.buffer.drop(group_id, reason), is_lost=reason is Drop.WORKER_DIED)

    def forget(self, ticket: Ticket, is_lost: bool = False) -> None:
        self.prompts.pop(ticket.group_id, None)
        self.given_up.discard(ticket.group_id)
        self.tried_again.discard(ticket.group_id)
        self.log.forget_texts(ticket.group_id)
        if is_lost:
            self.stream.put_back(ticket.prompt_index)
        else:
            self.stream.consumed.add(ticket.prompt_index)

    # -- learn

    def learn(self) -> None:
        for group_id in self.buffer.expired():
            group = self.sampling.get(group_id)  # none: it is being graded and will be ready soon
            if group is not None and not group.is_aborting:
                group.is_aborting = True
                self.engines[group.engine].send(Abort(group_id))
        is_busy = self.batch is not None or self.is_saving or not self.ranks_are_up
        if is_busy or self.step >= self.config.train.steps:
            return
        if self.evaluation is not None and self.evaluation.pinning:
            return  # its version must stay the newest until every engine has it
        if self.wants_save:
            self.save()
            return
        for ticket in self.buffer.take_untrainable():
            self.forget(ticket)
        self.batch = self.buffer.next_batch(self.step + 1, time.monotonic())
        if self.batch is not None:
            for rank in self.ranks:
                rank.send(Train(self.batch))

    def on_trained(self, trained: Trained) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        self.step += 1
        if not self.config.is_synchronous:  # where what is measured must not decide what is done
            for engine, tokens_per_s in self.speedometer.read():
                self.dispatcher.measured(engine, tokens_per_s)
        is_last = self.step == self.config.train.steps
        self.faults.stepped(self.step)
        tickets = self.buffer.published(time.monotonic())
        self.since_saved.append((self.step, tickets))
        breaches = self.guard.judge(trained.values)
        self.log.trained(self.step, batch, trained, self.buffer, breaches)
        for ticket in tickets:
            self.forget(ticket)
        self.log.check(self.step, batch, trained, breaches)
        every = self.config.eval.every
        is_due = self.is_evaluation_due or (every and self.step % every == 0)
        if is_due and not is_last and self.evaluation is None:
            self.start_evaluation()
        every, every_s = self.config.checkpoint.every, self.config.checkpoint.every_s
        is_long_ago = 0 < every_s < time.monotonic() - self.last_saved
        if ((every and self.step % every == 0) or is_long_ago) and not is_last:
            self.save()

    def save(self) -> None:
        """Only the trainer stands still for it. What is evaluated now is evaluated again on resume,
        and what is in flight is not consumed: its prompts come again."""
        self.is_saving, self.wants_save = True, False
        in_flight = [p.index for p in self.prompts.values()] + self.stream.waiting
        state = CheckpointState(
            step=self.step,
            history=self.buffer.history,
            consumed_below=self.stream.consumed.below,
            consumed_above=tuple(sorted(self.stream.consumed.above)),
            in_flight=tuple(sorted(in_flight)),
            evaluating=self.evaluated_version if self.evaluation else None,
            totals=self.log.state(),
            recipe=to_toml(self.config),
        )
        folder = self.log.checkpoint_folder(self.step)
        for rank in self.ranks:
            rank.send(Save(str(folder), state, tuple(self.log.accuracies)))

    def on_saved(self, saved: Saved) -> None:
        """A checkpoint that could not be written costs nothing: the one before it stays, and the
        next save tries again."""
        self.is_saving, self.unsaved, self.last_saved = False, saved.error, time.monotonic()
        if saved.error:
            kept = self.log.last_checkpoint
            self.log.note(f"no checkpoint of step {self.step}: {saved.error}; {kept}")
        else:
            self.saved_step, self.since_saved = self.step, []
            self.faults.restarts.proved(RANKS)
            self.log.note(f"saved {saved.folder}")

    # -- evaluation

    def start_evaluation(self) -> None:
        """Of the newest version, by the engines that are up. evaluate.py says why it is one."""
        assert self.batch is None, "a version may be published at any moment"
        self.is_evaluation_due, self.evaluated_version = False, self.buffer.version
        size = self.config.rollout.group_size
        first_cell = self.buffer.num_slots * size
        self.evaluation = Evaluation(self.heldout, first_cell, self.step)
        up = [i for i, engine in enumerate(self.engines) if engine.name in self.up]
        requests: dict[int, list[GroupRequest]] = defaultdict(list)
        for group_id in self.evaluation.group_ids:
            prompt, cell = self.evaluation.prompt(group_id), self.evaluation.cell(group_id)
            engine = self.dispatcher.assign(group_id, 1, among=up)
            requests[engine].append(GroupRequest(group_id, prompt.tokens, (cell,), is_eval=True))
        self.evaluation.pinning |= requests.keys()
        self.submit(requests)

    def end_evaluation_when_done(self) -> None:
        assert self.evaluation is not None
        if not self.evaluation.is_done:
            return
        ended, self.evaluation = self.evaluation, None
        if ended.is_given_up:
            self.log.note(f"an evaluation was of version {ended.version}, which was given up")
            return
        if not ended.is_void:
            self.log.evaluated(ended)
            return
        self.log.note("the evaluation was not of one version, since a worker died: once more")
        if self.batch is None:
            self.start_evaluation()
        else:
            self.is_evaluation_due = True
