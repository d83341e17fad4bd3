"""Processes that write and read shared memory, until they are killed: bodies for test_ring.py and
test_weights.py.

A fork server imports torch once and forks each process from there: a start takes milliseconds.
"""

import random
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import CANARY_TOKENS, TensorSpec, WeightStore

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "minirl.shm.ring", "minirl.shm.weights"])

TABLE = (
    TensorSpec("embed", (301, 67)),
    TensorSpec("scalar", ()),
    TensorSpec("bias", (13,)),
    TensorSpec("head", (700, 33)),
)


def started(body: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """The process, after it has sent its first message, and the pipe from it."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=body, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    return process, ours


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


# The ring -------------------------------------------------------------------------------------


def entry(ticket: int, cell_tokens: int) -> tuple[list[int], list[int], list[float], list[int]]:
    """Prompt, tokens, logprobs and versions: a function of the ticket, lengths too."""
    start = 1 + ticket * 37 % (cell_tokens // 4)
    num_written = 1 + ticket * 101 % (cell_tokens - start)
    return (
        [ticket] * start,
        [ticket + 1] * num_written,
        [float(-ticket)] * num_written,
        [ticket + 2] * num_written,
    )


def write_forever(ring: TrajectoryRing, first_ticket: int, pipe: Connection) -> None:
    pipe.send("writing")
    for ticket in count(first_ticket):
        ring.write(ticket % ring.num_cells, ticket, *entry(ticket, ring.cell_tokens))


# The weights ----------------------------------------------------------------------------------


def filled(version: int) -> list[torch.Tensor]:
    """Every tensor holds its version's number, nothing else."""
    return [torch.full(spec.shape, float(version)) for spec in TABLE]


def canary(version: int) -> np.ndarray:
    return np.full(CANARY_TOKENS, -float(version), np.float32)


def publish_forever(store: WeightStore, pipe: Connection) -> None:
    """In bursts with short rests: readers are lapped all the time, and get through now and then."""
    torch.set_num_threads(1)
    rest = random.Random(1)
    for version in count(store.latest + 1):
        store.publish(version, filled(version), canary(version))
        if version == 1:
            pipe.send("publishing")
        if rest.random() < 0.1:
            time.sleep(0.002)


def publish_half(store: WeightStore, version: int, pipe: Connection) -> None:
    """Writes the first tensors into the slot, says so, and never comes to the end."""
    with store.publishing(version) as slot:
        for shared, tensor in zip(slot.tensors[:2], filled(version)[:2], strict=True):
            shared.copy_(tensor)
        pipe.send("half")
        time.sleep(600)


def publish_once(store: WeightStore, version: int, pipe: Connection) -> None:
    store.publish(version, filled(version), canary(version))
    pipe.send("published")


def read_half(store: WeightStore, pipe: Connection) -> None:
    def load(slot: int) -> None:
        next(store.views(slot))[1].clone()
        pipe.send("half")
        time.sleep(600)

    store.read(load)
