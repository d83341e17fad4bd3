"""The real controller around any workers. Takes a recipe and processes that are started, runs the
loop to its end, gives the lines of its metrics, its buffer and the CPU time that it took.

The only module of the benches that builds the controller's own parts.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.buffer import Buffer
from minirl.config import Config
from minirl.loop import Loop
from minirl.messages import Stop
from minirl.records import Example, Prompt
from minirl.run_log import RunLog, View
from minirl.tasks.prompts import Consumed
from minirl.workers import Workers

Around = Callable[[Loop], AbstractContextManager[object]]


class Silent:
    """A view that shows nothing."""

    def note(self, text: str) -> None: ...

    def step(self, line: dict[str, Any]) -> None: ...


class Prompts:
    """An endless stream of one prompt."""

    def __init__(self) -> None:
        self.consumed = Consumed()
        self._next = 0

    def next(self) -> Prompt:
        self._next += 1
        return Prompt(self._next - 1, Example("?", "!"), (1, 2, 3))

    @property
    def waiting(self) -> list[int]:
        return []

    def put_back(self, index: int) -> None:
        raise AssertionError(f"no worker is lost here, and so no prompt, not even {index}")


@dataclass(frozen=True)
class LoopRun:
    lines: list[dict[str, Any]]
    buffer: Buffer
    cpu_s: float


def run_loop(
    config: Config,
    workers: Workers,
    folder: Path,
    view: View,
    prompts: Prompts | None = None,
    around: Sequence[Around] = (),
) -> LoopRun:
    """`around`: contexts that are entered before the loop runs and left when it has ended."""
    prompts = prompts or Prompts()
    no_saver: Any = None  # no batch of it is bad
    log = RunLog(config, folder, workers, view, no_saver)
    buffer = Buffer(config.train.batch_size, config.buffer.max_staleness)
    heldout = [prompts.next()]
    loop = Loop(config, workers, prompts, heldout, buffer, log)  # type: ignore[arg-type]
    started = time.process_time()
    with ExitStack() as stack:
        for enter in around:
            stack.enter_context(enter(loop))
        loop.run()
    cpu_s = time.process_time() - started
    workers.stop(Stop())
    log.close()
    return LoopRun(log.metrics, buffer, cpu_s)
