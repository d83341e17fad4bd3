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

Leaves out: the bound on staleness (buffer.py), who runs where (launch.py), the looks (console.py).
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from minirl.blackbox import Why
from minirl.buffer import Buffer, Drop, Ticket
from minirl.config import Config
from minirl.errors import MinirlError, Stalled, WorkerDied
from minirl.evaluate import Evaluation, is_evaluation
from minirl.filters import judge
from minirl.fleet import Died, Fleet, Role, Worker
from minirl.guard import CANARY, Guard
from minirl.journal import Journal
from minirl.records import Batch, Prompt, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import Abort, Finished, Gone, GroupRequest, Pinned, Started, Submit
from minirl.shm.board import State, Total
from minirl.tasks.grading import GradingQueue
from minirl.tasks.prompts import PromptStream
from minirl.tasks.verifier import Grade, Graded
from minirl.train.messages import Ready, Save, Saved, Train, Trained

LISTEN_S = 0.2  # how long a turn waits for news at most
START_LIMIT_S = 1800.0  # loading a large model and capturing graphs takes its time
LEAST_BUSY_S = 0.5
MAX_STARTS = 4  # of one worker; then it ends the run


@dataclass
class Sampling:
    """A group at an engine: the trajectories that are done, by their place in the group."""

    engine: int
    prompt: Prompt
    done: dict[int, Trajectory]
    is_aborting: bool = False


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


