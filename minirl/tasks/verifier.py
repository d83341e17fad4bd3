"""The verifier: a process that turns trajectories into rewards, and that can be killed.

    consumes      Grade: an example and the ring cells of its answers
    waits for     answers
    unblocked by  Grade
    gives         Graded: a reward for each, or the reason why there is none

A reward that raises is never a 0 (rule 7): the whole group is reported as failed. One that hangs
is the controller's business: it sees how long this worker has been GRADING and replaces it.
"""

import math
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.records import Answer, Example, Trajectory
from minirl.shm.board import BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.registry import make_task


@dataclass(frozen=True)
class Grade:
    group_id: int
    example: Example
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Graded:
    group_id: int
    rewards: tuple[float, ...]
    texts: tuple[str, ...]
    error: str = ""  # set: there are no rewards, and this is why


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
        pipe.send(grade(request, task, setup.ring, tokenizer, board))


def grade(
    request: Grade, task: Task, ring: TrajectoryRing, tokenizer: Any, board: BoardWriter
) -> Graded:
    rewards, texts = [], []
    for trajectory in request.trajectories:
        board.enter(State.GRADING, anew=True)  # tasks.timeout_s counts for each reward
        view = ring.read(trajectory.cell, request.group_id)
        written = view.tokens[view.mask == 1].tolist()
        text = tokenizer.decode(written, skip_special_tokens=True)
        answer = Answer(text, trajectory.stop, len(written))
        try:
            reward = float(task.reward(request.example, answer))
        except Exception as error:  # a task is the user's code: whatever it raises is one failure
            return Graded(request.group_id, (), (), f"{type(error).__name__}: {error}")
        if not math.isfinite(reward):
            return Graded(request.group_id, (), (), f"reward is {reward}")
        rewards.append(reward)
        texts.append(text)
    return Graded(request.group_id, tuple(rewards), tuple(texts))
