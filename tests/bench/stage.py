"""Where a bench plays: parts in processes of their own, pinned as a run would pin them.

Takes a function that makes a part's state, and calls of functions on it; gives their results.
The bench itself, in the parent, measures nothing: it says what happens when. The environment that
torch and vLLM read at import is set before a part's process starts.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl import devices
from minirl.config import Config
from minirl.devices import Placement, find_devices
from minirl.errors import WorkerDied
from minirl.shm.board import BoardWriter
from minirl.workers import Died, Fleet, Role, Worker

LIMIT_S = 600.0  # for one call; a bench that hangs says so


@dataclass(frozen=True)
class Call:
    function: Callable[..., Any]  # of the part's state and the arguments
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    value: Any


@dataclass(frozen=True)
class Part:
    """`make` gets the part's end of the pipe and the arguments, gives the state of all calls."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]


def serve(part: Part, board: BoardWriter, pipe: Connection) -> None:
    """The body of a part's process. What is not a Call ends it."""
    state = part.make(pipe, *part.arguments)
    pipe.send(Result(None))
    while isinstance(call := pipe.recv(), Call):
        pipe.send(Result(call.function(state, *call.arguments)))


class Stage:
    def __init__(self, folder: Path, num_parts: int):
        self.folder = folder
        self.fleet = Fleet(folder, num_parts)
        self.kind, available = find_devices("auto")
        engines, trainers = devices.place(Config(), self.kind, available)
        self.rollout_place: Placement = engines[0]
        self.train_place: Placement = trainers[0] if trainers else Placement(self.kind)
        self._heard: list[tuple[Worker, object]] = []

    def part(self, place: Placement, make: Callable[..., Any], *arguments: Any) -> Worker:
        """Starts a part. Its first result says that it is made."""
        rank = len(self.fleet.workers)
        body = "tests.bench.stage:serve"
        return self.fleet.spawn(Role.BENCH, rank, body, Part(make, arguments), place)

    def begin(self, part: Worker, function: Callable[..., Any], *arguments: Any) -> None:
        part.send(Call(function, arguments))

    def result(self, part: Worker, on_message: Callable[[object], None] | None = None) -> Any:
        """Of the call that was begun; what else the part says on the way goes to `on_message`."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            left = []
            for place, (sender, message) in enumerate(self._heard):
                if isinstance(message, Died):
                    words = self.fleet.last_words(sender)
                    raise WorkerDied(f"a part of the bench {message.how}\n{words}")
                if sender is not part:
                    left.append((sender, message))
                elif isinstance(message, Result):
                    self._heard = left + self._heard[place + 1 :]
                    return message.value
                elif on_message is not None:
                    on_message(message)
            self._heard = left + list(self.fleet.hear(0.2))
        raise WorkerDied(f"a part of the bench did not answer in {LIMIT_S:.0f} s")

    def ask(self, part: Worker, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(part, function, *arguments)
        return self.result(part)


@contextlib.contextmanager
def stage(num_parts: int) -> Iterator[Stage]:
    """Parts, their logs and models are gone when the bench is."""
    with tempfile.TemporaryDirectory(prefix="minirl-bench-") as folder:
        built = Stage(Path(folder), num_parts)
        try:
            yield built
        finally:
            built.fleet.kill()
