"""The processes of a bench: parts in processes of their own, pinned as a run would pin them.

Takes a function that makes a part's state, and calls of functions on it; gives their results.
The bench itself, in the parent, measures nothing: it says what happens when. The environment that
torch and vLLM read at import is set before a part's process starts.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl import devices
from minirl.config import Config
from minirl.devices import Placement, find_devices
from minirl.errors import WorkerDied
from minirl.messages import Died, Role
from minirl.shm.board import BoardWriter
from minirl.workers import Worker, Workers

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


class Processes:
    def __init__(self, folder: Path, num_parts: int):
        self.folder = folder
        self.workers = Workers(folder, num_parts)
        self._received: list[tuple[Worker, object]] = []

    @cached_property
    def _devices(self) -> tuple[str, Any]:
        return find_devices("auto")

    @property
    def kind(self) -> str:
        return self._devices[0]

    @cached_property
    def _places(self) -> tuple[list[Placement], list[Placement]]:
        return devices.place(Config(), *self._devices)

    @property
    def rollout_place(self) -> Placement:
        return self._places[0][0]

    @property
    def train_place(self) -> Placement:
        trainers = self._places[1]
        return trainers[0] if trainers else Placement(self.kind)

    def part(self, place: Placement, make: Callable[..., Any], *arguments: Any) -> Worker:
        """Starts a part. Its first result says that it is made."""
        return self.spawn(Role.SFT, f"{__name__}:serve", Part(make, arguments), place)

    def spawn(self, role: Role, body: str, setup: Any, place: Placement) -> Worker:
        """Starts a worker of a run, real or scripted; ranks count up within a role."""
        rank = len(self.workers.of(role))
        return self.workers.spawn(role, rank, body, setup, place)

    def begin(self, part: Worker, function: Callable[..., Any], *arguments: Any) -> None:
        part.send(Call(function, arguments))

    def result(self, part: Worker, on_message: Callable[[object], None] | None = None) -> Any:
        """Of the call that was begun; the part's other messages go to `on_message`."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            message = self._next_of(part)
            if message is None:
                self._receive()
            elif isinstance(message, Result):
                return message.value
            elif on_message is not None:
                on_message(message)
        raise WorkerDied(f"a part of the bench did not answer in {LIMIT_S:.0f} s")

    def ask(self, part: Worker, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(part, function, *arguments)
        return self.result(part)

    def wait_for(self, kind: type, count: int) -> None:
        """Until so many messages of this kind have come; all others are dropped."""
        while count > 0:
            self._receive()
            count -= sum(isinstance(message, kind) for _, message in self._received)
            self._received.clear()

    def _next_of(self, part: Worker) -> object | None:
        for place, (sender, message) in enumerate(self._received):
            if sender is part:
                del self._received[place]
                return message
        return None

    def _receive(self) -> None:
        for sender, message in self.workers.receive(0.2):
            if isinstance(message, Died):
                words = self.workers.log_tail(sender)
                raise WorkerDied(f"a part of the bench {message.how}\n{words}")
            self._received.append((sender, message))


@contextlib.contextmanager
def processes(num_parts: int, folder: Path | None = None) -> Iterator[Processes]:
    """Parts, their logs and models are gone when the bench is; a folder that is given stays."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="minirl-bench-")
            folder = Path(stack.enter_context(temporary))
        built = Processes(folder, num_parts)
        stack.callback(built.workers.kill)
        yield built
