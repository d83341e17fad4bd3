"""Loggers that fail in one way each, and one that does not; run as real processes."""

import errno
import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from minirl.shm.board import BoardWriter
from minirl.view import loggers
from minirl.view.loggers import LoggerSetup


class RaisesAtOnce:
    def __init__(self, setup: LoggerSetup):
        raise ValueError("no such project")


class DiskFull:
    def __init__(self, setup: LoggerSetup):
        pass

    def write(self, step: int, values: dict[str, float]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Hangs:
    def __init__(self, setup: LoggerSetup):
        time.sleep(1000)


class Keeps:
    def __init__(self, setup: LoggerSetup):
        self._path = Path(setup.run_dir) / "kept.jsonl"

    def write(self, step: int, values: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([step, values]) + "\n")

    def close(self) -> None:
        pass


def run(setup: LoggerSetup, board: BoardWriter, pipe: Connection) -> None:
    bodies = {"raises_at_once": RaisesAtOnce, "disk_full": DiskFull, "hangs": Hangs, "keeps": Keeps}
    loggers.LOGGERS.update(bodies)  # type: ignore[arg-type]
    loggers.run(setup, board, pipe)
