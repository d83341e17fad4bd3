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
from minirl.evaluation import Ended, Evaluation
from minirl.groups import Phase
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.messages import Role
from minirl.records import Example, Prompt, StopReason, Trajectory
from minirl.run_log import RunLog
from tests.bench.loop_harness import Prompts, Silent


def evaluation(count: int, num_cells: int = 99, **options: Any) -> Evaluation:
    prompts = [Prompt(i, Example(str(i), str(i)), (i,)) for i in range(count)]
    return Evaluation(prompts, range(num_cells), **options)


def ended(reward: float | None, stop: StopReason = StopReason.STOP) -> Ended:
    return Ended(0, Trajectory(0, 2, 1, stop, 7, 7), reward)


def test_accuracy_is_the_mean_of_what_was_graded() -> None:
    run = evaluation(4)
    assert list(run.next_to_ask()) == [(i, i) for i in range(4)]
    run.end(0, ended(0.0, StopReason.LENGTH))
    run.end(1, ended(1.0))
    run.end(2, ended(1.0))
    assert not run.is_done
    run.end(3, ended(None))  # no verdict is not a 0
    assert run.is_done
    result = run.result
    assert result["low"] < result["accuracy"] == 2 / 3 < result["high"]
    assert (result["count"], result["failures"], result["truncated_frac"]) == (3, 1, 0.25)
    ungraded = evaluation(1)
    ungraded.end(0, Ended(0, None, None))
    assert ungraded.is_done and ungraded.result["accuracy"] is None


def test_where_there_is_one_version_lost_prompts_are_requeued_and_cells_reused() -> None:
    run = evaluation(3, num_cells=2)
    assert list(run.next_to_ask()) == [(0, 0), (1, 1)]
    run.lost(0)
    run.end(1, ended(1.0))
    assert list(run.next_to_ask()) == [(2, 0)], "the cell of 1 may still be read"
    assert [place for place, _ in run.take_ended()] == [1] and list(run.take_ended()) == []
    assert list(run.next_to_ask()) == [(0, 1)] and not run.is_void


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
        self.evaluations: list[Evaluation] = []
        self.killed_in: Evaluation | None = None

    def start_evaluation(self) -> None:
        super().start_evaluation()
        assert self.groups.evaluation is not None
        self.evaluations.append(self.groups.evaluation)

    def collect(self) -> None:
        super().collect()
        current = self.groups.evaluation
        if self.killed_in is None and self.step >= KILL_AT and current and not current.pinning:
            asked = [state for state in self.groups.states.values() if state.evaluation]
            if at := [state.engine for state in asked if state.phase is Phase.SAMPLING]:
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


def test_every_engine_pins_the_version_while_training_continues(loop: Watched) -> None:
    """An engine or an answer that says another version would make an evaluation void."""
    whole = [found for found in loop.evaluations if not found.is_void]
    assert all(not found.pinning and len(found.ended) == NUM_HELDOUT for found in whole)
    evaluated = loop.log.evals
    assert [line["version"] for line in evaluated] == [found.version for found in whole]
    assert len({line["version"] for line in evaluated}) == len(evaluated) >= 3
    assert {(line["count"], line["failures"]) for line in evaluated} == {(NUM_HELDOUT, 0)}
    published = {line["version"]: line["seconds"] for line in loop.log.metrics}
    ends = [(line["version"], line["seconds"]) for line in evaluated[:-1]]
    assert any(published[version + 1] < end for version, end in ends), "a step ended meanwhile"


def test_an_evaluation_that_loses_an_engine_is_done_again(loop: Watched) -> None:
    assert loop.killed_in is not None and loop.step == STEPS
    (void,) = [place for place, found in enumerate(loop.evaluations) if found.is_void]
    assert loop.evaluations[void] is loop.killed_in and loop.killed_in.num_lost > 0
    assert len(loop.evaluations) > void + 1
