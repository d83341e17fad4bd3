"""The verifier: a process that turns trajectories into rewards, and that can be killed.

    consumes      Grade: an example and the ring cells of its answers
    waits for     answers
    unblocked by  Grade
    gives         Graded: a reward for each, or the reason why there is none

A reward that raises is never a 0 (rule 7): it is None, and one too many fails the whole group. One
that hangs or crashes is the controller's business: it sees on the board which one this worker has
been GRADING and for how long, replaces the worker, and may have the group graded without that one.
"""

import math
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.records import Answer, Example, Trajectory
from minirl.shm.board import BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.registry import make_task
from minirl.tasks.shaping import is_formed


@dataclass(frozen=True)
class Grade:
    group_id: int
    example: Example
    trajectories: tuple[Trajectory, ...]
    max_failures: int = 0
    skip: tuple[int, ...] = ()  # places that failed by taking their verifier down


@dataclass(frozen=True)
class Graded:
    group_id: int
    rewards: tuple[float | None, ...]  # None: failed, as `error` says
    texts: tuple[str, ...]
    error: str = ""
    formed: tuple[bool, ...] = ()  # which have the form of tasks.format, where it is set


@dataclass(frozen=True)
class VerifierSetup:
    """What a verifier is spawned with."""

    config: Config
    folder: str  # of the tokenizer
    ring: TrajectoryRing


def run(setup: VerifierSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a verifier process. Ends with anything but a Grade, or with the pipe."""
    from tokenizers import Tokenizer  # not transformers: this process stays small

    tokenizer = Tokenizer.from_file(str(Path(setup.folder) / "tokenizer.json"))
    task = make_task(setup.config)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        request = pipe.recv()
        if not isinstance(request, Grade):
            return
        graded = grade(request, task, setup.ring, tokenizer, board)
        pipe.send(with_forms(graded, setup.config.tasks.format))


def with_forms(graded: Graded, format: str) -> Graded:
    """Here and not in the controller: a regular expression can take for ever."""
    if not format or not graded.rewards:
        return graded
    return replace(graded, formed=tuple(is_formed(format, text) for text in graded.texts))


def grade(
    request: Grade, task: Task, ring: TrajectoryRing, tokenizer: Any, board: BoardWriter
) -> Graded:
    rewards: list[float | None] = []
    texts: list[str] = []
    error = ""
    for place, trajectory in enumerate(request.trajectories):
        if place in request.skip:
            rewards.append(None)
            texts.append("")
            continue
        board.serving(-1, place)
        # Anew: tasks.timeout_s counts for each reward.
        board.enter(State.GRADING, anew=True, group=request.group_id, place=place)
        view = ring.read(trajectory.cell, request.group_id)
        written = view.tokens[view.mask == 1].tolist()
        text = tokenizer.decode(written, skip_special_tokens=True)
        answer = Answer(text, trajectory.stop, len(written))
        reward: float | None = None
        try:
            reward = float(task.reward(request.example, answer))
        except Exception as failure:  # a task is the user's code: whatever it raises is one failure
            error = f"{type(failure).__name__}: {failure}"
        if reward is not None and not math.isfinite(reward):
            reward, error = None, f"reward is {reward}"
        rewards.append(reward)
        texts.append(text)
        if rewards.count(None) > request.max_failures:
            return Graded(request.group_id, (), (), error)
    return Graded(request.group_id, tuple(rewards), tuple(texts), error)
