"""Deaths, freezes, restarts with back-off, rollback of the ranks, the stall report, the OOM hint.

Takes deaths and the board, gives new processes and what `Groups` wants sent. The heartbeat of every
worker is its last write to the board.

    back-off  a worker that dies is restarted after 1, 2, then 4 s. It starts afresh when it has
              done its work again; the fourth death in a row ends the run with its log tail. An
              engine of a further box has no such limit once it was restarted: it may be the box.
    rollback  a trainer rank that dies takes its group along: all ranks restart from the last
              checkpoint (or the run's start), whose weights are republished under a new version.
    watchdog  a worker without a heartbeat is frozen: an engine or a verifier is replaced like a
              dead one, a trainer rank ends the run, and so does a run in which all workers have a
              heartbeat and nothing moves. First the stall report is written (rule 8).
    OOM hint  a worker that ran out of memory names the number of the recipe to change; an engine or
              a rank that never started is then not retried.

Leaves out: what becomes of groups (groups.py), processes as such (workers.py).
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from minirl.buffer import republished_as
from minirl.config import Config, get
from minirl.errors import MinirlError, Stalled, WorkerDied
from minirl.groups import Groups, Sends
from minirl.messages import Died, Finished, Graded, Replied, Role, Started, TrainerSetup
from minirl.metrics import RateLimit
from minirl.resume import find_start
from minirl.shm.board import IDLE_STATES, State, Total
from minirl.tasks.registry import dumped, where
from minirl.workers import LISTEN_S, Worker, Workers

MAX_DEATHS = 4  # in a row
FIRST_DELAY_S, MAX_DOUBLINGS = 1.0, 6
SLOW_LIMIT_S = 1800.0  # loading or saving a large model and capturing graphs take their time
CHECK_EVERY_S = 0.2
RANKS = "the trainer ranks"  # they live and die together
SLOW_STATES = (State.STARTING, State.SAVING)
WAITING_STATES = (*IDLE_STATES, State.GENERATING)  # unless tokens come
FROM_OUTSIDE = ("SIGKILL", "without a heartbeat")  # no reward ends its verifier so


class Log(Protocol):
    run_dir: Path
    workers_replaced: float

    def note(self, text: str) -> None: ...


class Controller(Protocol):
    """What the supervisor asks of the loop that it serves."""

    def stall_facts(self) -> dict[str, object]: ...
    def keep_batch(self, why: str) -> str: ...  # of a failure that is final
    def roll_back(self, step: int, version: int) -> Sends: ...  # `version`: of its weights now


class Supervisor:
    def __init__(
        self, config: Config, workers: Workers, groups: Groups, log: Log, controller: Controller
    ):
        self.config, self.workers, self.groups = config, workers, groups
        self.log, self.controller = log, controller
        self._seldom = RateLimit(log.note)
        self.deaths: Counter[str] = Counter()  # in a row, since the worker last did its work
        self._ranks = workers.of(Role.TRAIN)
        # As the run began; a rollback changes the setups.
        self._first: TrainerSetup | None = self._ranks[0].setup if self._ranks else None
        self._furthest_step = 0  # that was ever trained
        self._num_oom_kills = num_oom_kills()
        self._checked = self._moved = self._heard = time.monotonic()
        self._pulse: tuple[float, ...] = ()  # the last message, and tokens

    def collect(self, handle: Callable[[Worker, object], Sends]) -> None:
        """One turn of a controller: `handle` gets what workers say, but for starts and deaths. Any
        message is progress; one that shows work done resets its worker's back-off."""
        for worker, message in self.workers.receive(LISTEN_S):
            self._heard = time.monotonic()
            if isinstance(message, Finished | Graded | Replied):
                self.deaths.pop(worker.name, None)
            if isinstance(message, Started):
                worker.is_ready = True
                if message.note:
                    self.log.note(message.note)
            elif isinstance(message, Died):
                self.workers.deliver(self.on_death(worker, message))
            else:
                self.workers.deliver(handle(worker, message))
        self.workers.deliver(self.check())

    def stepped(self, step: int) -> None:
        """A step was trained: the ranks start afresh when they are further than ever before."""
        if step > self._furthest_step:
            self.deaths.pop(RANKS, None)
            self._furthest_step = step

    # -- deaths

    def on_death(self, worker: Worker, death: Died) -> Sends:
        if worker.role is Role.TRAIN:
            worker, death = next(iter(self.workers.causes(self._ranks)), (worker, death))
        if death.is_final and (worker.is_ready or not worker.is_optional):
            kept = self.controller.keep_batch(death.how)
            raise MinirlError(f"{worker.name}: {death.how}{kept}")
        if worker.role is Role.LINK:  # frozen; of one that ended the engines' deaths are reported
            worker.process.kill()
            return []
        row = self.workers.board.row(worker.row)
        if row.state is State.GRADING:
            self.deaths.pop(worker.name, None)  # a reward took it down: that is a fault of the task
        delay_s = self._restart_delay(worker, death)
        if worker.role is Role.TRAIN:
            return self._roll_back(delay_s)
        self.workers.replace(worker, delay_s)
        if worker.role is Role.ROLLOUT:
            return self.groups.engine_lost(worker.rank)
        is_outside = any(sign in death.how for sign in FROM_OUTSIDE)
        why = f"its verifier {death.how}"
        return self.groups.verifier_lost(worker.rank, why, is_outside=is_outside)

    def _restart_delay(self, worker: Worker, death: Died) -> float:
        """Raises where the worker is not restarted."""
        name = RANKS if worker.role is Role.TRAIN else worker.name
        self.deaths[name] += 1
        num_before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        words = f"{death.how}\n{self.workers.log_tail(worker)}"
        if "SIGKILL" in death.how and self._num_oom_kills > num_before:
            words += "\nended by the kernel's OOM killer"
        hint = memory_hint(worker.role, words, self.config, worker.placement.kind)
        never_started = worker.role is not Role.VERIFY and not worker.is_ready
        is_hopeless = bool(hint) and never_started  # it would not fit the next time either
        if (self.deaths[name] >= MAX_DEATHS or is_hopeless) and not worker.is_optional:
            self.log.note(self.workers.log_tail(worker))
            why = f"{hint}; " if hint else ""
            remedy = "; --resume continues from the last checkpoint" if self._ranks else ""
            raise WorkerDied(
                f"{worker.name} {death.how} (start {worker.num_starts}); {why}its log is in "
                f"{self.workers.log_dir}{remedy}"
            )
        why = f" ({hint})" if hint else ""
        # One bad task may end verifiers without end, and a bad box its engines; any other worker
        # has a limit, MAX_DEATHS.
        which = death.how * death.is_final if worker.box else worker.num_starts
        kind = worker.role if worker.role is Role.VERIFY else f"{worker.name}/{which}"
        self._seldom.note(kind, f"{worker.name} {death.how}: replaced{why}")
        self.log.workers_replaced += len(self._ranks) if worker.role is Role.TRAIN else 1
        return FIRST_DELAY_S * 2.0 ** min(self.deaths[name] - 1, MAX_DOUBLINGS)

    def _roll_back(self, delay_s: float) -> Sends:
        """All ranks restart from the last checkpoint."""
        assert self._first is not None
        for rank in self._ranks:
            self.workers.retire(rank)  # all are gone before the run directory is read
        start = find_start(self.log.run_dir)
        for note in start.notes:
            self.log.note(note)
        Path(self._first.rendezvous).unlink(missing_ok=True)
        folder, is_resumed = str(start.folder or self._first.folder), start.folder is not None
        base, before = start.state.history.version, self._ranks[0].setup
        if folder == before.folder:  # the last number of these weights is the nearest
            base = max(base, before.version)
        version = republished_as(base, self._first.store.latest, before.version)
        changes = {"folder": folder, "is_resumed": is_resumed, "version": version}
        for rank in self._ranks:
            rank.setup = replace(rank.setup, **changes)
            self.workers.replace(rank, delay_s)
        return self.controller.roll_back(start.state.step, version)

    # -- the watchdog

    def check(self) -> Sends:
        """Rule 8. A reward that hangs costs its verifier, a frozen engine or verifier is replaced,
        and anything else that stands still ends the run."""
        now = time.monotonic()
        if now - self._checked < CHECK_EVERY_S:
            return []
        self._checked = now
        sends = self._end_late_rewards()
        for worker, death in self._frozen():
            if worker.role is Role.TRAIN:
                raise self._stall(f"{worker.name} {death.how}")
            self._report(f"{worker.name} {death.how}")
            try:
                sends += self.on_death(worker, death)
            except WorkerDied as error:
                raise Stalled(str(error)) from None
        board = self.workers.board
        tokens = (board.total(w.row, Total.TOKENS) for w in self.workers.of(Role.ROLLOUT))
        pulse = (self._heard, *tokens)
        is_working = any(board.row(w.row).state not in WAITING_STATES for w in self.workers.all)
        if pulse != self._pulse or is_working:
            self._pulse, self._moved = pulse, now
        if (seconds := now - self._moved) > self.config.log.stall_s:
            raise self._stall(f"nothing has moved for {seconds:.0f} s, and every worker waits")
        return sends

    def _end_late_rewards(self) -> Sends:
        sends: Sends = []
        limit_s = self.config.tasks.timeout_s
        for verifier in self.workers.of(Role.VERIFY):
            row = self.workers.board.row(verifier.row)
            is_late = row.state is State.GRADING and row.since_s > limit_s
            if is_late and verifier.rank in self.groups.at_verifier:
                line = where(dumped(self.workers.stacks([verifier])), self.config.tasks.kind)
                self.workers.replace(verifier)
                why = f"took longer than tasks.timeout_s = {limit_s:g}{line}"
                sends += self.groups.verifier_lost(verifier.rank, why, is_late=True)
        return sends

    def _frozen(self) -> Iterator[tuple[Worker, Died]]:
        """A verifier that grades has a limit of its own, tasks.timeout_s."""
        for worker in self.workers.all:
            row = self.workers.board.row(worker.row)
            if row.beat_s <= self.config.log.stall_s:
                continue
            is_slow = row.state in SLOW_STATES and row.beat_s <= SLOW_LIMIT_S
            if (is_slow and not self.workers.is_stopped(worker)) or row.state is State.GRADING:
                continue
            how = f"has been {row.state.words} without a heartbeat for {row.beat_s:.0f} s"
            yield worker, Died(how, is_final=False)

    def _stall(self, why: str) -> Stalled:
        return Stalled(f"{why}; what waited for what, and all stacks: {self._report(why)}")

    def _report(self, why: str) -> Path:
        """Notes what waits for what, and every stack; gives the file that keeps it (rule 8)."""
        facts = self.controller.stall_facts()
        lines = [why, *(f"  {name:<12} {fact}" for name, fact in facts.items())]
        for worker in self.workers.all:
            row = self.workers.board.row(worker.row)
            lines.append(
                f"  {worker.name:<12} {row.state.words} for {row.since_s:.0f} s, last heartbeat "
                f"{row.beat_s:.0f} s ago, version {row.version}, running {row.running}"
            )
        report, path = "\n".join([*lines, self.workers.stacks()]), self.log.run_dir / "stall.txt"
        with suppress(OSError), path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{report}\n")
        self.log.note(report)
        return path


