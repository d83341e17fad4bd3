"""Processes: spawned, heard, replaced, ended. Takes bodies and their set-up, gives messages.

Each worker has its own pipe and no lock with anybody, so one that is killed at any instant blocks
nobody: its pipe ends, and that is news like any other. Nor does one that is frozen or has not come
up yet: what it does not take waits here. Only small messages go through pipes.
A worker's output goes to a log of its own in the run directory; its tail is its last words.
A worker dies with the controller, whatever kills that, and takes no notice of Ctrl-C or SIGTERM.

Leaves out: which workers there are and why (launch.py), and what messages mean (loop.py).
"""

import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from minirl import devices
from minirl.devices import Placement
from minirl.errors import Interrupted, MinirlError, Stalled, WorkerDied
from minirl.shm.board import Board
from minirl.shm.tracer import TraceFile, Tracer

LOG_TAIL_LINES = 12
STOP_GRACE_S = 10.0
STACKS_WAIT_S = 10.0  # a frozen worker never answers
CAUSE_GRACE_S = 1.0  # a rank that is killed takes the others with it, and theirs may be heard first
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECRET = re.compile(r"(?!TOKENIZER)TOKEN|SECRET|PASSW|CREDENTIAL|KEY$|APIKEY", re.I)
LISTEN_S = 0.2

Message = TypeVar("Message")


