"""One real rollout worker, its engine, its ring, and prompts without end.

Lives in a pinned process of the bench; the worker's messages go to the bench as they would go to
the controller. Answers are as long as the bench says, since its models never end one themselves.
"""

import random
from collections.abc import Callable
from multiprocessing.connection import Connection

from minirl.config import Config, ModelConfig, RolloutConfig, TasksConfig
from minirl.messages import GroupRequest, Submit
from minirl.rollout.engine import Engine, Sampling
from minirl.rollout.worker import Request, RolloutWorker
from minirl.shm.board import Board, Total
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore

SEED = 11


def config_of(
    prompt_tokens: int, new_tokens: int, num_seqs: int, on_update: str, kv_cache_gib: float
) -> Config:
    return Config(
        model=ModelConfig(dtype="float32"),
        tasks=TasksConfig(max_prompt_tokens=prompt_tokens),
        rollout=RolloutConfig(
            max_new_tokens=new_tokens,
            max_num_seqs=num_seqs,
            on_update=on_update,
            kv_cache_gib=kv_cache_gib,
        ),
    )


class LongTailed(RolloutWorker):
    """The worker as it is, but each group has its own length."""

    lengths: dict[int, int]

    def sampling(self, request: Request) -> Sampling:
        length = self.lengths[request.group.group_id]
        return super().sampling(request)._replace(max_tokens=length)


class WaitingWorker(RolloutWorker):
    """What minirl does not do: new weights wait until every running answer is finished, and no
    answer is begun meanwhile, but those of an evaluation that has pinned the weights."""

    def look_at_version(self) -> None:
        if not self.running:
            super().look_at_version()

    def admit(self) -> None:
        if not self.engine.is_behind or self.is_pinned:
            super().admit()


class WaitingLongTailed(WaitingWorker, LongTailed):
    """The same, with lengths of the bench's own."""


class WorkerHarness:
    def __init__(
        self,
        pipe: Connection,
        config: Config,
        folder: str,
        kind: str,
        store: WeightStore,
        kind_of_worker: type[LongTailed] = LongTailed,
        engine: Engine | None = None,
    ):
        self.config, self.board = config, Board(1)
        self.engine = engine or Engine(config, folder, kind, store, SEED)
        if engine is None:
            self.engine.reload()
        num_cells = 4 * config.rollout.max_num_seqs
        ring = TrajectoryRing(num_cells, config.max_tokens_per_trajectory)
        self.worker = kind_of_worker(config, self.engine, ring, self.board.writer(0), pipe)
        self.worker.lengths = {}
        self.num_groups = 0

    def submit(self, prompt: list[int], length: int, size: int = 1) -> None:
        """One group. Cells come round: by then what was in them is long finished."""
        self.num_groups += 1
        first = self.num_groups * size
        cells = tuple((first + i) % self.worker.ring.num_cells for i in range(size))
        self.worker.lengths[self.num_groups] = length
        self.worker.enqueue(Submit((GroupRequest(self.num_groups, tuple(prompt), cells),)))

    @property
    def num_tokens(self) -> float:
        """Sampled since the harness was made."""
        return self.board.total(0, Total.TOKENS)

    @property
    def num_reloads(self) -> float:
        return self.board.total(0, Total.RELOADS)

    def run_until(
        self, is_over: Callable[[], bool], feed: Callable[[], None] | None = None
    ) -> None:
        """Turns of the worker; `feed` keeps a queue of prompts before it."""
        while not is_over():
            if feed is not None:
                while len(self.worker.waiting) < self.config.rollout.max_num_seqs:
                    feed()
            self.worker.turn()

    @property
    def is_idle(self) -> bool:
        return not self.engine.is_busy and not self.worker.waiting

    def clear(self) -> None:
        """Drops what runs and waits, and finishes what the engine still owes (a canary)."""
        groups = {r.group.group_id for r in self.worker.running.values()}
        groups |= {r.group.group_id for _, _, r in self.worker.waiting}
        for group_id in groups:
            self.worker.forget(group_id)
        while self.engine.is_busy:
            self.engine.step()


def random_prompt(rng: random.Random, num_tokens: int, vocab: int) -> list[int]:
    return [rng.randrange(2, vocab) for _ in range(num_tokens)]
