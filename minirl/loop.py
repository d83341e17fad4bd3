"""Read this first. The controller: one loop that never stops, and loads no model.

                     prompts                          finished trajectories (shared memory)
   tasks ──► controller ──► rollout workers (vLLM) ──► verifiers ──► buffer ──► trainer ranks (DDP)
                 ▲                 ▲                                                │
                 │                 └────── weights, version n+1 (shared memory) ◄───┘
                 └── slots come back when version n+1 is published

Each turn of the loop:

    feed      while the buffer admits groups, send prompts to the rollout workers
    collect   receive what workers say: trajectories, rewards, published versions, deaths
    learn     when the trainer is free and a batch is ready, send it

The controller sends and receives only small descriptors; tokens and weights stay in shared memory.
At η = 0 the same loop is synchronous: a batch is fed only when nothing runs, and evaluations have
the engines to themselves, so that one seed gives one run.

Owns the step, the batch in training, and when to save and to evaluate. Leaves out: a group's life
(groups.py), the bound on staleness (buffer.py), deaths and freezes (supervisor.py), which process
runs where (launch.py).
"""

import time
from collections.abc import Callable
from typing import NoReturn

from minirl.buffer import Buffer
from minirl.config import Config
from minirl.errors import CannotTrain, MinirlError, RecipeError
from minirl.evaluation import Evaluation
from minirl.groups import Groups, Sends
from minirl.messages import CheckpointState, Role, Save, Saved, Train, Trained
from minirl.recipe import to_toml
from minirl.records import Batch, Prompt
from minirl.run_log import RunLog
from minirl.shm.board import State
from minirl.supervisor import RANKS, Supervisor
from minirl.tasks.prompts import PromptStream
from minirl.workers import Worker, Workers


