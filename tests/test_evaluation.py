"""An evaluation is of one version on all engines, while training goes on and engines die. It counts
what was graded and leaves out what could not be."""

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from crew import TRAINER_PLACE
from pinned_crew import crew_of

from minirl.config import Config
from minirl.evaluation import EVAL_IDS, Evaluation
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.records import Example, Prompt, StopReason, Trajectory
from minirl.run_log import RunLog
from minirl.workers import Role
from tests.bench.loop_harness import Prompts, Silent


def evaluation(count: int) -> Evaluation:
    prompts = [Prompt(i, Example(str(i), str(i)), (i,)) for i in range(count)]
    return Evaluation(prompts, first_cell=100)


def answer(head: int, tail: int | None = None, stop: StopReason = StopReason.STOP) -> Trajectory:
    return Trajectory(0, 2, 1, stop, head, head if tail is None else tail)


def test_accuracy_is_the_mean_of_what_was_graded() -> None:
    run = evaluation(4)
    for group_id in run.group_ids:
        assert not run.is_done
        stop = StopReason.LENGTH if group_id == EVAL_IDS else StopReason.STOP
        run.answered(answer(7, stop=stop))
        if group_id == EVAL_IDS + 3:
            run.failed()  # no verdict is not a 0
        else:
            run.graded(group_id, float(group_id != EVAL_IDS))
    assert run.is_done and not run.is_void
    result = run.result
    assert result["accuracy"] == 2 / 3 and result["low"] < 2 / 3 < result["high"]
    assert (result["count"], result["failures"], result["truncated_frac"]) == (3, 1, 0.25)
    assert run.version == 7
    ungraded = evaluation(1)
    ungraded.failed()
    assert ungraded.is_done and ungraded.result["accuracy"] is None and ungraded.version is None


@pytest.mark.parametrize("case", ["pinned", "begun", "finished"])
def test_two_versions_make_it_void(case: str) -> None:
    run = evaluation(2)
    run.pinning |= {0, 1}
    run.pinned(0, 7)
    assert run.pinning == {1}
    run.pinned(1, 8 if case == "pinned" else 7)
    assert not run.pinning and run.is_void == (case == "pinned")
    if case != "pinned":
        run.answered(answer(8) if case == "begun" else answer(7, 8))
    assert run.is_void


def test_a_dead_engine_s_prompts_are_lost_and_make_it_void() -> None:
    run = evaluation(3)
    run.pinning |= {0, 1}
    run.engine_died(1, 0)  # it had none
    assert run.pinning == {0} and not run.is_void
    run.engine_died(0, 2)
    assert run.is_void and not run.is_done
    run.graded(EVAL_IDS, 1.0)
    assert run.is_done


# A whole loop without vLLM ------------------------------------------------------------------------

NUM_ENGINES, NUM_HELDOUT, STEPS, KILL_AT = 2, 24, 60, 30
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


class Endless(Prompts):
    """What was lost may come again."""

    def put_back(self, index: int) -> None:
        pass


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Run to its end."""
    folder = tmp_path_factory.mktemp("pinned")
    with crew_of(CONFIG, folder, slow_s=[0.004, 0.016]) as (workers, _):
        workers.spawn(Role.VERIFY, 0, "tests.bench.scripted:verifier", "", TRAINER_PLACE)
        heldout = [Prompt(i, Example(str(i), "!"), (1, 2, 3)) for i in range(NUM_HELDOUT)]
        log = RunLog(CONFIG, folder, workers, Silent())
        loop = Watched(CONFIG, workers, Endless(), heldout, make_buffer(CONFIG), log)
        loop.run()
    return loop


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
