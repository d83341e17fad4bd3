"""Trainer ranks as a run starts them, timed from outside: what a second device brings."""

import os
import time
from pathlib import Path

from minirl.config import Config
from minirl.devices import Placement
from minirl.errors import WorkerDied
from minirl.model import weight_table
from minirl.shm.weights import WeightStore
from minirl.train.messages import Ready, Train, Trained, TrainerSetup
from minirl.workers import Died, Fleet, Role, Worker
from tests.bench.batches import Drawn


def tokens_per_s(
    scratch: Path, folder: str, config: Config, drawn: Drawn, num_ranks: int, num_steps: int
) -> float:
    """Of the whole batch, over `num_steps` steps after a first one; one core to a rank."""
    rendezvous = scratch / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    store = WeightStore(weight_table(Path(folder)), "float32")
    cores = sorted(os.sched_getaffinity(0))
    fleet = Fleet(scratch, num_ranks)
    try:
        workers = []
        for rank in range(num_ranks):
            core = cores[rank % len(cores)]
            place = Placement("cpu", cores=(core,), env={"OMP_NUM_THREADS": "1"})
            setup = TrainerSetup(
                config=config,
                folder=folder,
                tokenizer_folder=folder,
                rank=rank,
                num_ranks=num_ranks,
                rendezvous=str(rendezvous),
                placement=place,
                ring=drawn.ring,
                store=store,
                is_resumed=False,
                version=0,
            )
            body = "minirl.train.trainer:run"
            workers.append(fleet.spawn(Role.TRAIN, rank, body, setup, place))
        _wait(fleet, Ready, num_ranks)
        _train(fleet, workers, drawn)
        started = time.perf_counter()
        for _ in range(num_steps):
            _train(fleet, workers, drawn)
        seconds = time.perf_counter() - started
    finally:
        fleet.kill()
    return num_steps * sum(map(len, drawn.sequences)) / seconds


def _train(fleet: Fleet, workers: list[Worker], drawn: Drawn) -> None:
    for worker in workers:
        worker.send(Train(drawn.batch))
    _wait(fleet, Trained, 1)


def _wait(fleet: Fleet, kind: type, count: int) -> None:
    while count:
        for worker, message in fleet.hear(0.2):
            if isinstance(message, Died):
                raise WorkerDied(f"{worker.name} {message.how}\n{fleet.last_words(worker)}")
            count -= isinstance(message, kind)
