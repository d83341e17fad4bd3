"""What is done about workers that die, freeze, or wait for each other. Takes deaths and the board,
gives verdicts; what becomes of groups is the loop's.

    restarts   a worker that dies comes back after 1, 2, then 4 s, and is forgiven when it has done
               what it is there for; the fourth death in a row ends the run with its last words.
    going back a trainer rank that dies takes its group along. All are started again from the last
               checkpoint (or the run's start), whose weights are published under a new number.
    watch      every worker beats. One that does not is frozen: an engine or a verifier is replaced
               like a dead one, a trainer rank ends the run, and so does a run in which all beat and
               nothing moves. First everything that is known is written down (rule 8).
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from minirl import shortage
from minirl.buffer import republished_as
from minirl.config import Config
from minirl.errors import Stalled, WorkerDied
from minirl.run_log import RunLog
from minirl.shm.board import Row, State, Total
from minirl.train import checkpoint
from minirl.train.checkpoint import newest_whole
from minirl.train.messages import CheckpointState, TrainerSetup
from minirl.workers import Died, Fleet, Role, Worker

MAX_IN_A_ROW = 4
FIRST_DELAY_S = 1.0
SLOW_LIMIT_S = 1800.0  # loading or saving a large model and capturing graphs take their time
LOOK_EVERY_S = 0.2
RANKS = "the trainer ranks"  # they live and die together
SLOW_STATES = (State.STARTING, State.SAVING)
STANDING_STILL = (  # unless tokens come
    State.WAITING_FOR_PROMPTS,
    State.GENERATING,
    State.WAITING_FOR_BATCH,
    State.WAITING_FOR_ANSWERS,
)


class Restarts:
    """How often in a row workers have died since they last proved themselves."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()

    def proved(self, name: str) -> None:
        self._deaths.pop(name, None)

    def delay_s(self, name: str) -> float | None:
        """After this death; None: it has had its chances."""
        self._deaths[name] += 1
        if self._deaths[name] >= MAX_IN_A_ROW:
            return None
        return FIRST_DELAY_S * 2 ** (self._deaths[name] - 1)


@dataclass(frozen=True)
class WentBack:
    """Where the ranks go on: `version` is the new number of weights that were `base` before."""

    step: int
    base: int
    version: int
    state: CheckpointState | None


