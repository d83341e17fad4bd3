"""Real worker processes for tests, an inbox that waits for what a worker must say, and a disk that
is as full as one gets it without mounting one."""

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from minirl.devices import Placement, vllm_environment
from minirl.messages import Died
from minirl.shm.weights import WeightStore, canary_tokens
from minirl.workers import Worker, Workers

VOCAB = 384  # of tiny_models.py, which loads torch
LIMIT_S = 600.0  # a hang is a failure, however slow the machine
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TRAINER_PLACE = Placement("cpu", env=ONE_THREAD)
ENGINE_PLACE = Placement("cpu", env={**ONE_THREAD, **vllm_environment("cpu")})
ON_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
CUDA_TRAINER_PLACE = Placement("cuda", env=ON_GPU)
CUDA_ENGINE_PLACE = Placement("cuda", env={**ON_GPU, **vllm_environment("cuda")})

Message = TypeVar("Message")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


def publish(store: WeightStore, version: int, weights: Iterable[Any], canary: Any = 0.0) -> None:
    """As a trainer does it; `weights` in the order of the store's table."""
    with store.publishing(version) as slot:
        slot.fill(weights)
        slot.canary["tokens"] = canary_tokens(VOCAB)
        slot.canary["logprobs"] = canary


class Inbox:
    """Messages of workers that are not taken yet."""

    def __init__(self, workers: Workers):
        self.workers = workers
        self.messages: list[tuple[Worker, object]] = []

    def take(self, worker: Worker, kind: type[Message]) -> Message:
        """The worker's next message of this kind; a death that was not asked for is a failure."""

        def found() -> list[object]:
            own = [message for sender, message in self.messages if sender is worker]
            return [message for message in own if isinstance(message, (kind, Died))]

        self.wait_until(lambda: bool(found()))
        message = found()[0]
        self.messages.remove((worker, message))
        assert isinstance(message, kind), f"{message}\n{self.workers.log_tail(worker)}"
        return message

    def wait_until(self, is_there: Callable[[], bool], listen_s: float = 0.2) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_there():
            assert time.monotonic() < deadline, f"waited in vain; received {self.messages}"
            self.messages += self.workers.receive(listen_s)


@contextmanager
def crew(log_dir: Path, num_workers: int) -> Iterator[Inbox]:
    log_dir.mkdir(parents=True, exist_ok=True)
    workers = Workers(log_dir, num_workers)
    try:
        yield Inbox(workers)
    finally:
        workers.kill()


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Writes past this size fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
