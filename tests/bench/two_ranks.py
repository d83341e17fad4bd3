"""Trainer ranks as a run starts them, timed from outside: what a second device brings."""

import os
import time
from dataclasses import replace

from minirl.config import Config
from minirl.devices import Placement
from minirl.messages import Role, Started, Train, Trained
from tests.bench.batches import Drawn
from tests.bench.processes import processes
from tests.bench.trainer_harness import trainer_setup


def tokens_per_s(
    folder: str, config: Config, drawn: Drawn, num_ranks: int, num_steps: int
) -> float:
    """Of the whole batch, over `num_steps` steps after a first one; one core per rank."""
    cores = sorted(os.sched_getaffinity(0))
    with processes(num_ranks) as here:
        setup = trainer_setup(folder, config, drawn, str(here.folder / "rendezvous"), 0, num_ranks)
        workers = []
        for rank in range(num_ranks):
            core = cores[rank % len(cores)]
            place = Placement("cpu", cores=(core,), env={"OMP_NUM_THREADS": "1"})
            own = replace(setup, rank=rank, placement=place)
            workers.append(here.spawn(Role.TRAIN, "minirl.train.trainer:run", own, place))
        here.wait_for(Started, num_ranks)

        def step() -> None:
            for worker in workers:
                worker.send(Train(drawn.batch))
            here.wait_for(Trained, 1)

        step()
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        seconds = time.perf_counter() - started
    return num_steps * sum(map(len, drawn.sequences)) / seconds
