"""Worker processes: spawn, message, replace, kill. Takes bodies and their set-up, gives messages.

Each worker has its own pipe and log and shares no lock, so one that is killed at any instant blocks
no other: its pipe ends, and `receive` reports it as Died. A worker dies with the controller,
whatever kills that, and ignores SIGINT and SIGTERM. Leaves out: which workers there are and why
(launch.py), and what messages mean (loop.py).
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pkgutil
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil
from tqdm import tqdm  # type: ignore[import-untyped]

from minirl.devices import Placement
from minirl.errors import Interrupted, MinirlError, Stalled, WorkerDied
from minirl.messages import Died, Relayed, Role, StartThere
from minirl.shm.board import Board, State

LOG_TAIL_LINES = 12
STOP_GRACE_S = 10.0
STACKS_WAIT_S = 10.0  # a frozen worker never answers
CAUSE_GRACE_S = 1.0  # a killed rank takes the others down, and their deaths may be reported first
LISTEN_S = 0.2
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECRET = re.compile(r"(?!TOKENIZER)TOKEN|SECRET|PASSW|CREDENTIAL|KEY$|APIKEY", re.I)

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class Worker:
    """`body` names the function that the process runs, "module:function" of (setup, board, pipe):
    it is imported there, so that the controller loads neither vLLM nor a model's code."""

    def __init__(self, role: Role, rank: int, row: int, body: str, setup: Any, place: Placement):
        self.role, self.rank, self.row = role, rank, row
        self.body, self.setup, self.placement = body, setup, place
        self.name, self.num_starts = f"{role}-{rank}", 0
        self.process: Any = None
        self.pipe: Connection
        self.failure: Died | None = None
        self.is_ready = False  # it has said so
        self.log_start = 0  # bytes of earlier starts and runs
        self.outbox = bytearray()
        self.box = 0  # where it runs; not 0: outpost.py's, by this link
        self.link: Worker | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # for its own process
        names = ("role", "rank", "row", "body", "setup", "placement")
        return Worker, tuple(getattr(self, name) for name in names)

    @property
    def is_optional(self) -> bool:
        """Its box was lost or failed before: the run goes on without it, until it is up."""
        return self.box > 0 and self.num_starts > 1

    def relayed(self, message: object, workers: "Workers") -> "Iterator[tuple[Worker, object]]":
        """The workers that a message comes from: a link passes on those of other boxes."""
        yield self, message

    def send(self, message: object) -> None:
        """Never waits: what the worker does not take now goes out at a later `receive`, which also
        reports one that just died."""
        if self.link is not None:
            self.link.send(Relayed(self.name, self.num_starts, message))
            return
        body = bytes(ForkingPickler.dumps(message))
        self.outbox += struct.pack("!i", len(body)) + body  # as Connection.send does it
        self.flush()

    def flush(self) -> None:
        if not self.outbox or self.pipe.closed:
            return
        end = socket.socket(fileno=self.pipe.fileno())
        try:
            while self.outbox:
                del self.outbox[: end.send(self.outbox, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()
        finally:
            end.detach()  # the pipe keeps the file descriptor


class Workers:
    def __init__(self, log_dir: Path, num_workers: int, trace: Path | None = None):
        self.log_dir = log_dir
        self.board = Board(num_workers, trace)
        self.all: list[Worker] = []
        # Not torch.multiprocessing: no tensor goes through a pipe, and torch is slow to load.
        self._context = multiprocessing.get_context("spawn")

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.all if worker.role is role]

    def deliver(self, messages: Iterable[tuple[str, object]]) -> None:
        """Each to the worker of that name."""
        for name, message in messages:
            next(worker for worker in self.all if worker.name == name).send(message)

    def served(self, engine: Worker, newest: int, is_pinned: bool) -> int | None:
        """Under which version it would begin a group: the newest, unless an evaluation pins an
        older one, or the newest has not reached its box. None: it is in another box, not up."""
        version = self.board.row(engine.row).version
        if engine.box and (version < 0 or not engine.is_ready):
            return None
        return version if 0 <= version < newest and (engine.box or is_pinned) else newest

    def spawn(self, role: Role, rank: int, body: str, setup: Any, place: Placement) -> Worker:
        return self.add(Worker(role, rank, len(self.all), body, setup, place))

    def add(self, worker: Worker) -> Worker:
        self.all.append(worker)
        self.replace(worker)
        return worker

    def replace(self, worker: Worker, delay_s: float = 0.0) -> None:
        """A new process instead of one that died or must go. With a delay it exists at once and
        takes messages, but begins its work later."""
        self.retire(worker)
        worker.failure, worker.outbox, worker.is_ready = None, bytearray(), False
        worker.num_starts += 1
        worker.log_start = len(_read(self._log(worker)))
        self.board.reset(worker.row, worker.num_starts)
        if worker.box:
            worker.send(StartThere(delay_s))
            return
        worker.pipe, theirs = self._context.Pipe()
        args = (worker, self.board, theirs, self._log(worker), delay_s)
        process = self._context.Process(target=_child, args=args)  # type: ignore[attr-defined]
        resource_tracker.ensure_running()  # here, since its first start unblocks signals
        with _environment(worker.placement.env), _deferred_signals():
            process.start()
            worker.process = process
        theirs.close()

    def receive(self, timeout_s: float) -> Iterator[tuple[Worker, object]]:
        """Messages as they come; at most one `timeout_s` of silence."""
        by_handle: dict[Any, Worker] = {}
        for worker in self.all:
            if worker.process is not None:
                worker.flush()
                by_handle[worker.pipe] = by_handle[worker.process.sentinel] = worker
        ready = dict.fromkeys(by_handle[handle] for handle in wait(list(by_handle), timeout_s))
        for worker in ready:
            for message in self._drain(worker):
                yield from worker.relayed(message, self)

    def _drain(self, worker: Worker) -> Iterator[object]:
        is_dead = not worker.process.is_alive()  # asked first: what it sent is in the pipe by now
        try:
            while worker.pipe.poll():
                message = worker.pipe.recv()
                if isinstance(message, Died):
                    worker.failure = message
                else:
                    yield message
        except (EOFError, OSError):  # OSError: it was killed in the middle of a long message
            worker.process.join(STOP_GRACE_S)
            worker.process.kill()  # without a pipe it is of no use
            worker.process.join()
            is_dead = True
        if is_dead:
            code = worker.process.exitcode
            killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
            yield worker.failure or Died(killed or f"ended with exit code {code}", is_final=False)

    def next_message(self, limit_s: float) -> object:
        """Of any worker. A death raises."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for worker, message in self.receive(LISTEN_S):
                if not isinstance(message, Died):
                    return message
                how = f"{worker.name}: {message.how}; its log is in {self.log_dir}"
                if message.is_final:
                    raise MinirlError(how)
                raise WorkerDied(f"{how}\n{self.log_tail(worker)}")
        raise Stalled(f"no message for {limit_s:.0f} s; stacks:\n{self.stacks()}")

    def log_tail(self, worker: Worker) -> str:
        own = _read(self._log(worker))[worker.log_start :].decode(errors="replace").splitlines()
        return "\n".join(f"  {worker.name} | {line}" for line in own[-LOG_TAIL_LINES:])

    def _log(self, worker: Worker) -> Path:
        return self.log_dir / f"{worker.name}.log"

    def causes(self, workers: list[Worker]) -> list[tuple[Worker, Died]]:
        """The deaths among workers that take each other down, the likeliest cause first: one that
        is final, one that was killed, then the others."""
        _join(workers, CAUSE_GRACE_S)
        dead = [worker for worker in workers if not worker.process.is_alive()]
        found = [(w, m) for w in dead for m in self._drain(w) if isinstance(m, Died)]
        return sorted(found, key=lambda pair: (not pair[1].is_final, pair[0].failure is not None))

    def is_stopped(self, worker: Worker) -> bool:
        """By SIGSTOP or a debugger: then its heartbeat cannot come."""
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        is_here = worker.process is not None and worker.process.is_alive()
        return is_here and psutil.Process(worker.process.pid).status() in stopped

    def stacks(self, of: Sequence[Worker] = ()) -> str:
        """Python stacks of these workers, or of all, through their logs."""
        start = {worker: len(_read(self._log(worker))) for worker in of or self.all}
        asked = [worker for worker in start if worker.process and worker.process.is_alive()]
        for worker in asked:
            os.kill(worker.process.pid, signal.SIGUSR1)
        for worker in (worker for worker in start if worker.box):
            worker.send(signal.SIGUSR1)
        written: dict[Worker, bytes] = {}
        deadline = time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < deadline:
            before, written = written, {w: _read(self._log(w))[start[w] :] for w in start}
            if written == before and all(written[worker] for worker in asked):
                break
            time.sleep(0.25)
        return "\n".join(
            f"--- {worker.name}\n{text.decode(errors='replace') or '(no answer: frozen or gone)'}"
            for worker, text in written.items()
        )

    def retire(self, worker: Worker) -> None:
        """Kills it with all its children: a tensor-parallel engine has processes of its own."""
        if (process := worker.process) is None:
            return
        is_alive = process.is_alive()  # a zombie has none
        children = psutil.Process(process.pid).children(recursive=True) if is_alive else []
        process.kill()
        process.join()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        worker.pipe.close()
        worker.process = None

    def stop(self, goodbye: object) -> None:
        """Ends all: a goodbye, a grace period, then SIGKILL. No process is left afterwards."""
        living = [worker for worker in self.all if worker.process is not None]
        for worker in living:
            worker.send(goodbye)
            worker.pipe.close()
        _join(living, STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        for worker in self.all:
            self.retire(worker)


def _join(workers: list[Worker], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _read(log: Path) -> bytes:
    return log.read_bytes() if log.is_file() else b""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


@contextlib.contextmanager
def signals(handler: Handler = interrupt) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler` meanwhile, also where a shell has had them ignored."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def graceful(stop: Callable[[str], None]) -> Iterator[list[int]]:
    """The first signal calls `stop` with its name; the second ends at once. Gives the signals."""
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if came:
            raise Interrupted
        came.append(number)
        stop(signal.Signals(number).name)

    with signals(handle):
        yield came


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM while a child starts: a half-started child can be neither messaged
    nor killed. Signals that arrive meanwhile are re-raised afterwards. They, and the signal that
    asks for stacks, stay blocked in the child until it has its own handlers."""
    came: list[int] = []
    with signals(lambda number, frame: came.append(number)):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR1))
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for late in came:
        signal.raise_signal(late)


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """A spawned process takes the environment of its parent at that moment. Workers run code of
    tasks and models, so none is given a secret."""
    before = dict(os.environ)
    try:
        os.environ.update(extra)
        for name in filter(SECRET.search, before.keys() - extra.keys()):
            del os.environ[name]
        yield
    finally:
        for name in extra:
            os.environ.pop(name, None)
        os.environ.update(before)


