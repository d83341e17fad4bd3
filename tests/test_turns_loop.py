"""Replies through real processes, without vLLM: the loop, engines that only count, verifiers whose
task raises, hangs and dies, and an engine that is killed in the middle of an evaluation, while its
turns wait for replies. An evaluation is of one version on all engines while training continues."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from crew import TRAINER_PLACE
from noisy_task import AGAIN
from pinned_crew import crew_of
from processes import assert_accounted
from tiny_models import tokenizer

from minirl.config import Config
from minirl.evaluation import Evaluation
from minirl.groups import Phase, Sends
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.messages import Role, TurnEnded
from minirl.records import Prompt, StopReason, Trajectory
from minirl.run_log import RunLog
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.tasks.prompts import PromptStream
from minirl.tasks.registry import make_task
from minirl.tasks.turns import Dialogue, runs
from minirl.tasks.verifier import VerifierSetup
from minirl.workers import Worker
from tests.bench.loop_harness import Silent

NUM_ENGINES, NUM_HELDOUT, STEPS, KILL_AT, MAX_NEW = 2, 12, 24, 8, 48
HERE, BASE = Path(__file__).parent, Config()
CONFIG = replace(
    BASE,
    tasks=replace(BASE.tasks, kind=f"{HERE / 'noisy_task.py'}:Moody", verifiers=2, timeout_s=1.0),
    devices=replace(BASE.devices, rollout=NUM_ENGINES),
    rollout=replace(BASE.rollout, group_size=2, max_num_seqs=8, max_new_tokens=MAX_NEW),
    buffer=replace(BASE.buffer, max_staleness=3, target_staleness=3.0),
    train=replace(BASE.train, steps=STEPS, batch_size=2),
    eval=replace(BASE.eval, every=4, num_prompts=NUM_HELDOUT),
    log=replace(BASE.log, samples=1),
)
TOKENIZER = tokenizer(512)
REPLY = TOKENIZER.encode(AGAIN)


class Watched(Loop):
    """Checks each trajectory as it is trained, remembers each evaluation, and kills an engine that
    waits for a reply and has both kinds of groups."""

    def __init__(self, ring: TrajectoryRing, *parts: Any):
        super().__init__(*parts)
        self.ring, self.spreads = ring, list[int]()
        self.evaluations: list[Evaluation] = []
        self.killed_in: Evaluation | None = None

    def start_evaluation(self) -> None:
        super().start_evaluation()
        assert self.groups.evaluation is not None
        self.evaluations.append(self.groups.evaluation)

    def learn(self) -> None:
        before = self.batch
        super().learn()
        if self.batch is None or self.batch is before:
            return
        for group in self.batch.groups:
            assert self.batch.version - group.newest_version <= CONFIG.buffer.max_staleness
            for trajectory in group.trajectories:
                check_record(trajectory, self.ring.read(trajectory.cell, group.id))
                self.spreads.append(trajectory.tail_version - trajectory.head_version)

    def handle(self, worker: Worker, message: object) -> Sends:
        sends = super().handle(worker, message)
        sampling = [s for s in self.groups.states.values() if s.phase is Phase.SAMPLING]
        of_both = {s.evaluation is None for s in sampling if s.engine == worker.rank}
        is_due = isinstance(message, TurnEnded) and self.step >= KILL_AT and len(of_both) == 2
        if is_due and self.killed_in is None:
            self.killed_in = self.groups.evaluation
            os.kill(worker.pid, signal.SIGKILL)
        return sends


def check_record(trajectory: Trajectory, view: TrajectoryView) -> None:
    """Its turns are one flat record."""
    spans, mask, versions = runs(view.mask), view.mask, view.versions
    assert (trajectory.num_turns, len(spans)) == (3, 5)
    assert trajectory.stop is StopReason.STOP and trajectory.length == len(view.tokens)
    assert trajectory.num_written == mask.sum() and trajectory.num_replied == 2 * len(REPLY)
    assert ((mask == 1) == (versions >= 0)).all() and (view.logprobs[mask == 0] == 0).all()
    assert all(view.tokens[span].tolist() == REPLY for span in spans[1::2])
    assert trajectory.head_version == versions[spans[0]][0]
    assert trajectory.tail_version == versions[-1]
    assert (np.diff(versions[mask == 1]) >= 0).all()


def test_turns_survive_replies_that_fail_and_an_engine_that_dies(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    task = make_task(CONFIG)
    with crew_of(CONFIG, tmp_path, [0.004, 0.016]) as (workers, ring):
        grader = VerifierSetup(CONFIG, str(tmp_path), ring, Dialogue())
        for rank in range(CONFIG.tasks.verifiers):
            workers.spawn(Role.VERIFY, rank, "minirl.tasks.verifier:run", grader, TRAINER_PLACE)
        heldout = [Prompt(i, e, (1, 2)) for i, e in enumerate(task.heldout(NUM_HELDOUT))]
        stream = PromptStream(task, TOKENIZER, CONFIG.seed)
        log = RunLog(CONFIG, tmp_path, workers, Silent())
        loop = Watched(ring, CONFIG, workers, stream, heldout, make_buffer(CONFIG), log)
        loop.run()
    assert loop.step == STEPS and len(loop.spreads) == STEPS * 4
    assert max(loop.spreads) > 0, "weights changed between turns"
    last = log.metrics[-1]
    assert last["buffer/dropped_reply_error"] >= 2 and last["buffer/dropped_reply_timeout"] >= 1
    assert last["buffer/dropped_worker_died"] >= 1 and "buffer/dropped_reward_error" not in last
    assert_accounted(log.metrics, CONFIG.buffer.max_staleness)
    assert {line["rollout/turns_mean"] for line in log.metrics} == {3}
    check_evaluations(loop, log)
    said = (tmp_path / "evals.jsonl").read_text()
    assert said.count("\\u27e6 again?\\u27e7") >= 2 * len(log.evals)
    assert (tmp_path / "samples.jsonl").read_text().count("again?") >= 2 * STEPS


def check_evaluations(loop: Watched, log: RunLog) -> None:
    """An engine or an answer that says another version would make one void; it is done again."""
    (void,) = [place for place, found in enumerate(loop.evaluations) if found.is_void]
    assert loop.evaluations[void] is loop.killed_in and loop.killed_in.num_lost > 0
    whole = [found for found in loop.evaluations if not found.is_void]
    assert all(not found.pinning and len(found.ended) == NUM_HELDOUT for found in whole)
    assert [line["version"] for line in log.evals] == [found.version for found in whole]
    assert len(whole) >= 3 and loop.evaluations[-1] is whole[-1]
    assert {(line["count"], line["failures"]) for line in log.evals} == {(NUM_HELDOUT, 0)}
    published = {line["version"]: line["seconds"] for line in log.metrics}
    ends = [(line["version"], line["seconds"]) for line in log.evals[:-1]]
    assert any(published[version + 1] < end for version, end in ends), "a step ended meanwhile"
