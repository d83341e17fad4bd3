"""Scripted workers, which only sleep: an engine, a trainer rank and a verifier that send what real
ones send. They cost the machine next to nothing, so that a bench sees the controller's cost. An
engine's places fall free by its own time table, not when the process happens to wake up; a place is
idle from then until a sequence that had arrived by some moment takes it at that moment.
"""

import heapq
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from minirl.messages import (
    Finished,
    Grade,
    Graded,
    GroupRequest,
    Pinned,
    Save,
    Saved,
    Score,
    Started,
    Submit,
    Train,
    Trained,
)
from minirl.records import StopReason, Trajectory
from minirl.shm.board import BEAT_S, BoardWriter, State, Total
from tests.soak.task import BadExample

TICK_S = 0.02  # an engine reports what is done this often, as a step would


@dataclass(frozen=True)
class EngineScript:
    num_places: int
    mean_s: float  # of a sequence
    sigma: float  # of its logarithm
    seed: int
    trainer_row: int  # on the board, where the version is


@dataclass(frozen=True)
class TrainerScript:
    step_s: float
    is_first: bool = True


class ScriptedEngine:
    def __init__(self, script: EngineScript, board: BoardWriter, pipe: Connection):
        self.script, self.board, self.pipe = script, board, pipe
        self.dice = random.Random(script.seed)
        now = time.monotonic()
        self.free = [now] * script.num_places  # since when, a heap
        self.running: list[tuple[float, int, GroupRequest, int, int, float]] = []
        self.waiting: deque[tuple[float, GroupRequest, int]] = deque()
        self.next_key = 0

    def loop(self) -> None:
        while self.read_inbox():
            now = time.monotonic()
            done = []
            while self.running and self.running[0][0] <= now:
                ended, _, group, place, version, seconds = heapq.heappop(self.running)
                heapq.heappush(self.free, ended)
                tail = version if group.is_eval else max(version, self.version)
                tokens = max(1, round(seconds / TICK_S))
                trajectory = self.sealed(group, place, tokens, (version, tail))
                self.board.add(Total.TOKENS, trajectory.num_written)
                done.append((group.group_id, place, trajectory))
                self.take(now)
            self.account(now)
            if done:
                self.pipe.send(Finished(tuple(done)))

    def sealed(
        self, group: GroupRequest, place: int, num_tokens: int, versions: tuple[int, int]
    ) -> Trajectory:
        return Trajectory(0, num_tokens + 8, num_tokens, StopReason.STOP, *versions)

    @property
    def version(self) -> int:
        return max(0, self.board.board.row(self.script.trainer_row).version)

    def read_inbox(self) -> bool:
        self.board.enter(State.GENERATING)
        while self.pipe.poll(TICK_S):
            message = self.pipe.recv()
            if not isinstance(message, Submit):
                return False
            now = time.monotonic()
            if any(group.is_eval for group in message.groups):
                self.pipe.send(Pinned(self.version))
            for group in message.groups:
                self.waiting.extend((now, group, i) for i in range(len(group.cells)))
            self.take(now)
        return True

    def take(self, now: float) -> None:
        while self.waiting and self.free and self.free[0] <= now:
            came, group, place = self.waiting.popleft()
            free_since = heapq.heappop(self.free)
            at = max(came, free_since)
            self.board.add(Total.IDLE_S, (at - free_since) / self.script.num_places)
            # A lognormal with this mean.
            sigma = self.script.sigma
            seconds = self.script.mean_s * self.dice.lognormvariate(-sigma * sigma / 2, sigma)
            entry = (at + seconds, self.next_key, group, place, self.version, seconds)
            heapq.heappush(self.running, entry)
            self.next_key += 1

    def account(self, now: float) -> None:
        """Places that are free are idle up to now."""
        idle_s = sum(now - since for since in self.free if since < now)
        self.board.add(Total.IDLE_S, idle_s / self.script.num_places)
        self.free = [max(now, since) for since in self.free]
        self.board.serving(self.version, len(self.running))


def engine(script: EngineScript, board: BoardWriter, pipe: Connection) -> None:
    pipe.send(Started())
    ScriptedEngine(script, board, pipe).loop()


def trainer(script: TrainerScript, board: BoardWriter, pipe: Connection) -> None:
    serve_training(script, board, pipe, publish=lambda: None)


def serve_training(
    script: TrainerScript, board: BoardWriter, pipe: Connection, publish: Callable[[], None]
) -> None:
    """A rank that sleeps for a step. All ranks train, and only the first one reports."""
    board.serving(0, 0)
    pipe.send(Started())
    while True:
        board.enter(State.WAITING_FOR_BATCH)
        request = pipe.recv()
        if isinstance(request, Train):
            board.enter(State.TRAINING)
            time.sleep(script.step_s)
            publish()
        elif isinstance(request, Score):
            continue
        elif not isinstance(request, Save):
            return
        if script.is_first:
            pipe.send(reply(request, script, board))


def reply(request: Train | Save, script: TrainerScript, board: BoardWriter) -> Trained | Saved:
    if isinstance(request, Save):
        return Saved(request.folder)
    version = request.batch.version + 1
    board.serving(version, 0)
    oldest = min(group.head_version for group in request.batch.groups)
    values: dict[str, float | None] = {
        "train/tokens": 0.0,
        "train/tokens_per_s": 1000.0 / script.step_s,
        "train/logprob_gap": 1e-6,
        "buffer/staleness_mean": float(request.batch.version - oldest),
        "buffer/staleness_max": float(request.batch.version - oldest),
    }
    return Trained(version, values, staleness_counts=(3, 2, 1))


def verifier(script: object, board: BoardWriter, pipe: Connection) -> None:
    """Every second answer is right; an example whose reward is broken gets none, and from version
    "broken_from" of a script on none does. A script that is text is what all answers say. The group
    "too_large" ends its verifier, and so does "oom_killed"."""
    text = script if isinstance(script, str) else ""
    bad = getattr(script, "bad", {})
    broken_from = bad.get("broken_from", 10**9)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        while not pipe.poll(BEAT_S):
            board.enter(State.WAITING_FOR_ANSWERS)
        request = pipe.recv()
        if not isinstance(request, Grade):
            return
        if request.group_id in (bad.get("too_large"), bad.get("oom_killed")):
            board.enter(State.GRADING)
            if "too_large" in bad:
                raise MemoryError
            os.kill(os.getpid(), signal.SIGKILL)
        count, newest = len(request.trajectories), max(t.tail_version for t in request.trajectories)
        if isinstance(request.example, BadExample) or newest >= broken_from:
            error = "ValueError: no number (my_task.py, line 12, in reward)"
            pipe.send(Graded(request.group_id, (), (), error))
        else:
            rewards = tuple(float(i % 2) for i in range(count))
            pipe.send(Graded(request.group_id, rewards, (text,) * count))
