"""Bodies of tiny workers for test_workers.py, imported by name in their processes."""

import os
import signal
import struct  # noqa: F401 (for `end`)
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl.devices import Placement
from minirl.errors import MinirlError  # noqa: F401 (for `end`)
from minirl.shm.board import BoardWriter, State

HERE = Path(__file__).parent


def place() -> Placement:
    """The worker finds this module and minirl, however the tests were started."""
    return Placement("cpu", env={"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])})


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
    """Sends messages, then runs the code that is its end."""
    messages, code = setup
    for message in messages:
        pipe.send(message)
    exec(code)


def with_children(setup: Any, board: BoardWriter, pipe: Connection) -> None:
    """Like an engine with tensor parallelism: processes of its own, and theirs."""
    nested = (
        "import subprocess as s; p = s.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", nested], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pipe.send((child.pid, int(child.stdout.readline())))
    time.sleep(600)


def deaf(setup: Any, board: BoardWriter, pipe: Connection) -> None:
    threading.Thread(target=deaf_in_a_thread, daemon=True).start()
    pipe.send("deaf")
    time.sleep(600)


def deaf_in_a_thread() -> None:
    time.sleep(600)
