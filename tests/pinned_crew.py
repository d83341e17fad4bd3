"""Processes of a loop without vLLM: real rollout workers around an engine that only counts, and a
trainer that only publishes. Engines are slow to look at their inbox, each at its own pace."""

import multiprocessing
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from crew import TRAINER_PLACE
from fault_bodies import Script

from minirl.config import Config
from minirl.messages import Role, Started
from minirl.records import StopReason
from minirl.rollout.engine import Chunk, Sampling
from minirl.rollout.worker import RolloutWorker
from minirl.shm.board import BoardWriter
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import TensorSpec, WeightStore
from minirl.workers import Workers

TABLE = (TensorSpec("w", (1,)),)


@dataclass(frozen=True)
class CountingSetup:
    config: Config
    ring: TrajectoryRing
    store: WeightStore
    rank: int
    slow_s: float  # of its steps, at most


class CountingEngine:
    """Answers have 1 to 12 tokens; the weights of version v are v."""

    kv_tokens = 10**6

    def __init__(self, setup: CountingSetup):
        self.store, self.slow_s = setup.store, setup.slow_s
        self.dice = random.Random(setup.rank)
        self.left: dict[int, int] = {}
        self.version, self.weight = -1, -1.0

    @property
    def is_behind(self) -> bool:
        return self.store.latest > self.version

    @property
    def is_busy(self) -> bool:
        return bool(self.left)

    def reload(self) -> float:
        def load(slot: int) -> None:
            self.weight = float(dict(self.store.views(slot))["w"][0])

        self.version = self.store.read(load).version
        assert self.weight == self.version
        return 0.0

    def add(self, key: int, prompt: Sequence[int], sampling: Sampling, priority: int) -> None:
        self.left[key] = self.dice.randint(1, 12)

    def abort(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self.left[key]

    def step(self) -> list[Chunk]:
        time.sleep(self.dice.uniform(0, self.slow_s))
        chunks = []
        for key in list(self.left):
            self.left[key] -= 1
            stop = None if self.left[key] else StopReason.STOP
            chunks.append(Chunk(key, self.version, array("i", [7]), [0.0], stop))
            if stop is not None:
                del self.left[key]
        return chunks


def engine(setup: CountingSetup, board: BoardWriter, pipe: Connection) -> None:
    counting: Any = CountingEngine(setup)
    counting.reload()
    pipe.send(Started())
    RolloutWorker(setup.config, counting, setup.ring, board, pipe, has_turns=True).loop()


@contextmanager
def crew_of(
    config: Config, folder: Path, slow_s: Sequence[float]
) -> Iterator[tuple[Workers, TrajectoryRing]]:
    """A trainer and as many engines as there are paces. The verifiers are the test's."""
    workers = Workers(folder, len(slow_s) + 1 + config.tasks.verifiers)
    # Forked: what they need is loaded here, and each would take seconds to load torch.
    workers._context = multiprocessing.get_context("fork")
    store, cells = WeightStore(TABLE, "float32"), config.num_slots * config.rollout.group_size
    ring = TrajectoryRing(cells + config.eval.num_prompts, config.max_tokens_per_trajectory)
    try:
        rendezvous = str(folder / "rendezvous")
        script = Script(store, rendezvous=rendezvous, eta=config.buffer.max_staleness)
        workers.spawn(Role.TRAIN, 0, "fault_bodies:trainer", script, TRAINER_PLACE)
        for rank, pace_s in enumerate(slow_s):
            setup = CountingSetup(config, ring, store, rank, pace_s)
            workers.spawn(Role.ROLLOUT, rank, "pinned_crew:engine", setup, TRAINER_PLACE)
        yield workers, ring
    finally:
        workers.kill()
