"""Deaths, freezes, restarts with back-off, rollback of the ranks, the stall report, the OOM hint.

Takes deaths and the board, gives new processes and what `Groups` wants sent. The heartbeat of every
worker is its last write to the board.

    back-off  a worker that dies is restarted after 1, 2, then 4 s. It starts afresh when it has
              done its work again; the fourth death in a row ends the run with its log tail.
    rollback  a trainer rank that dies takes its group along: all ranks restart from the last
              checkpoint (or the run's start), whose weights are republished under a new version.
    watchdog  a worker without a heartbeat is frozen: an engine or a verifier is replaced like a
              dead one, a trainer rank ends the run, and so does a run in which all workers have a
              heartbeat and nothing moves. First the stall report is written (rule 8).
    OOM hint  a worker that ran out of memory names the number of the recipe to change; one that
              never started is then not retried.

Leaves out: what becomes of groups (groups.py), processes as such (workers.py).
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from minirl.buffer import republished_as
from minirl.config import Config, get
from minirl.errors import MinirlError, Stalled, WorkerDied
from minirl.groups import Groups, Sends
from minirl.messages import Died, Finished, Graded, Replied, Role, Started, TrainerSetup
from minirl.shm.board import Row, State, Total
from minirl.train import checkpoint
from minirl.train.checkpoint import newest_whole
from minirl.workers import LISTEN_S, Worker, Workers

MAX_DEATHS = 4  # in a row
FIRST_DELAY_S = 1.0
SLOW_LIMIT_S = 1800.0  # loading or saving a large model and capturing graphs take their time
CHECK_EVERY_S = 0.2
RANKS = "the trainer ranks"  # they live and die together
SLOW_STATES = (State.STARTING, State.SAVING)
WAITING_STATES = (  # unless tokens come
    State.WAITING_FOR_PROMPTS,
    State.GENERATING,
    State.WAITING_FOR_BATCH,
    State.WAITING_FOR_ANSWERS,
)
FROM_OUTSIDE = ("SIGKILL", "without a heartbeat")  # no reward ends its verifier so


class Log(Protocol):
    run_dir: Path
    workers_replaced: float

    def note(self, text: str) -> None: ...


class Controller(Protocol):
    """What the supervisor asks of the loop that it serves."""

    def stall_facts(self) -> dict[str, object]: ...

    def keep_batch(self, worker: Worker, why: str) -> str:
        """Saves the batch that a final failure concerns; gives the end of a sentence."""

    def roll_back(self, delay_s: float) -> Sends: ...


class Restarts:
    """How often in a row workers have died since they last did their work."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()

    def reset(self, name: str) -> None:
        self._deaths.pop(name, None)

    def delay_s(self, name: str) -> float | None:
        """The back-off after this death; None: no more retries."""
        self._deaths[name] += 1
        if self._deaths[name] >= MAX_DEATHS:
            return None
        return FIRST_DELAY_S * 2 ** (self._deaths[name] - 1)


@dataclass(frozen=True)
class RolledBack:
    """Where the ranks restart: `version` is the new number of the checkpoint's weights."""

    step: int
    version: int


