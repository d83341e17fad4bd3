"""What becomes of groups, steps and versions when a worker is lost: the other half of the loop.

    verifier   its reward is blamed and the group dropped, unless it was killed from outside: then
               the group is graded once more.
    engine     its groups are dropped and their prompts put back; an evaluation begins again.
    ranks      start again from the last checkpoint, and the buffer goes on. What they trained since
               is put back, its steps and metrics are taken back, and its groups count as dropped.

Takes verdicts from faults.py. Leaves out: who may come back, and when.
"""

from collections import Counter
from dataclasses import asdict, dataclass

from minirl.buffer import Buffer, Drop, Ticket
from minirl.config import Config
from minirl.conversations import Conversations
from minirl.errors import MinirlError, Stalled, WorkerDied
from minirl.evaluation import Evaluation, is_evaluation
from minirl.faults import Faults
from minirl.records import Batch, Prompt, Trajectory
from minirl.rollout.dispatch import Dispatcher
from minirl.rollout.worker import Abort
from minirl.run_log import RunLog
from minirl.shm.board import State
from minirl.tasks.grading import GradingQueue
from minirl.tasks.prompts import PromptStream
from minirl.tasks.verifier import Ask, Grade
from minirl.workers import Died, Fleet, Role, Worker

MAX_LOSSES = 5  # of one prompt with its engine: then the prompt is taken for the cause
FROM_OUTSIDE = ("SIGKILL", "without a sign of life")  # no reward ends so by itself


@dataclass
class Sampling:
    """A group at an engine: the trajectories that are done, by their place in the group."""

    engine: int
    prompt: Prompt
    done: dict[int, Trajectory]
    is_aborting: bool = False
    why: Drop = Drop.STALE  # it is aborted