class Loop:
    def __init__(
        self,
        config: Config,
        workers: Workers,
        stream: PromptStream,
        heldout: list[Prompt],
        buffer: Buffer,
        log: RunLog,
    ):
        self.config, self.workers, self.stream, self.heldout = config, workers, stream, heldout
        self.buffer, self.log = buffer, log
        self.engines, self.ranks = workers.of(Role.ROLLOUT), workers.of(Role.TRAIN)
        num_verifiers = len(workers.of(Role.VERIFY))
        self.groups = Groups(config, stream, buffer, len(self.engines), num_verifiers, log.note)
        self.supervisor = Supervisor(config, workers, self.groups, log, self)
        self.step = self.saved_step = log.step
        self.groups.saved(self.step)
        self.batch: Batch | None = None  # in training
        self.is_saving = False
        self.save_error = ""  # why the last checkpoint could not be written
        self.saved_s = time.monotonic()
        self.is_evaluation_due = False  # again, after the batch that is in training
        self.is_interrupted = False  # set from outside: finish the step, save, end
        self.wants_save = False  # set from outside: save a checkpoint when the trainer is free
        self.has_finished = False
        self.waiting_for = ""

    def run(self) -> None:
        self.wait_for("workers to start", lambda: self.is_ready or self.is_interrupted)
        if not self.is_ready:
            return  # interrupted: there is nothing to save
        self.log.begin()
        if self.log.wants_evaluation:
            self.start_evaluation()
        while not self.has_finished:
            self.waiting_for = "groups and steps"
            while self.has_steps_left:
                self.feed()
                self.collect()
                self.learn()
            self.finish()

    @property
    def is_ready(self) -> bool:
        """A box that was lost in the meantime joins later."""
        return all(worker.is_ready or worker.is_optional for worker in self.engines + self.ranks)

    @property
    def ranks_are_ready(self) -> bool:
        return all(rank.is_ready for rank in self.ranks)

    @property
    def has_steps_left(self) -> bool:
        return self.step < self.config.train.steps and not self.is_interrupted

    @property
    def is_whole(self) -> bool:
        """Else there is something left for a resume."""
        return self.step == self.config.train.steps and self.log.is_evaluated(self.step)

    def finish(self) -> None:
        """Saves before the last evaluation: that may take long, and is repeated on resume."""
        self.wait_for("the running step", lambda: self.batch is None)
        self.wait_for_evaluation("evaluation")
        is_due = not self.has_steps_left and not self.log.is_evaluated(self.step)
        if is_due and not self.is_interrupted:
            self.start_evaluation()
        self.save_last()
        self.wait_for_evaluation("the last evaluation")
        self.has_finished = not self.has_steps_left  # else a rank died, and took steps back

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        if not is_there():
            self.log.note(f"waiting for {what}")
        self.waiting_for = what
        while not is_there():
            self.collect()

    def wait_for_evaluation(self, what: str) -> None:
        self.wait_for(what, lambda: self.groups.evaluation is None or self.is_interrupted)

    # -- feed

    def feed(self) -> None:
        served = self.served()
        is_behind = any(version is not None and version < self.buffer.version for version in served)
        is_held = self.groups.evaluation or self.is_saving or is_behind
        if (is_held and self.config.is_synchronous) or not self.ranks_are_ready:
            return  # after a rollback engines still serve weights that are superseded
        needed = (self.config.train.steps - self.step) * self.buffer.batch_size
        try:
            sends = self.groups.begin(needed, served, self.step, time.monotonic())
        except RecipeError as error:  # of the task's own code
            self.abandon(str(error))
        self.workers.deliver(sends)

    def served(self) -> list[int | None]:
        """Under which version each engine would begin a group; None: it cannot."""
        newest, is_pinned = self.buffer.version, self.groups.evaluation is not None
        return [self.workers.served(engine, newest, is_pinned) for engine in self.engines]

    # -- collect

    def collect(self) -> None:
        self.supervisor.collect(self.handle)
        if (ended := self.groups.take_evaluation()) is not None:
            self.on_evaluated(ended)

    def handle(self, worker: Worker, message: object) -> Sends:
        if isinstance(message, Trained):
            self.on_trained(message)
        elif isinstance(message, Saved):
            self.on_saved(message)
        else:
            return self.groups.handle(worker.rank, message, time.monotonic())
        return []

    # -- learn

    def learn(self) -> None:
        self.workers.deliver(self.groups.expire())
        is_busy = self.batch is not None or self.is_saving or not self.has_steps_left
        if is_busy or not self.ranks_are_ready:
            return
        if self.groups.evaluation is not None and self.groups.evaluation.pinning:
            return  # its version must stay the newest until every engine has it
        if self.wants_save:
            self.save()
            return
        states = [self.workers.board.row(engine.row).state for engine in self.engines]
        if self.config.takes_turns and states != [State.SLEEPING]:
            return  # the trainer needs the engine's memory
        self.batch = self.groups.next_batch(self.step + 1, time.monotonic())
        if self.batch is not None:
            self.workers.deliver((rank.name, Train(self.batch)) for rank in self.ranks)
        elif fault := self.groups.drops.fault:
            self.abandon(fault)

    def on_trained(self, trained: Trained) -> None:
        """In this order: what reads cells of the batch comes before their slots are released."""
        assert self.batch is not None
        batch, self.batch = self.batch, None
        expected = self.buffer.version + 1
        if trained.version != expected:  # staleness would be counted wrongly: a bug of minirl
            raise MinirlError(f"rank 0 published version {trained.version} instead of {expected}")
        self.step += 1
        self.supervisor.stepped(self.step)
        self.groups.published(self.step, time.monotonic())
        self.log.trained(batch, trained, self.buffer, self.groups.states)
        self.groups.release()
        if self.step == self.config.train.steps:
            return  # `finish` saves and evaluates
        every = self.config.eval.every
        is_due = self.is_evaluation_due or (every and self.step % every == 0)
        if is_due and self.groups.evaluation is None:
            self.start_evaluation()
        elif is_due:  # nor later: evaluations in a row would hold half of each engine all the time
            why = "the last evaluation still runs: raise eval.every or lower eval.num_prompts"
            self.log.seldom.note("evaluation", f"step {self.step} is not evaluated, since {why}")
        every, every_s = self.config.checkpoint.every, self.config.checkpoint.every_s
        is_long_ago = 0 < every_s < time.monotonic() - self.saved_s
        if (every and self.step % every == 0) or is_long_ago:
            self.save()

    # -- checkpoints

    def save(self) -> None:
        """Only the trainer stands still for it. What is evaluated now is evaluated again on resume,
        and what is in flight is not consumed: its prompts are requeued."""
        self.is_saving, self.wants_save = True, False
        self.log.sync()
        state = CheckpointState(
            step=self.step,
            history=self.buffer.history,
            consumed_below=self.stream.consumed.below,
            consumed_above=tuple(sorted(self.stream.consumed.above)),
            in_flight=tuple(self.groups.prompts_in_flight),
            evaluating=self.groups.evaluation.version if self.groups.evaluation else None,
            recipe=to_toml(self.config),
        )
        folder = self.log.run_dir / "checkpoints" / f"step-{self.step:06d}"
        message = Save(str(folder), state, tuple(self.log.accuracies))
        self.workers.deliver((rank.name, message) for rank in self.ranks)

    def save_last(self) -> None:
        self.wait_for("the save under way", lambda: not self.is_saving)
        if self.saved_step != self.step:
            self.save()
            self.wait_for("the checkpoint", lambda: not self.is_saving)

    def abandon(self, why: str) -> NoReturn:  # what was trained is kept
        self.wait_for("the running step", lambda: self.batch is None)
        self.save_last()
        raise CannotTrain(f"{why}; {self.log.last_checkpoint}")

    def on_saved(self, saved: Saved) -> None:
        """A checkpoint that could not be written costs nothing: the last one stays, and the next
        save retries."""
        self.is_saving, self.save_error, self.saved_s = False, saved.error, time.monotonic()
        if saved.error:
            kept = self.log.last_checkpoint
            self.log.note(f"no checkpoint of step {self.step}: {saved.error}; {kept}")
        else:
            self.saved_step = self.step
            self.groups.saved(self.step)
            self.supervisor.deaths.pop(RANKS, None)
            self.log.note(f"saved {saved.folder}")

    # -- evaluation

    def start_evaluation(self) -> None:
        """Of the newest version, by the engines that are up and can have it (evaluation.py)."""
        assert self.batch is None, "a version may be published at any moment"
        self.is_evaluation_due, version = False, self.buffer.version
        first_cell = self.buffer.num_slots * self.config.rollout.group_size
        cells = range(first_cell, first_cell + len(self.heldout))
        able = [e for e, v in zip(self.engines, self.served(), strict=True) if v == version]
        among = [engine.rank for engine in able if engine.is_ready] or [e.rank for e in able]
        evaluation = Evaluation(self.heldout, cells, self.step, version)
        self.workers.deliver(self.groups.evaluate(evaluation, among))

    def on_evaluated(self, ended: Evaluation) -> None:
        if ended.is_cancelled:
            self.log.note(f"the evaluation of version {ended.version} was cancelled by a rollback")
        elif not ended.is_void:
            self.log.evaluated(ended)
        else:
            self.log.note("the evaluation was not of one version, since a worker died: retrying")
            if self.batch is None:
                self.start_evaluation()
            else:
                self.is_evaluation_due = True

    # -- what the supervisor asks

    def roll_back(self, step: int, version: int) -> Sends:
        """The ranks restart from the last checkpoint; generation continues."""
        sends = self.groups.roll_back(step, version)
        what = f"rollback from step {self.step} to {step}"
        self.log.note(f"{what}: its weights are version {version} now")
        self.log.steps_redone += self.step - step
        self.log.roll_back(step)
        self.step = self.saved_step = step
        self.batch, self.is_saving = None, False
        return sends

    def keep_batch(self, why: str) -> str:
        """Where an engine does not run the weights that it should (rule 6), or a step spoiled the
        trainer's: the batch in training, if there is one, and the weights that it began with."""
        return self.log.saver.save_bad(self.batch, why) if self.batch is not None else ""

    def stall_facts(self) -> dict[str, object]:
        trains = f"trains step {self.batch.step}" if self.batch else "has no batch"
        trainer = "saving" if self.is_saving else trains
        waits = f"step {self.step}, waiting for {self.waiting_for}"
        return {"controller": waits, "trainer": trainer, **self.groups.stall_facts()}
