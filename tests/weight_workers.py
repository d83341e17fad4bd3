"""Processes that publish and read weights: bodies for test_weights.py."""

import random
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection

import numpy as np
import torch

from minirl.shm.weights import CANARY_TOKENS, TensorSpec, WeightStore

TABLE = (
    TensorSpec("embed", (301, 67)),
    TensorSpec("scalar", ()),
    TensorSpec("bias", (13,)),
    TensorSpec("head", (700, 33)),
)


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


def publish_once(store: WeightStore, version: int, pipe: Connection) -> None:
    store.publish(version, filled(version), canary(version))
    pipe.send("published")


def publish_half(store: WeightStore, version: int, pipe: Connection) -> None:
    """Writes the first tensors, says so, and never comes to the end."""

    def stuck() -> Iterator[torch.Tensor]:
        whole = filled(version)
        yield from whole[:2]
        pipe.send("half")
        time.sleep(600)
        yield from whole[2:]

    store.publish(version, stuck(), canary(version))


def read_half(store: WeightStore, pipe: Connection) -> None:
    def load(slot: int) -> None:
        next(store.views(slot))[1].clone()
        pipe.send("half")
        time.sleep(600)

    store.read(load)