class Supervisor:
    def __init__(
        self, config: Config, workers: Workers, groups: Groups, log: Log, controller: Controller
    ):
        self.config, self.workers, self.groups = config, workers, groups
        self.log, self.controller = log, controller
        self.restarts = Restarts()
        self._ranks = workers.of(Role.TRAIN)
        # As the run began; a rollback changes the setups.
        self._first: TrainerSetup | None = self._ranks[0].setup if self._ranks else None
        self._base = getattr(self._first, "version", 0)  # of the checkpoint's weights
        self._furthest_step = 0  # that was reached when a rank died
        self._num_oom_kills = num_oom_kills()
        self._checked = self._moved = self._heard = time.monotonic()
        self._pulse: tuple[float, ...] = ()

    def collect(self, handle: Callable[[Worker, object], Sends]) -> None:
        """One turn of a controller: `handle` gets what workers say, but for starts and deaths."""
        for worker, message in self.workers.receive(LISTEN_S):
            self.received(worker, message)
            if isinstance(message, Started):
                worker.is_ready = True
            elif isinstance(message, Died):
                self.workers.deliver(self.on_death(worker, message))
            else:
                self.workers.deliver(handle(worker, message))
        self.workers.deliver(self.check())

    def received(self, worker: Worker, message: object) -> None:
        """Any message is progress; one that shows work done resets its worker's back-off."""
        self._heard = time.monotonic()
        if isinstance(message, Finished | Graded | Replied):
            self.restarts.reset(worker.name)

    # -- deaths

    def on_death(self, worker: Worker, death: Died) -> Sends:
        if worker.role is Role.TRAIN:
            worker, death = next(iter(self.workers.causes(self._ranks)), (worker, death))
        if death.is_final:
            kept = self.controller.keep_batch(worker, death.how)
            raise MinirlError(f"{worker.name}: {death.how}{kept}")
        row = self.workers.board.row(worker.row)
        if row.state is State.GRADING:
            self.restarts.reset(worker.name)  # a reward took it down: that is a fault of the task
        delay_s = self._restart_delay(worker, death)
        if worker.role is Role.TRAIN:
            return self.controller.roll_back(delay_s)
        self.workers.replace(worker, delay_s)
        if worker.role is Role.ROLLOUT:
            return self.groups.engine_lost(worker.rank)
        is_outside = any(sign in death.how for sign in FROM_OUTSIDE)
        why = f"its verifier {death.how}"
        return self.groups.verifier_lost(worker.rank, row.running, why, is_outside=is_outside)

    def _restart_delay(self, worker: Worker, death: Died) -> float:
        """Raises where the worker is not restarted."""
        name = RANKS if worker.role is Role.TRAIN else worker.name
        delay_s, hint = self.restarts.delay_s(name), self._memory_hint(worker, death)
        is_hopeless = bool(hint) and not worker.is_ready  # it would not fit the next time either
        if delay_s is None or is_hopeless:
            self.log.note(self.workers.log_tail(worker))
            why = f"{hint}; " if hint else ""
            remedy = "; --resume continues from the last checkpoint" if self._ranks else ""
            raise WorkerDied(
                f"{worker.name} {death.how} (start {worker.num_starts}); {why}its log is in "
                f"{self.workers.log_dir}{remedy}"
            )
        why = f" ({hint})" if hint else ""
        self.log.note(f"{worker.name} {death.how}: replaced{why}")
        self.log.workers_replaced += len(self._ranks) if worker.role is Role.TRAIN else 1
        return delay_s

    def _memory_hint(self, worker: Worker, death: Died) -> str:
        num_before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        was_oom = "SIGKILL" in death.how and self._num_oom_kills > num_before >= 0
        words = f"{death.how}\n{self.workers.log_tail(worker)}"
        kind = worker.placement.kind if worker.role is not Role.VERIFY else "cpu"
        return memory_hint(worker.role, words, self.config, kind, was_oom)

    def stepped(self, step: int) -> None:
        """A step was trained: the ranks start afresh when they are further than ever before."""
        if step > self._furthest_step:
            self.restarts.reset(RANKS)

    def restart_ranks(self, step: int, delay_s: float) -> RolledBack:
        """All of them, from the last checkpoint; `step` is the last that was trained."""
        assert self._first is not None
        self._furthest_step = max(self._furthest_step, step)
        for rank in self._ranks:
            self.workers.retire(rank)  # all are gone before the run directory is read
        checkpoint.sweep(self.log.run_dir)
        found, state, broken = newest_whole(self.log.run_dir)
        for problem in broken:
            self.log.note(f"passed over: {problem}")
        if state is not None:
            self._base = max(self._base, state.history.version)
        latest = self._first.store.latest
        self._base = republished_as(self._base, latest) if latest >= 0 else self._base
        Path(self._first.rendezvous).unlink(missing_ok=True)
        for rank in self._ranks:
            folder = str(found) if found else self._first.folder
            rank.setup = replace(
                rank.setup, folder=folder, is_resumed=found is not None, version=self._base
            )
            self.workers.replace(rank, delay_s)
        return RolledBack(state.step if state else 0, self._base)

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
        still_s = self._seconds_without_progress()
        if still_s > self.config.log.stall_s:
            raise self._stall(f"nothing has moved for {still_s:.0f} s, and every worker waits")
        return sends

    def _end_late_rewards(self) -> Sends:
        sends: Sends = []
        limit_s = self.config.tasks.timeout_s
        for verifier in self.workers.of(Role.VERIFY):
            row = self.workers.board.row(verifier.row)
            is_late = row.state is State.GRADING and row.since_s > limit_s
            if is_late and self.groups.queue.is_busy(verifier.rank):
                self.workers.replace(verifier)
                why = f"took longer than tasks.timeout_s = {limit_s:g}"
                sends += self.groups.verifier_lost(verifier.rank, row.running, why, is_late=True)
        return sends

    def _frozen(self) -> list[tuple[Worker, Died]]:
        """A verifier that grades has a limit of its own, tasks.timeout_s."""
        found = []
        for worker in self.workers.all:
            row = self.workers.board.row(worker.row)
            if worker.process is None or row.beat_s <= self.config.log.stall_s:
                continue
            is_slow = row.state in SLOW_STATES and row.beat_s <= SLOW_LIMIT_S
            if (is_slow and not self.workers.is_stopped(worker)) or row.state is State.GRADING:
                continue
            how = f"has been {_words(row)} without a heartbeat for {row.beat_s:.0f} s"
            found.append((worker, Died(how, is_final=False)))
        return found

    def _seconds_without_progress(self) -> float:
        """For how long there was no message, no token, and no worker at work."""
        board, alive = self.workers.board, [w for w in self.workers.all if w.process is not None]
        tokens = (board.total(w.row, Total.TOKENS) for w in self.workers.of(Role.ROLLOUT))
        pulse = (self._heard, *tokens)
        is_working = any(board.row(w.row).state not in WAITING_STATES for w in alive)
        if pulse != self._pulse or is_working:
            self._pulse, self._moved = pulse, time.monotonic()
        return time.monotonic() - self._moved

    def _stall(self, why: str) -> Stalled:
        return Stalled(f"{why}; what waited for what, and all stacks: {self._report(why)}")

    def _report(self, why: str) -> Path:
        """Notes what waits for what, and every stack; gives the file that keeps it (rule 8)."""
        facts = self.controller.stall_facts()
        lines = [why, *(f"  {name:<12} {fact}" for name, fact in facts.items())]
        for worker in self.workers.all:
            row = self.workers.board.row(worker.row)
            lines.append(
                f"  {worker.name:<12} {_words(row)} for {row.since_s:.0f} s, last heartbeat "
                f"{row.beat_s:.0f} s ago, version {row.version}, running {row.running}"
            )
        report, path = "\n".join([*lines, self.workers.stacks()]), self.log.run_dir / "stall.txt"
        with suppress(OSError), path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{report}\n")
        self.log.note(report)
        return path


