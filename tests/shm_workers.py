"""Processes that write and read shared memory until they are killed, for test_shm.py. A
fork server imports torch once: a start takes milliseconds."""

import random
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import crew
import numpy as np
import torch

from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import CANARY_TOKENS, TensorSpec, WeightStore

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "minirl.shm.ring", "minirl.shm.weights"])
SHAPES = {"embed": (301, 67), "scalar": (), "empty": (0, 4), "bias": (13,), "head": (700, 33)}
TABLE = tuple(TensorSpec(name, shape) for name, shape in SHAPES.items())


def started(body: Callable[..., None], *args: Any) -> BaseProcess:
    """The process, after it has sent a message."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=body, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def entry(ticket: int, cell_tokens: int) -> tuple[list[int], list[int], list[float], list[int]]:
    """Prompt, tokens, logprobs and versions: a function of the ticket, lengths too."""
    start = 1 + ticket * 37 % (cell_tokens // 4)
    size = 1 + ticket * 101 % (cell_tokens - start)
    return [ticket] * start, [ticket + 1] * size, [float(-ticket)] * size, [ticket + 2] * size


def write_forever(ring: TrajectoryRing, first_ticket: int, pipe: Connection) -> None:
    pipe.send("writing")
    for ticket in count(first_ticket):
        ring.write(ticket % ring.num_cells, ticket, *entry(ticket, ring.cell_tokens))


def filled(version: int) -> list[torch.Tensor]:
    """Every tensor holds its version's number, nothing else."""
    return [torch.full(spec.shape, float(version)) for spec in TABLE]


def canary(version: int) -> np.ndarray:
    return np.full(CANARY_TOKENS, -float(version), np.float32)


def publish(store: WeightStore, *versions: int) -> None:
    for version in versions:
        crew.publish(store, version, filled(version), canary(version))


def publish_forever(store: WeightStore, pipe: Connection) -> None:
    """In bursts with short rests: readers are lapped all the time, and get through now and then."""
    torch.set_num_threads(1)
    rest = random.Random(1)
    for version in count(store.latest + 1):
        publish(store, version)
        if version == 1:
            pipe.send("publishing")
        if rest.random() < 0.1:
            time.sleep(0.002)


def publish_half(store: WeightStore, version: int, pipe: Connection) -> None:
    """Writes the first tensors into the slot, says so, and never comes to the end."""
    with store.publishing(version) as slot:
        for (_, shared), tensor in zip(store.views(slot.slot), filled(version)[:2], strict=False):
            shared.copy_(tensor)
        pipe.send("half")
        time.sleep(600)


def read_half(store: WeightStore, pipe: Connection) -> None:
    def load(slot: int) -> None:
        next(store.views(slot))[1].clone()
        pipe.send("half")
        time.sleep(600)

    store.read(load)