class Recovery:
    """What the loop has that a loss concerns."""

    config: Config
    fleet: Fleet
    log: RunLog
    buffer: Buffer
    stream: PromptStream
    faults: Faults
    dispatcher: Dispatcher
    grading: GradingQueue
    conversations: Conversations
    engines: list[Worker]
    ranks: list[Worker]
    verifiers: dict[str, Worker]
    up: set[str]
    sampling: dict[int, Sampling]
    evaluation: Evaluation | None
    batch: Batch | None
    step: int
    saved_step: int
    is_saving: bool
    last_news: float
    awaits: str

    def __init__(self) -> None:
        self.since_saved: list[
            tuple[int, list[Ticket]]
        ] = []  # trained since the checkpoint, by step
        self.given_up: set[int] = set()  # groups that a trainer's death made too old
        self.tried_again: set[int] = set()  # groups whose verifier was killed
        self.num_losses: Counter[int] = Counter()  # of a prompt, with its engine

    def drop(self, group_id: int, reason: Drop) -> None:
        raise NotImplementedError

    def forget(self, ticket: Ticket, is_lost: bool = False) -> None:
        raise NotImplementedError

    def reward_failed(self, request: Grade | Ask, place: int, reason: Drop, why: str) -> None:
        raise NotImplementedError

    def end_evaluation_when_done(self) -> None:
        raise NotImplementedError

    # -- deaths

    def on_death(self, worker: Worker, death: Died) -> None:
        if worker.role is Role.TRAIN:
            worker, death = next(iter(self.fleet.causes(self.ranks)), (worker, death))
        if death.is_final:
            raise MinirlError(f"{worker.name}: {death.how}{self.saved_batch(worker, death)}")
        if self.fleet.board.row(worker.row).state is State.GRADING:
            self.faults.restarts.proved(worker.name)  # a reward took it down, and that is data
        delay_s = self.faults.verdict(worker, death, worker.name in self.up)
        self.up.discard(worker.name)
        if worker.role is Role.TRAIN:
            self.go_back(delay_s)
        elif worker.role is Role.VERIFY:
            place = self.fleet.board.row(worker.row).running  # what it was grading
            self.fleet.replace(worker, delay_s)
            self.on_verifier_death(worker, death, place)
        else:
            self.fleet.replace(worker, delay_s)
            self.on_engine_death(worker)

    def saved_batch(self, worker: Worker, death: Died) -> str:
        """Where an engine does not run the weights that it should (rule 6), or a step spoiled the
        trainer's: the batch in training, if there is one, and the weights that it began with."""
        if self.batch is None and (worker.role is not Role.ROLLOUT or not self.step):
            return ""
        batch = self.batch or Batch(self.step, self.buffer.version, ())
        return self.log.save_bad(batch, batch.version, death.how)

    def on_verifier_death(self, verifier: Worker, death: Died, place: int) -> None:
        """Whoever kills a verifier from outside proves nothing about a reward: it is tried again,
        once. Any other death is the reward's."""
        request = self.grading.done(verifier.name)
        if request is None:
            return
        is_outside = any(sign in death.how for sign in FROM_OUTSIDE)
        if is_outside and request.group_id not in self.tried_again:
            self.tried_again.add(request.group_id)
            self.grading.add(request)
        else:
            why = f"its verifier {death.how}"
            self.reward_failed(request, place, Drop.REWARD_ERROR, why)

    def on_engine_death(self, engine: Worker) -> None:
        self.conversations.lost(engine.rank)
        lost = [id for id in self.dispatcher.lost(engine.rank) if is_evaluation(id)]
        # Not by the dispatcher: it no longer knows of a group that was done but being aborted.
        for group_id, group in list(self.sampling.items()):
            if group.engine == engine.rank:
                del self.sampling[group_id]
                self.num_losses[group.prompt.index] += 1
                is_deadly = self.num_losses[group.prompt.index] >= MAX_LOSSES
                self.drop(group_id, Drop.REFUSED if is_deadly else Drop.WORKER_DIED)
        if self.evaluation is not None:
            self.evaluation.engine_died(engine.rank, len(lost))
            self.end_evaluation_when_done()

    def go_back(self, delay_s: float) -> None:
        """The ranks start again from the last checkpoint, and the buffer goes on. What they trained
        since is put back, like the batch they were at, and its steps and metrics are taken back.
        Groups that their new version makes too old are given up, and put back too."""
        back = self.faults.restart_ranks(self.step, delay_s)
        self.up -= {rank.name for rank in self.ranks}
        for ticket in self.buffer.training_failed():
            self.forget(ticket, is_lost=True)
        lost = [t for step, tickets in self.since_saved if step > back.step for t in tickets]
        for ticket in lost:
            self.stream.put_back(ticket.prompt_index)
        for group_id in self.buffer.rolled_back(back.version, len(lost)):
            self.give_up(group_id)
        self.log.steps_redone += self.step - back.step
        self.log.note(
            f"going back from step {self.step} to {back.step}: its weights are version "
            f"{back.version} now; {self.buffer.num_in_flight - len(self.given_up)} groups go on"
        )
        self.log.roll_back(back.step)
        if self.evaluation is not None and self.evaluation.step > back.step:
            self.evaluation.is_given_up = True
        self.step = self.saved_step = back.step
        self.since_saved, self.batch, self.is_saving = [], None, False

    def give_up(self, group_id: int) -> None:
        """Its cells may still be written or read: the slot is free when nobody does so any more."""
        self.given_up.add(group_id)
        if self.buffer.is_ready(group_id):
            self.drop(group_id, Drop.WORKER_DIED)
        elif (group := self.sampling.get(group_id)) is not None and not group.is_aborting:
            group.is_aborting = True
            self.engines[group.engine].send(Abort(group_id))

    # -- the watch

    def watch(self) -> None:
        """Rule 8. A reward that hangs costs its verifier, an engine or a verifier that is frozen is
        replaced, and anything else that stands still ends the run."""
        if not self.faults.is_time_to_look():
            return
        for name, verifier in self.verifiers.items():
            row = self.fleet.board.row(verifier.row)
            late = row.state is State.GRADING and row.since_s > self.config.tasks.timeout_s
            if late and self.grading.is_busy(name):
                request = self.grading.done(name)
                assert request is not None
                self.fleet.replace(verifier)
                limit = f"took longer than tasks.timeout_s = {self.config.tasks.timeout_s:g}"
                self.reward_failed(request, row.running, Drop.REWARD_TIMEOUT, limit)
        for worker, death in self.faults.frozen():
            if worker.role is Role.TRAIN:
                raise self.faults.stall(f"{worker.name} {death.how}", self.facts)
            self.faults.report(f"{worker.name} {death.how}", self.facts)
            try:
                self.on_death(worker, death)
            except WorkerDied as error:
                raise Stalled(str(error)) from None
        still_s = self.faults.still_s(self.last_news)
        if still_s > self.config.log.stall_s:
            why = f"nothing has moved for {still_s:.0f} s, and every worker waits"
            raise self.faults.stall(why, self.facts)

    @property
    def facts(self) -> dict[str, object]:
        """What is where: for a person who must find out why nothing moves."""
        buffer, ledger = self.buffer, self.buffer.ledger
        trains = f"trains step {self.batch.step}" if self.batch else "has no batch"
        starting = [w.name for w in self.engines + self.ranks if w.name not in self.up]
        return {
            "controller": f"step {self.step}, waiting for {self.awaits}",
            "slots": f"{buffer.num_running} running, {buffer.num_ready} ready, "
            f"{ledger.in_flight - buffer.num_running - buffer.num_ready} in training, "
            f"{buffer.num_free} free of {buffer.num_slots}; {len(self.given_up)} given up",
            "ledger": ", ".join(f"{name} {count}" for name, count in asdict(ledger).items()),
            "grading": f"{len(self.grading)} groups wait or are graded",
            "trainer": "saving" if self.is_saving else trains,
            "evaluation": "none" if self.evaluation is None else "under way",
            "starting": ", ".join(starting) or "nobody",
        }
