"""An evaluation is of one version on all engines, while training goes on and engines die."""

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from crew import TRAINER_PLACE
from pinned_crew import TABLE, CountingSetup

from minirl.config import Config
from minirl.evaluation import Evaluation
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.records import Example, Prompt
from minirl.run_log import RunLog
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.workers import Fleet, Role
from tests.bench.controller import Prompts, Silent

NUM_ENGINES, NUM_HELDOUT, STEPS = 2, 24, 80
BASE = Config()
CONFIG = replace(
    BASE,
    devices=replace(BASE.devices, rollout=NUM_ENGINES),
    rollout=replace(BASE.rollout, group_size=2, max_num_seqs=8),
    buffer=replace(BASE.buffer, max_staleness=4, target_staleness=4.0),
    train=replace(BASE.train, steps=STEPS, batch_size=2),
    eval=replace(BASE.eval, every=1, num_prompts=NUM_HELDOUT),
    log=replace(BASE.log, samples=0),
)


KILL_AT = 40


class Watched(Loop):
    """Remembers each evaluation, void or not, and kills an engine in the middle of one."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.evaluations: list[tuple[int, Evaluation]] = []  # with the newest version at its start
        self.killed_in: Evaluation | None = None

    def start_evaluation(self) -> None:
        super().start_evaluation()
        assert self.evaluation is not None
        self.evaluations.append((self.buffer.version, self.evaluation))

    def collect(self) -> None:
        super().collect()
        current = self.evaluation
        if self.killed_in is None and self.step >= KILL_AT and current and not current.pinning:
            waiting = [self.dispatcher.worker_of(group_id) for group_id in current.group_ids]
            if at := [engine for engine in waiting if engine is not None]:
                os.kill(self.engines[max(at)].pid, signal.SIGKILL)  # the slowest that has any
                self.killed_in = current


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Run to its end."""
    folder = tmp_path_factory.mktemp("pinned")
    fleet, store = Fleet(folder, NUM_ENGINES + 2), WeightStore(TABLE, "float32")
    cells = CONFIG.num_slots * CONFIG.rollout.group_size + NUM_HELDOUT
    ring = TrajectoryRing(cells, CONFIG.max_tokens_per_trajectory)
    try:
        fleet.spawn(Role.TRAIN, 0, "pinned_crew:trainer", store, TRAINER_PLACE)
        for rank in range(NUM_ENGINES):
            setup = CountingSetup(CONFIG, ring, store, rank, slow_s=0.004 * 4**rank)
            fleet.spawn(Role.ROLLOUT, rank, "pinned_crew:engine", setup, TRAINER_PLACE)
        body = "tests.bench.scripted:verifier"
        fleet.spawn(Role.VERIFY, 0, body, None, TRAINER_PLACE)
        heldout = [Prompt(i, Example(str(i), "!"), (1, 2, 3)) for i in range(NUM_HELDOUT)]
        log = RunLog(CONFIG, folder, fleet, Silent())
        loop = Watched(CONFIG, fleet, Endless(), heldout, make_buffer(CONFIG), log)
        loop.run()
    finally:
        fleet.kill()
    return loop


class Endless(Prompts):
    """What was lost may come again."""

    def put_back(self, index: int) -> None:
        pass


def test_every_engine_pins_the_version_that_it_began_at(loop: Watched) -> None:
    whole = [(began_at, found) for began_at, found in loop.evaluations if not found.is_void]
    assert len(whole) >= 3
    for began_at, found in whole:
        assert found.version == began_at, "each engine said so, and each answer"
        assert not found.pinning and found.num_answered == NUM_HELDOUT


def test_training_goes_on_meanwhile_and_metrics_tell(loop: Watched) -> None:
    evaluated = loop.log.evals
    assert len({line["version"] for line in evaluated}) == len(evaluated) >= 3
    for line in evaluated:
        assert line["count"] == NUM_HELDOUT and line["failures"] == 0
        assert line["low"] <= line["accuracy"] <= line["high"]
        assert line["truncated_frac"] == 0
    published = {line["version"]: line["seconds"] for line in loop.log.metrics}
    ends = [(line["version"], line["seconds"]) for line in evaluated[:-1]]
    assert any(published[version + 1] < end for version, end in ends), "a step ended meanwhile"


def test_an_evaluation_that_loses_an_engine_is_done_again(loop: Watched) -> None:
    assert loop.killed_in is not None and loop.step == STEPS
    found = [evaluation for _, evaluation in loop.evaluations]
    assert [e.is_void for e in found].count(True) == 1
    assert loop.killed_in.is_void and loop.killed_in.num_lost > 0
    place = [e is loop.killed_in for e in found].index(True)
    assert not found[place + 1].is_void