class Faults:
    def __init__(self, config: Config, fleet: Fleet, log: RunLog):
        self.config, self.fleet, self.log = config, fleet, log
        self.restarts = Restarts()
        self._ranks = fleet.of(Role.TRAIN)
        self._first: TrainerSetup = self._ranks[0].setup
        self._base = getattr(self._first, "version", 0)  # of the checkpoint's weights
        self._furthest = 0  # the last step that was reached when a rank died
        self._num_oom_kills = shortage.num_killed_for_memory()
        self._looked = self._moved = time.monotonic()
        self._pulse: tuple[float, ...] = ()

    # -- deaths

    def verdict(self, worker: Worker, death: Died, is_up: bool) -> float:
        """The delay after which the worker may come back; raises where it may not."""
        name = RANKS if worker.role is Role.TRAIN else worker.name
        delay_s, remedy = self.restarts.delay_s(name), self._remedy(worker, death)
        is_hopeless = bool(remedy) and not is_up  # it would not fit the next time either
        if delay_s is None or is_hopeless:
            self.log.note(self.fleet.last_words(worker))
            why = f"{remedy}; " if remedy else ""
            raise WorkerDied(
                f"{worker.name} {death.how} (start {worker.num_starts}); {why}its log is in "
                f"{self.fleet.log_dir}; --resume goes on from the last checkpoint"
            )
        why = f" ({remedy})" if remedy else ""
        self.log.note(f"{worker.name} {death.how}: replaced{why}")
        self.log.totals.workers_replaced += len(self._ranks) if worker.role is Role.TRAIN else 1
        return delay_s

    def _remedy(self, worker: Worker, death: Died) -> str:
        num_before, self._num_oom_kills = self._num_oom_kills, shortage.num_killed_for_memory()
        was_oom = "SIGKILL" in death.how and self._num_oom_kills > num_before >= 0
        words = f"{death.how}\n{self.fleet.last_words(worker)}"
        kind = worker.placement.kind if worker.role is not Role.VERIFY else "cpu"
        return shortage.remedy(worker.role, words, self.config, kind, was_oom)

    def stepped(self, step: int) -> None:
        """A step was trained: the ranks are forgiven when they are further than they ever were."""
        if step > self._furthest:
            self.restarts.proved(RANKS)

    def restart_ranks(self, step: int, delay_s: float) -> WentBack:
        """All of them, from the last checkpoint; `step` is the last that was trained."""
        self._furthest = max(self._furthest, step)
        for rank in self._ranks:
            self.fleet.retire(rank)  # all are gone before anything is looked at
        run_dir = self.log.run_dir
        checkpoint.sweep(run_dir)
        found, state, broken = newest_whole(run_dir)
        for problem in broken:
            self.log.note(f"passed over: {problem}")
        if state is not None:
            self._base = max(self._base, state.history.version)
        base, latest = self._base, self._first.store.latest
        self._base = republished_as(base, latest) if latest >= 0 else base
        Path(self._first.rendezvous).unlink(missing_ok=True)
        for rank in self._ranks:
            folder = str(found) if found else self._first.folder
            rank.setup = replace(
                rank.setup, folder=folder, is_resumed=found is not None, version=self._base
            )
            self.fleet.replace(rank, delay_s)
        return WentBack(state.step if state else 0, base, self._base, state)

    # -- the watch

    def frozen(self) -> list[tuple[Worker, Died]]:
        """Workers that gave no sign of life for too long. A verifier that grades has a limit of its
        own, tasks.timeout_s."""
        found = []
        for worker in self.fleet.workers:
            row = self.fleet.board.row(worker.row)
            if worker.process is None or row.beat_s <= self.config.log.stall_s:
                continue
            is_slow = row.state in SLOW_STATES and row.beat_s <= SLOW_LIMIT_S
            if (is_slow and not self.fleet.is_stopped(worker)) or row.state is State.GRADING:
                continue
            how = f"has been {_words(row)} without a sign of life for {row.beat_s:.0f} s"
            found.append((worker, Died(how, is_final=False)))
        return found

    def still_s(self, last_news: float) -> float:
        """For how long nothing has moved, though all beat: no message, no token, and nobody at
        work who beats while at it."""
        rows = [self.fleet.board.row(w.row) for w in self.fleet.workers if w.process is not None]
        engines = [worker.row for worker in self.fleet.of(Role.ROLLOUT)]
        tokens = (self.fleet.board.total(row, Total.TOKENS) for row in engines)
        pulse = (last_news, *tokens)
        if pulse != self._pulse or any(row.state not in STANDING_STILL for row in rows):
            self._pulse, self._moved = pulse, time.monotonic()
        return time.monotonic() - self._moved

    def is_time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return False
        self._looked = now
        return True

    def report(self, why: str, facts: dict[str, object]) -> Path:
        """Writes down who waits for what, and every stack. Gives the file."""
        lines = [why, *(f"  {name:<12} {fact}" for name, fact in facts.items())]
        for worker in self.fleet.workers:
            row = self.fleet.board.row(worker.row)
            lines.append(
                f"  {worker.name:<12} {_words(row)} for {row.since_s:.0f} s, last beat "
                f"{row.beat_s:.0f} s ago, version {row.version}, running {row.running}"
            )
        return self.log.stalled("\n".join(lines) + "\n" + self.fleet.stacks())

    def stall(self, why: str, facts: dict[str, object]) -> Stalled:
        return Stalled(f"{why}; who waited for what, and all stacks: {self.report(why, facts)}")


def _words(row: Row) -> str:
    return row.state.name.lower().replace("_", " ")