class Role(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"
    VERIFY = "verify"
    WARMUP = "warmup"  # makes the tiny model, before the others
    SFT = "sft"  # a rank of `minirl sft`
    BENCH = "bench"  # a part of a benchmark


@dataclass(frozen=True)
class Failed:
    """A worker's own account of why it ends."""

    message: str
    is_ours: bool  # a MinirlError: a new worker would fail just so


@dataclass(frozen=True)
class Died:
    """The worker is gone and every message it sent was heard."""

    how: str
    is_final: bool  # it said itself that it cannot go on


class Worker:
    """`body` names the function that the process runs, "module:function" of (setup, board, pipe):
    it is imported there, so that the controller loads neither vLLM nor a model's code.
    """

    def __init__(self, role: Role, rank: int, row: int, body: str, setup: Any, place: Placement):
        self.role, self.rank, self.row = role, rank, row
        self.body, self.setup, self.placement = body, setup, place
        self.name = f"{role}-{rank}"
        self.num_starts = 0
        self.process: Any = None
        self.pipe: Connection
        self.failure: Failed | None = None
        self._outbox = bytearray()

    def send(self, message: object) -> None:
        """Never waits: what the worker does not take now goes out at a later `receive`, which also
        reports one that just died."""
        body = bytes(ForkingPickler.dumps(message))
        self._outbox += struct.pack("!i", len(body)) + body  # as Connection.send does it
        self.flush()

    def flush(self) -> None:
        if not self._outbox or self.pipe.closed:
            return
        end = socket.socket(fileno=self.pipe.fileno())
        try:
            while self._outbox:
                del self._outbox[: end.send(self._outbox, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()
        finally:
            end.detach()  # the pipe's still

    def connect(self, pipe: Connection) -> None:
        """A new process begins with an empty record."""
        self.pipe, self.failure = pipe, None
        self._outbox.clear()
        self.num_starts += 1

    def is_alive(self) -> bool:
        return self.process is not None and bool(self.process.is_alive())

    @property
    def pid(self) -> int:
        return self.process.pid


class Workers:
    def __init__(self, log_dir: Path, num_workers: int, trace: Path | None = None):
        self.log_dir = log_dir
        self._trace = TraceFile(trace) if trace else None
        if self._trace:
            self._trace.begin()
        self.board = Board(num_workers)
        self.all: list[Worker] = []
        # torch.multiprocessing is this plus a way to send tensors. None goes through a pipe here:
        # so the controller need not load torch.
        self._context = multiprocessing.get_context("spawn")

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.all if worker.role is role]

    def spawn(self, role: Role, rank: int, body: str, setup: Any, place: Placement) -> Worker:
        worker = Worker(role, rank, len(self.all), body, setup, place)
        self.all.append(worker)
        self._start(worker)
        return worker

    def _start(self, worker: Worker, delay_s: float = 0.0) -> None:
        ours, theirs = self._context.Pipe()
        worker.connect(ours)
        self.board.reset(worker.row)
        log = self.log_dir / f"{worker.name}.log"
        process = self._context.Process(
            target=_child,
            args=(worker.body, worker.setup, worker.placement, self.board, worker.row),
            kwargs={
                "pipe": theirs,
                "log": log,
                "parent": os.getpid(),
                "trace": self._trace,
                "delay_s": delay_s,
            },
            name=f"minirl-{worker.name}",
        )
        # Workers run code of tasks and models: none is given a token.
        hidden = [name for name in os.environ if SECRET.search(name)]
        if self._context.get_start_method() == "spawn":
            resource_tracker.ensure_running()  # here, since the first time it unblocks signals
        with _environment(worker.placement.env, hidden), _undisturbed():
            process.start()  # type: ignore[attr-defined]
            worker.process = process
        theirs.close()

    def receive(self, timeout_s: float) -> Iterator[tuple[Worker, object]]:
        """Messages, as they come; at most one `timeout_s` of silence."""
        by_handle: dict[Any, Worker] = {}
        for worker in self.all:
            if worker.process is not None:
                worker.flush()
                by_handle[worker.pipe] = by_handle[worker.process.sentinel] = worker
        heard = {id(w): w for w in (by_handle[h] for h in wait(list(by_handle), timeout_s))}
        for worker in heard.values():
            yield from ((worker, message) for message in self._drain(worker))

    def _drain(self, worker: Worker) -> Iterator[object]:
        is_dead = not worker.process.is_alive()  # asked first: what it sent is in the pipe by now
        try:
            while worker.pipe.poll():
                message = worker.pipe.recv()
                if isinstance(message, Failed):
                    worker.failure = message
                else:
                    yield message
        except (EOFError, OSError):  # OSError too: it was killed in the middle of a long message
            worker.process.join(STOP_GRACE_S)
            is_dead = True
        if is_dead:
            failure = worker.failure
            yield Died(self.exit_reason(worker), bool(failure and failure.is_ours))

    def wait_for(self, kind: type[Message], limit_s: float) -> Message:
        """The next message of this kind; others are not kept. A death raises."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for worker, message in self.receive(LISTEN_S):
                if isinstance(message, Died):
                    raise self.exit_error(worker, message)
                if isinstance(message, kind):
                    return message
        what = kind.__name__.lower()
        raise Stalled(f"no {what} for {limit_s:.0f} s; stacks:\n{self.stacks()}")

    def exit_error(self, worker: Worker, death: Died) -> MinirlError:
        how = f"{worker.name}: {death.how}; its log is in {self.log_dir}"
        return MinirlError(how) if death.is_final else WorkerDied(f"{how}\n{self.log_tail(worker)}")

    def exit_reason(self, worker: Worker) -> str:
        if worker.failure:
            return worker.failure.message
        code = worker.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def log_tail(self, worker: Worker) -> str:
        path = self.log_dir / f"{worker.name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return "\n".join(f"  {worker.name} | {line}" for line in lines[-LOG_TAIL_LINES:])

    def replace(self, worker: Worker, delay_s: float = 0.0) -> None:
        """A new process in the place of one that died or must go. With a delay it is there at once
        and takes messages, but begins its work later."""
        if worker.process is not None:
            self._end(worker)
        self._start(worker, delay_s)

    def causes(self, workers: list[Worker]) -> list[tuple[Worker, Died]]:
        """The deaths among workers that take each other down, the likeliest cause first: one that
        says it cannot go on, one that was killed, then the others."""
        found = []
        deadline = time.monotonic() + CAUSE_GRACE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                continue
            deaths = [message for message in self._drain(worker) if isinstance(message, Died)]
            found += [(worker, death) for death in deaths]

        def rank(pair: tuple[Worker, Died]) -> int:
            worker, death = pair
            was_killed = worker.failure is None and (worker.process.exitcode or 0) < 0
            return 0 if death.is_final else 1 if was_killed else 2

        return sorted(found, key=rank)

    def is_stopped(self, worker: Worker) -> bool:
        """By SIGSTOP or a debugger: it could not beat if it wanted to."""
        try:
            stat = Path(f"/proc/{worker.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def retire(self, worker: Worker) -> None:
        self._end(worker)
        worker.process = None

    def _end(self, worker: Worker) -> None:
        _kill_tree(worker.process)
        worker.pipe.close()

    def stacks(self) -> str:
        """Every worker's Python stacks, through its log."""
        logs = {worker: self.log_dir / f"{worker.name}.log" for worker in self.all}
        start = {worker: _size(log) for worker, log in logs.items()}
        asked = [worker for worker in self.all if logs[worker].is_file() and worker.is_alive()]
        for worker in asked:  # without a log there is no handler yet: the signal would kill it
            os.kill(worker.pid, signal.SIGUSR1)
        sizes: dict[Worker, int] = {}
        deadline = time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < deadline:
            before, sizes = sizes, {worker: _size(logs[worker]) for worker in asked}
            if sizes == before and all(sizes[worker] > start[worker] for worker in asked):
                break
            time.sleep(0.25)
        parts = []
        for worker, log in logs.items():
            text = (
                log.read_bytes()[start[worker] :].decode(errors="replace") if log.is_file() else ""
            )
            parts.append(f"--- {log.stem}\n{text or '(no answer: frozen or gone)'}")
        return "\n".join(parts)

    def stop(self, goodbye: object) -> None:
        """Ends all, gently first: a goodbye, a grace, then the axe. Nothing is left afterwards."""
        living = [worker for worker in self.all if worker.process is not None]
        for worker in living:
            worker.send(goodbye)
            worker.pipe.close()
        deadline = time.monotonic() + STOP_GRACE_S
        for worker in living:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for worker in self.all:
            if worker.process is not None:
                _kill_tree(worker.process)
                worker.process = None


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


@contextlib.contextmanager
def signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers = interrupt,
) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler` meanwhile, also where a shell has had them ignored."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def graceful(stop: Callable[[str], None]) -> Iterator[list[int]]:
    """The first signal calls `stop` with its name; the second ends at once. Gives those that
    came."""
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if came:
            raise Interrupted
        came.append(number)
        stop(signal.Signals(number).name)

    with signals(handle):
        yield came


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _kill_tree(process: Any) -> None:
    """A vLLM engine may have children of its own (tensor parallelism): they go with it."""
    children = _children(process.pid) if process.is_alive() else []
    process.kill()
    process.join()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        direct = [int(child) for child in path.read_text().split()]
    except OSError:
        return []
    return direct + [grandchild for child in direct for grandchild in _children(child)]


@contextlib.contextmanager
def _environment(extra: dict[str, str], hidden: list[str]) -> Iterator[None]:
    """A spawned process takes the environment of its parent at that moment."""
    before = {key: os.environ.get(key) for key in (*extra, *hidden)}
    os.environ.update(extra)
    for key in hidden:
        os.environ.pop(key, None)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While a process is started: one that is half started could neither be heard nor ended. What
    comes meanwhile comes afterwards. And blocked, as the new process inherits it, until that can
    say that it takes no notice."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's business
        return
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with signals(lambda number, frame: came.append(number)):
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        for late in came:
            signal.raise_signal(late)


def _child(
    body: str,
    setup: Any,
    placement: Placement,
    board: Board,
    row: int,
    *,
    pipe: Connection,
    log: Path,
    parent: int,
    trace: TraceFile | None,
    delay_s: float,
) -> None:
    """What every worker process runs."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_NAME, f"rl-{log.stem}".encode())  # what top shows, at most 15 letters
    if os.getppid() != parent:  # it died before we could ask to die with it
        os._exit(1)
    for number in SIGNALS:  # they may come to the whole process group: the controller decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a reward's own children may want them
    _write_to(log)
    tqdm.set_lock(threading.RLock())  # its own lock is a named semaphore, which a kill would leave
    devices.bind(placement)
    writer = board.writer(row)
    if trace is not None:
        writer.tracer = Tracer(trace, log.stem)
        writer.tracer.state("starting", {})
    time.sleep(delay_s)
    try:
        module, _, function = body.partition(":")
        getattr(importlib.import_module(module), function)(setup, writer, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controller is gone or has closed the pipe: nothing left to do
    except MinirlError as error:
        _report(pipe, Failed(str(error), is_ours=True))
    except Exception as error:
        traceback.print_exc()
        _report(pipe, Failed(f"{type(error).__name__}: {error}", is_ours=False))
    finally:
        if writer.tracer is not None:
            writer.tracer.close()
        sys.stdout.flush()
        sys.stderr.flush()


def _report(pipe: Connection, failure: Failed) -> None:
    with contextlib.suppress(OSError):
        pipe.send(failure)


class LossyStream:
    """A stream whose disk may be full: what it does not take is lost, and no `print` raises."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = sys.__stdout__ = LossyStream(sys.stdout)  # type: ignore[assignment,misc]
    sys.stderr = sys.__stderr__ = LossyStream(sys.stderr)  # type: ignore[assignment,misc]
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
