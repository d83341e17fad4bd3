"""Processes of a loop without vLLM: real rollout workers around an engine that only counts, and a
trainer that only publishes. Engines are slow to look at their inbox, each at its own pace."""

import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from minirl.config import Config
from minirl.records import StopReason
from minirl.rollout.engine import Chunk, Sampling
from minirl.rollout.worker import RolloutWorker, Started
from minirl.shm.board import BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import CANARY_TOKENS, TensorSpec, WeightStore
from minirl.train.messages import Ready, Save, Saved, Train, Trained

STEP_S = 0.03
TABLE = (TensorSpec("weight", (4,)),)


@dataclass(frozen=True)
class CountingSetup:
    config: Config
    ring: TrajectoryRing
    store: WeightStore
    rank: int
    slow_s: float  # of its steps, at most
    has_turns: bool = False


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
            self.weight = float(dict(self.store.views(slot))["weight"][0])

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
            chunks.append(Chunk(key, array("i", [7]), [0.0], stop))
            if stop is not None:
                del self.left[key]
        return chunks


def engine(setup: CountingSetup, board: BoardWriter, pipe: Connection) -> None:
    counting: Any = CountingEngine(setup)
    counting.reload()
    pipe.send(Started())
    RolloutWorker(setup.config, counting, setup.ring, board, pipe, setup.has_turns).loop()


def trainer(store: WeightStore, board: BoardWriter, pipe: Connection) -> None:
    """Publishes as fast as it is told to."""
    canary = np.zeros(CANARY_TOKENS, np.float32)
    store.publish(0, [torch.zeros(4)], canary)
    pipe.send(Ready())
    while True:
        board.enter(State.WAITING_FOR_BATCH)
        request = pipe.recv()
        if isinstance(request, Save):
            pipe.send(Saved(request.folder))
            continue
        if not isinstance(request, Train):
            return
        time.sleep(STEP_S)
        version = request.batch.version + 1
        store.publish(version, [torch.full((4,), float(version))], canary)
        ages = [request.batch.version - group.head_version for group in request.batch.groups]
        values: dict[str, float | None] = {
            "train/tokens": 0.0,
            "train/tokens_per_s": 0.0,
            "buffer/staleness_mean": float(np.mean(ages)),
            "buffer/staleness_max": float(max(ages)),
        }
        pipe.send(Trained(version, values))