# The OOM hint -------------------------------------------------------------------------------------

# What a worker says that is short of memory, in lower case.
NO_CACHE = "no available memory for the cache blocks|gib kv cache is needed"
FULL = "out of memory|outofmemoryerror|cublas_status_alloc_failed|less than (?:desired|requested)"
MACHINE = r"can(?:no|')t allocate memory|\bmemoryerror|std::bad_alloc|oom killer"


def memory_hint(role: str, words: str, config: Config, kind: str) -> str:
    """Which number of the recipe to change, and to what; "" where memory was not the reason. A pure
    function of `words`, all that the worker said at its end, so that what a GPU would say can be
    tested anywhere."""
    said, rollout, train = words.lower(), config.rollout, config.train
    is_machine = re.search(MACHINE, said) is not None
    is_device = re.search(FULL, said) is not None or (is_machine and kind == "cpu")
    is_kv = role == Role.ROLLOUT and re.search(NO_CACHE, said) is not None
    why = "the KV cache is too small" if is_kv else f"the {role} device is out of memory"
    changes: dict[str, Any] = {}  # the cheapest first
    if is_kv or (role == Role.ROLLOUT and is_device):
        if kind == "cpu" or config.devices.share:
            changes["rollout.kv_cache_gib"] = rollout.kv_cache_gib * (2 if is_kv else 0.5)
        fraction = round(rollout.memory_fraction + (0.05 if is_kv else -0.1), 2)
        changes["rollout.memory_fraction"] = min(0.95, max(0.05, fraction))
    elif role == Role.TRAIN and is_device:
        changes["train.max_tokens"] = max(train.max_tokens // 2, config.max_tokens_per_trajectory)
        changes["train.gradient_checkpointing"] = True
        changes["train.shard"] = "full" if config.devices.train > 1 else train.shard
        changes["rollout.max_new_tokens"] = max(1, rollout.max_new_tokens // 2)
    elif role == Role.VERIFY and is_machine:
        is_killed = "oom killer" in said  # else a reward has met the limit of its process
        why = "this machine is out of memory" if is_killed else "a reward needs more memory"
        changes["tasks.memory_gib"] = max(0.25, config.tasks.memory_gib * (0.5 if is_killed else 2))
    elif is_machine:
        why = "this machine is out of memory"
        changes["train.batch_size"] = max(1, train.batch_size // 2)
    for key, new in changes.items():  # the first that changes anything
        if new != (old := get(config, key)):
            return f"{why}: change {key} from {str(old).lower()} to {str(new).lower()}"
    return ""


def num_oom_kills() -> int:
    """Processes that the kernel's OOM killer has ended since boot, as far as it says. Two looks
    tell whether a SIGKILL was one of these."""
    counters = Path("/proc/vmstat")
    found = re.search(r"\boom_kill (\d+)", counters.read_text()) if counters.exists() else None
    return int(found[1]) if found else 0
