"""Bodies of tiny workers for test_workers.py, imported by name in their processes."""

import os
import signal
import struct  # noqa: F401 (for `end`)
import subprocess  # noqa: F401 (for `end`)
import sys  # noqa: F401 (for `end`)
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
    """Sends messages, then runs the code, which may be its end."""
    messages, code = setup
    for message in messages:
        pipe.send(message)
    exec(code)