class Loop:
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        stream: PromptStream,
        heldout: list[Prompt],
        buffer: Buffer,
        journal: Journal,
    ):
        self.config, self.fleet, self.stream, self.heldout = config, fleet, stream, heldout
        self.buffer, self.journal = buffer, journal
        self.engines, self.ranks = fleet.of(Role.ROLLOUT), fleet.of(Role.TRAIN)
        self.verifiers = {worker.name: worker for worker in fleet.of(Role.VERIFY)}
        self.dispatcher = Dispatcher(len(self.engines), config.rollout.max_new_tokens)
        self.speedometer = Speedometer(fleet, self.engines)
        self.grading = GradingQueue()
        self.guard = Guard(config)
        self.step = journal.step
        self.is_interrupted = False  # set from outside: finish the step, save, end
        self.wants_save = False  # set from outside: save a checkpoint when the trainer is free
        self.up: set[str] = set()  # engines and ranks that have started
        self.sampling: dict[int, Sampling] = {}
        self.prompts: dict[int, Prompt] = {}  # of groups that are not trained or dropped yet
        self.batch: Batch | None = None  # in training
        self.evaluation: Evaluation | None = None
        self.is_evaluation_due = False  # again, after the batch that is in training
        self.is_saving = False
        self.unsaved = ""  # why the last checkpoint could not be written
        self.last_news = time.monotonic()

    def run(self) -> None:
        self.wait_for("workers to start", lambda: len(self.up) == len(self.engines + self.ranks))
        self.journal.begin()
        if self.journal.wants_first_evaluation:
            self.start_evaluation()
        while self.step < self.config.train.steps and not self.is_interrupted:
            self.feed()
            self.collect()
            self.learn()
        if self.is_interrupted:
            self.wait_for("the running step", lambda: self.batch is None)
        else:
            self.wait_for("evaluation", lambda: self.evaluation is None)
            self.start_evaluation()
            self.wait_for("the last evaluation", lambda: self.evaluation is None)
        self.save()
        self.wait_for("the checkpoint", lambda: not self.is_saving)

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        self.journal.note(f"waiting for {what}")
        while not is_there():
            self.collect()

    # -- feed

    def feed(self) -> None:
        """Begins as many groups as the buffer says, of those that the rest of the run needs."""
        if self.config.is_synchronous and (self.evaluation or self.is_saving):
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
        """Fixed at η = 0, where a run can be repeated; elsewhere engines just go on drawing."""
        if not self.config.is_synchronous:
            return None
        return random.Random(f"{self.config.seed}/{self.step}/{group_id}/{engine}").getrandbits(31)

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
                    for group_id, place, trajectory in message.trajectories:
                        self.on_trajectory(group_id, place, trajectory)
                case Pinned():
                    if self.evaluation is not None:
                        self.evaluation.pinned(worker.rank, message.version)
                case Gone():
                    self.on_gone(message)
                case Graded():
                    self.on_graded(worker, message)
                case Trained():
                    self.on_trained(message)
                case Saved():
                    self.on_saved(message)
                case Died():
                    self.on_death(worker, message)
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

    def on_gone(self, gone: Gone) -> None:
        """An engine gave a group up: because it was asked to, or because it would not take it."""
        self.dispatcher.forget(gone.group_id)
        if is_evaluation(gone.group_id):
            assert self.evaluation is not None
            self.evaluation.failed()
            self.end_evaluation_when_done()
        else:
            del self.sampling[gone.group_id]
            self.drop(gone.group_id, Drop.REFUSED if gone.why else Drop.STALE)
        if gone.why:
            self.journal.note(f"the engine refused group {gone.group_id}: {gone.why}")

    def on_graded(self, verifier: Worker, graded: Graded) -> None:
        request = self.grading.done(verifier.name)
        assert request is not None and request.group_id == graded.group_id
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
        prompt = self.prompts[request.group_id]
        ticket = (request.group_id, prompt.index)
        group = judge(self.config, ticket, request.trajectories, graded.rewards, graded.formed)
        if isinstance(group, Drop):
            self.drop(request.group_id, group)
            return
        pairs = zip(graded.texts, graded.rewards, strict=True)
        texts = tuple(text for text, reward in pairs if reward is not None)
        self.journal.keep_texts(request.group_id, prompt, texts)
        self.buffer.finish(group, time.monotonic())

    def reward_failed(self, request: Grade, place: int, reason: Drop, why: str) -> None:
        """One reward took its verifier down: the rest is graded again, if one more may fail."""
        skip = (*request.skip, place)
        if len(skip) > request.max_failures:
            self.no_reward(request, reason, why)
        else:
            self.journal.note(f"no reward for one answer of group {request.group_id}: {why}")
            self.grading.add(replace(request, skip=skip))

    def no_reward(self, request: Grade, reason: Drop, why: str) -> None:
        """Rule 7: a verifier that fails is never a reward of 0."""
        self.journal.note(f"no reward for group {request.group_id} ({reason}): {why}")
        if is_evaluation(request.group_id):
            assert self.evaluation is not None
            self.evaluation.failed()
            self.end_evaluation_when_done()
        else:
            self.drop(request.group_id, reason)

    def drop(self, group_id: int, reason: Drop) -> None:
        """For good, unless a fault did it: then the prompt is given again under a new group id."""
        self.forget(self.buffer.drop(group_id, reason), is_lost=reason is Drop.WORKER_DIED)

    def forget(self, ticket: Ticket, is_lost: bool = False) -> None:
        self.prompts.pop(ticket.group_id, None)
        self.journal.forget_texts(ticket.group_id)
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
        if self.batch is not None or self.is_saving or self.step >= self.config.train.steps:
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
        tickets = self.buffer.published(time.monotonic())
        self.journal.saw_ages(trained.ages)
        breaches = self.guard.judge(trained.values)
        values = {**trained.values, "guard/warnings": len(breaches)}
        self.journal.trained(self.step, batch, values, self.buffer, is_last)
        for ticket in tickets:
            self.forget(ticket)
        for note in trained.notes:
            self.journal.note(note)
        self.journal.breached(self.step, batch, values, breaches)
        every = self.config.checkpoint.every
        if every and self.step % every == 0 and not is_last:
            self.save()
        every = self.config.eval.every
        is_due = self.is_evaluation_due or (every and self.step % every == 0)
        if is_due and not is_last and self.evaluation is None:
            self.start_evaluation()

    def save(self) -> None:
        self.is_saving, self.wants_save = True, False
        state = {
            "step": self.step,
            "history": asdict(self.buffer.history),
            "consumed_below": self.stream.consumed.below,
            "consumed_above": sorted(self.stream.consumed.above),
            "journal": self.journal.state,
        }
        folder = self.journal.checkpoint_folder(self.step)
        for rank in self.ranks:
            rank.send(Save(str(folder), state))

    def on_saved(self, saved: Saved) -> None:
        """A checkpoint that could not be written costs nothing: the one before it stays, and the
        next save tries again."""
        self.is_saving, self.unsaved = False, saved.error
        if saved.error:
            kept = self.journal.last_checkpoint
            self.journal.note(f"no checkpoint of step {self.step}: {saved.error}; {kept}")
        else:
            self.journal.note(f"saved {saved.folder}")

    # -- evaluation

    def start_evaluation(self) -> None:
        """Of the newest version, by the engines that are up. evaluate.py says why it is one."""
        assert self.batch is None, "a version may be published at any moment"
        self.is_evaluation_due = False
        size = self.config.rollout.group_size
        self.evaluation = Evaluation(self.heldout, first_cell=self.buffer.num_slots * size)
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
        if not ended.is_void:
            self.journal.evaluated(ended)
            return
        self.journal.note("the evaluation was not of one version, since a worker died: once more")
        if self.batch is None:
            self.start_evaluation()
        else:
            self.is_evaluation_due = True

    # -- faults

    def on_death(self, worker: Worker, death: Died) -> None:
        if death.is_final:
            boxed = ""
            if worker.role is Role.ROLLOUT and self.step:  # rule 6: stale weights
                reason = Why(CANARY.name, self.step, death.how, remedy=CANARY.remedy)
                boxed = "; " + self.journal.black_box(reason, self.batch, self.buffer.version)
            raise MinirlError(f"{worker.name}: {death.how}{boxed}")
        if worker.role is Role.TRAIN:
            worker, death = self.first_to_die(worker, death)
        if self.fleet.board.row(worker.row).state is State.GRADING:
            worker.num_starts = 1  # it did start: a reward took it down, and that is data
        if worker.role is Role.TRAIN or worker.num_starts >= MAX_STARTS:
            self.journal.note(self.fleet.last_words(worker))
            raise WorkerDied(
                f"{worker.name} {death.how} (start {worker.num_starts}); {self.advice}"
            )
        self.journal.note(f"{worker.name} {death.how}: replaced")
        place = self.fleet.board.row(worker.row).running  # of a verifier: what it was grading
        self.fleet.replace(worker)
        if worker.role is Role.VERIFY:
            request = self.grading.done(worker.name)
            if request is not None:
                why = f"its verifier {death.how}"
                self.reward_failed(request, place, Drop.REWARD_ERROR, why)
            return
        self.up.discard(worker.name)
        lost = [id for id in self.dispatcher.lost(worker.rank) if is_evaluation(id)]
        # Not by the dispatcher: it no longer knows of a group that was done but being aborted.
        for group_id in [id for id, g in self.sampling.items() if g.engine == worker.rank]:
            del self.sampling[group_id]
            self.drop(group_id, Drop.WORKER_DIED)
        if self.evaluation is not None:
            self.evaluation.engine_died(worker.rank, len(lost))
            self.end_evaluation_when_done()

    def first_to_die(self, worker: Worker, death: Died) -> tuple[Worker, Died]:
        """A rank that is killed takes the others with it, and theirs may be heard first."""
        for rank in self.ranks:
            rank.process.join(1.0)
            if (rank.process.exitcode or 0) < 0:
                return rank, Died(self.fleet.how_it_ended(rank), is_final=False)
        return worker, death

    @property
    def advice(self) -> str:
        return f"its log is in {self.fleet.log_dir}; --resume goes on from the last checkpoint"

    def watch(self) -> None:
        """Rule 8. A reward that hangs costs its verifier; anything else that hangs ends the run."""
        now = time.monotonic()
        for name, verifier in self.verifiers.items():
            row = self.fleet.board.row(verifier.row)
            late = row.state is State.GRADING and row.since_s > self.config.tasks.timeout_s
            if late and self.grading.is_busy(name):
                request = self.grading.done(name)
                assert request is not None
                self.fleet.replace(verifier)
                limit = f"took longer than tasks.timeout_s = {self.config.tasks.timeout_s:g}"
                self.reward_failed(request, row.running, Drop.REWARD_TIMEOUT, limit)
        limit_s = self.config.log.stall_s
        for worker in self.engines + self.ranks:
            row = self.fleet.board.row(worker.row)
            is_waiting = row.state in (State.WAITING_FOR_BATCH, State.WAITING_FOR_PROMPTS)
            if row.beat_s > (START_LIMIT_S if row.state is State.STARTING else limit_s):
                if is_waiting and now - self.last_news <= limit_s:
                    continue
                self.journal.stalled(self.fleet, self.describe())
                raise Stalled(
                    f"{worker.name} has been {row.state.name.lower().replace('_', ' ')} without a "
                    f"sign of life for {row.beat_s:.0f} s; stacks are in the run directory"
                )

    def describe(self) -> dict[str, Any]:
        """What is where: for a person who must find out why nothing moves."""
        return {
            "step": self.step,
            "ledger": asdict(self.buffer.ledger),
            "running": self.buffer.num_running,
            "ready": self.buffer.num_ready,
            "grading": len(self.grading),
            "is_training": self.batch is not None,
            "evaluating": self.evaluation is not None,
        }