def _child(worker: Worker, board: Board, pipe: Connection, log: Path, delay_s: float) -> None:
    """What every worker process runs."""
    parent, libc = multiprocessing.parent_process(), ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_NAME, f"rl-{worker.name}".encode())  # what top shows, at most 15 letters
    if parent is None or os.getppid() != parent.pid:  # it died before PDEATHSIG was set
        os._exit(1)
    _write_to(log)
    for number in SIGNALS:  # they may come to the whole process group: the controller decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, signal.SIGUSR1))
    tqdm.set_lock(threading.RLock())  # its own lock is a named semaphore, which a kill would leave
    if worker.placement.cores:
        os.sched_setaffinity(0, worker.placement.cores)
    writer = board.writer(worker.row, worker.name)
    writer.enter(State.STARTING)
    time.sleep(delay_s)
    try:
        gc.disable()  # as in engine.py
        body = pkgutil.resolve_name(worker.body)
        gc.enable()
        body(worker.setup, writer, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controller is gone or has closed the pipe
    except Exception as error:
        is_ours = isinstance(error, MinirlError)
        how = str(error) if is_ours else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            pipe.send(Died(how, is_final=is_ours))
        if not is_ours:
            raise  # multiprocessing prints the traceback, into the log
    finally:
        if writer.tracer is not None:
            writer.tracer.close()


class LossyStream:
    """A stream whose disk may be full: what it does not take is lost, and no `print` raises."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return partial(_lossy, found) if name in ("write", "flush") else found


def _lossy(action: Callable[..., object], *args: str) -> None:
    with contextlib.suppress(OSError):
        action(*args)


def _write_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.__stdout__ = LossyStream(sys.stdout)  # type: ignore[assignment,misc]
    sys.stderr = sys.__stderr__ = LossyStream(sys.stderr)  # type: ignore[assignment,misc]
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
