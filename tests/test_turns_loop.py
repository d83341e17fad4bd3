"""Replies through real processes, without vLLM: the loop, engines that only count, verifiers whose
task raises, hangs and dies, and an engine that is killed while its turns wait for replies."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import TRAINER_PLACE
from noisy_task import AGAIN
from pinned_crew import crew_of
from tiny_models import tokenizer

from minirl.config import Config
from minirl.groups import Sends
from minirl.launch import make_buffer
from minirl.loop import Loop
from minirl.messages import Role, TurnEnded
from minirl.records import Prompt, StopReason
from minirl.run_log import RunLog
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.prompts import PromptStream
from minirl.tasks.registry import make_task
from minirl.tasks.turns import Dialogue, runs
from minirl.tasks.verifier import VerifierSetup
from minirl.workers import Worker
from tests.bench.loop_harness import Silent

NUM_ENGINES, NUM_HELDOUT, STEPS, KILL_AT, MAX_NEW = 2, 6, 24, 8, 48
HERE, BASE = Path(__file__).parent, Config()
CONFIG = replace(
    BASE,
    tasks=replace(BASE.tasks, kind=f"{HERE / 'noisy_task.py'}:Moody", verifiers=2, timeout_s=1.0),
    devices=replace(BASE.devices, rollout=NUM_ENGINES),
    rollout=replace(BASE.rollout, group_size=2, max_num_seqs=8, max_new_tokens=MAX_NEW),
    buffer=replace(BASE.buffer, max_staleness=3, target_staleness=3.0),
    train=replace(BASE.train, steps=STEPS, batch_size=2),
    eval=replace(BASE.eval, every=10, num_prompts=NUM_HELDOUT),
    log=replace(BASE.log, samples=1),
)


class Watched(Loop):
    """Keeps a copy of each trained trajectory, and kills an engine that waits for a reply."""

    def __init__(self, ring: TrajectoryRing, *parts: Any):
        super().__init__(*parts)
        self.ring = ring
        self.kept: list[Any] = []  # the group's age, a trajectory of it, its columns
        self.is_killed = False

    def learn(self) -> None:
        before = self.batch
        super().learn()
        if self.batch is None or self.batch is before:
            return
        for group in self.batch.groups:
            age = self.batch.version - group.newest_version
            for trajectory in group.trajectories:
                view = self.ring.read(trajectory.cell, group.id)
                columns = (view.tokens, view.mask, view.logprobs, view.versions)
                self.kept.append((age, trajectory, *(column.copy() for column in columns)))

    def handle(self, worker: Worker, message: object) -> Sends:
        sends = super().handle(worker, message)
        if isinstance(message, TurnEnded) and not self.is_killed and self.step >= KILL_AT:
            self.is_killed = True
            os.kill(worker.pid, signal.SIGKILL)
        return sends


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Run to its end."""
    folder, plain = tmp_path_factory.mktemp("turns"), tokenizer(512)
    plain.save_pretrained(folder)
    task = make_task(CONFIG)
    with crew_of(CONFIG, folder, [0.004] * NUM_ENGINES, has_turns=True) as (workers, ring):
        for rank in range(CONFIG.tasks.verifiers):
            grader = VerifierSetup(CONFIG, str(folder), ring, Dialogue())
            workers.spawn(Role.VERIFY, rank, "minirl.tasks.verifier:run", grader, TRAINER_PLACE)
        heldout = [Prompt(i, e, (1, 2)) for i, e in enumerate(task.heldout(NUM_HELDOUT))]
        stream, log = (
            PromptStream(task, plain, CONFIG.seed),
            RunLog(CONFIG, folder, workers, Silent()),
        )
        loop = Watched(ring, CONFIG, workers, stream, heldout, make_buffer(CONFIG), log)
        loop.run()
    return loop


def test_every_trained_answer_is_one_flat_record_of_its_turns(loop: Watched) -> None:
    reply = tokenizer(512).encode(AGAIN)
    assert len(loop.kept) == STEPS * 4
    for group_age, trajectory, tokens, mask, logprobs, versions in loop.kept:
        spans = runs(mask)
        assert (trajectory.num_turns, len(spans)) == (3, 5)
        assert trajectory.stop is StopReason.STOP and trajectory.length == len(tokens)
        assert trajectory.num_written == mask.sum()
        assert trajectory.num_replied == 2 * len(reply)
        assert ((mask == 1) == (versions >= 0)).all() and (logprobs[mask == 0] == 0).all()
        assert all(tokens[span].tolist() == reply for span in spans[1::2])
        assert trajectory.head_version == versions[spans[0]][0]
        assert trajectory.tail_version == versions[-1]
        assert (np.diff(versions[mask == 1]) >= 0).all()
        assert group_age <= CONFIG.buffer.max_staleness  # of its newest token: it can be trained
    spread = [t.tail_version - t.head_version for _, t, *_ in loop.kept]
    assert max(spread) > 0, "weights changed between turns"


def test_a_reply_that_fails_hangs_or_dies_drops_its_group_with_a_count(loop: Watched) -> None:
    last = loop.log.metrics[-1]
    assert last["buffer/dropped_reply_error"] >= 2 and last["buffer/dropped_reply_timeout"] >= 1
    assert "buffer/dropped_reward_error" not in last
    for line in loop.log.metrics:
        done = line["buffer/groups_trained"] + line["buffer/groups_dropped"]
        assert line["buffer/groups_submitted"] == done + line["buffer/groups_in_flight"]
        assert line["rollout/turns_mean"] == 3


def test_an_engine_that_dies_while_turns_wait_loses_nothing_but_them(loop: Watched) -> None:
    assert loop.is_killed and loop.step == STEPS
    assert loop.log.metrics[-1]["buffer/dropped_worker_died"] >= 1


def test_evaluations_talk_too(loop: Watched) -> None:
    evaluated = loop.log.evals
    assert evaluated and all(line["failures"] == 0 for line in evaluated)
    assert all(line["count"] == NUM_HELDOUT for line in evaluated)
    said = (loop.log.run_dir / "evals.jsonl").read_text()
    assert said.count("\\u27e6 again?\\u27e7") >= 2 * len(evaluated)
    assert (loop.log.run_dir / "samples.jsonl").read_text().count("again?") >= 2 * STEPS
