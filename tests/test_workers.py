"""Worker processes: whatever happens to one is reported, and nothing is left of it. That they die
with a killed controller is in test_supervisor.py."""

import os
import signal
import struct  # noqa: F401 (for `end`)
import subprocess  # noqa: F401 (for `end`)
import sys  # noqa: F401 (for `end`)
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases import each_case
from processes import LIMIT_S, TRAINER_PLACE, Inbox, crew, wait_until

from minirl import workers as workers_module
from minirl.errors import MinirlError  # noqa: F401 (for `end`)
from minirl.messages import Died, Role
from minirl.shm.board import BoardWriter, State
from minirl.workers import LOG_TAIL_LINES, Worker, Workers, signals


class Late:
    """A set-up during whose pickling, which is when a worker is started, a signal comes."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return Late, ()


def echo(setup: Any, board: BoardWriter, pipe: Connection) -> None:
    """Says its set-up and its process, then repeats what it hears until it hears None."""
    board.enter(State.GENERATING)
    pipe.send((setup, os.getpid()))
    while (message := pipe.recv()) is not None:
        pipe.send(message)


def end(setup: tuple[list[Any], str], board: BoardWriter, pipe: Connection) -> None:
    """Sends messages, then runs the code, which may be its end."""
    messages, code = setup
    for message in messages:
        pipe.send(message)
    exec(code)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with crew(tmp_path, num_workers=3) as inbox:
        yield inbox.workers


def start(workers: Workers, body: str, setup: Any = None) -> Worker:
    rank = len(workers.all)
    return workers.spawn(Role.VERIFY, rank, f"test_workers:{body}", setup, TRAINER_PLACE)


def messages(workers: Workers, count: int) -> list[Any]:
    """The next ones, at least so many."""
    inbox = Inbox(workers)
    inbox.wait_until(lambda: len(inbox.messages) >= count)
    return [message for _, message in inbox.messages]


def is_left(pids: list[int]) -> bool:
    """A zombie is gone: its parent only has not asked yet."""
    found = [p for p in psutil.process_iter(["status"]) if p.pid in pids]
    return any(p.info["status"] != psutil.STATUS_ZOMBIE for p in found)


CHILDREN = """
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=-1, text=True)
pipe.send((child.pid, int(child.stdout.readline())))
time.sleep(600)
"""  # as an engine with tensor parallelism has them
DEAF = (["deaf"], "time.sleep(600)")
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@each_case("deaths")
def test_a_death_is_reported_after_all_messages(case: dict[str, str], workers: Workers) -> None:
    """Also of a worker that is killed half-way through a message."""
    code, how = case.values()
    worker = start(workers, "end", ([*range(200)], code))
    *received, died = messages(workers, 201)
    assert received == [*range(200)]
    assert died == Died(how, is_final="MinirlError" in code), "only our own error is final"
    log = workers.log_tail(worker)
    assert ("line" in log and "Traceback" in log) == ("Zero" in how)
    assert len(log.splitlines()) <= LOG_TAIL_LINES
    worker.send("to a dead one")  # not an error: `receive` says so


def test_a_replaced_worker_is_new_and_nothing_is_left_of_the_old_one(workers: Workers) -> None:
    worker = start(workers, "end", ([], KILL))
    assert messages(workers, 1) == [Died("was killed by SIGKILL", is_final=False)]
    gone = [worker.process.pid]
    worker.setup = ([], CHILDREN)
    workers.replace(worker)  # it is dead
    gone += [*messages(workers, 1)[0], worker.process.pid]
    worker.body, worker.setup = "test_workers:echo", "mine"
    workers.replace(worker)  # it lives
    last = worker.process.pid
    assert messages(workers, 1) == [("mine", last)]
    assert worker.num_starts == 3 and last not in gone
    workers.retire(worker)
    assert list(workers.receive(0.05)) == []
    wait_until(lambda: not is_left([*gone, last]))


@pytest.mark.parametrize("is_polite", [True, False])
def test_stop_and_kill(is_polite: bool, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither leaves a process, and stop lets them end by themselves."""
    polite, deaf = start(workers, "echo").process, start(workers, "end", DEAF).process
    # The grace lasts until the polite one has ended.
    monkeypatch.setattr(workers_module, "_join", lambda *_: polite.join(LIMIT_S))
    messages(workers, 2)
    if is_polite:
        workers.stop(goodbye=None)
        assert polite.exitcode == 0
    else:
        workers.kill()
    wait_until(lambda: not is_left([polite.pid, deaf.pid]))
    workers.kill()  # once more is no error


def test_a_signal_that_comes_while_a_worker_starts_waits_until_it_has(workers: Workers) -> None:
    with pytest.raises(KeyboardInterrupt), signals():
        start(workers, "echo", Late())
    (worker,) = workers.all
    assert messages(workers, 1)[0][1] == worker.process.pid, "it is there, and can be ended"


def test_stacks_name_the_function_that_a_worker_is_stuck_in(workers: Workers) -> None:
    start(workers, "end", DEAF)
    assert messages(workers, 1) == ["deaf"]  # alone: a death is reported again and again
    gone = start(workers, "end", ([], "sys.exit(3)"))
    messages(workers, 1)
    parts = dict(part.split("\n", 1) for part in workers.stacks().split("--- ") if part)
    assert "in end" in parts["verify-0"]
    assert "no answer" in parts[gone.name]