def _words(row: Row) -> str:
    return row.state.name.lower().replace("_", " ")


# The OOM hint -------------------------------------------------------------------------------------

DEVICE = ("out of memory", "outofmemoryerror", "cublas_status_alloc_failed")
HOST = ("cannot allocate memory", "can't allocate memory", "memoryerror", "std::bad_alloc")
NO_CACHE = ("no available memory for the cache blocks", "gib kv cache is needed")
NO_ROOM = re.compile(r"\(([\d.]+)/([\d.]+) gib\).*?less than (?:desired|requested)", re.DOTALL)
WARMING_UP = "warming up sampler"
RESERVE = 0.03  # of a GPU, that stays free below what was found free


def memory_hint(role: str, words: str, config: Config, kind: str, was_oom_killed: bool) -> str:
    """Which number of the recipe to change, and to what; "" where memory was not the reason. A pure
    function of `words`, all that the worker said at its end, so that what a GPU would say can be
    tested anywhere."""
    said = words.lower()
    is_full = any(sign in said for sign in DEVICE)
    if role == "rollout" and (found := _engine(said, config, kind, is_full)):
        return found
    is_host = was_oom_killed or any(sign in said for sign in HOST)
    if role == "train" and (is_full or (is_host and kind == "cpu")):
        return _trainer(config)
    if not is_host:
        return ""
    why = "this machine is out of memory"
    if role == "rollout" and kind == "cpu":
        return _change(config, "rollout.kv_cache_gib", config.rollout.kv_cache_gib / 2, why)
    return _change(config, "train.batch_size", max(1, config.train.batch_size // 2), why)


def _change(config: Config, key: str, after: float, why: str) -> str:
    before, new = (str(value).lower() for value in (get(config, key), after))
    return f"{why}: change {key} from {before} to {new}"


def _trainer(config: Config) -> str:
    """The cheapest change first: what costs no time, then what costs some, then what costs much."""
    train, why = config.train, "the training device is out of memory"
    least = config.max_tokens_per_trajectory
    if train.max_tokens > least:
        return _change(config, "train.max_tokens", max(least, train.max_tokens // 2), why)
    if not train.gradient_checkpointing:
        return _change(config, "train.gradient_checkpointing", True, why)
    if not train.shard_optimizer and config.devices.train > 1:
        return _change(config, "train.shard_optimizer", True, why)
    half = max(1, config.rollout.max_new_tokens // 2)
    return _change(config, "rollout.max_new_tokens", half, why)


def _engine(said: str, config: Config, kind: str, is_full: bool) -> str:
    """What vLLM says, in its own words."""
    rollout, fraction = config.rollout, config.rollout.memory_fraction
    if any(sign in said for sign in NO_CACHE):
        why = "the KV cache of an engine is too small"
        if kind == "cpu":
            return _change(config, "rollout.kv_cache_gib", rollout.kv_cache_gib * 2, why)
        if fraction < 0.95:
            more = min(0.95, round(fraction + 0.05, 2))
            return _change(config, "rollout.memory_fraction", more, why)
        wide = 2 * config.devices.tensor_parallel
        return _change(config, "devices.tensor_parallel", wide, why)
    why = "the rollout device is out of memory"
    if kind == "cuda" and (found := NO_ROOM.search(said)):
        share = max(0.05, int((float(found[1]) / float(found[2]) - RESERVE) * 100) / 100)
        return _change(config, "rollout.memory_fraction", share, why)
    if is_full and WARMING_UP in said and rollout.max_num_seqs > 1:
        return _change(config, "rollout.max_num_seqs", rollout.max_num_seqs // 2, why)
    if is_full and kind == "cuda":
        less = max(0.05, round(fraction - 0.1, 2))
        return _change(config, "rollout.memory_fraction", less, why)
    return ""


def num_oom_kills() -> int:
    """Processes that the kernel's OOM killer has ended since boot; -1 where it does not say. Two
    looks tell whether a SIGKILL was one of these."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), -1)
