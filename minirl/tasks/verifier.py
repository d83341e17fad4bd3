"""The verifier: a process that turns trajectories into rewards, and that can be killed. It gives a
task's replies too, where it has several turns: both are the user's code.

    consumes      Grade: an example and the ring cells of its answers; Ask: those of one turn
    waits for     answers
    unblocked by  Grade, Ask
    gives         Graded: a reward for each, or the reason why there is none; Replied: the same of a
                  reply, as tokens

A reward that raises is never a 0 (rule 7): it is None, and one too many fails the whole group. One
that hangs or crashes is the controller's business: it sees on the board which one this worker has
been GRADING and for how long, replaces the worker, and may have the group graded without that one.
One that runs out of memory takes this worker down, which comes to the same.

Leaves out: what the recipe makes of a reward (rewards.py), and time limits: the controller watches.
"""

import math
import resource
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.records import Answer, Example, Trajectory
from minirl.shm.board import BEAT_S, BoardWriter, State
from minirl.shm.ring import TornEntry, TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.registry import make_task
from minirl.tasks.turns import Dialogue, readable, reply_tokens, texts_of


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


@dataclass(frozen=True)
class Ask:
    """For the reply to what a trajectory has so far."""

    group_id: int
    place: int
    example: Example
    trajectory: Trajectory


@dataclass(frozen=True)
class Replied:
    group_id: int
    place: int
    tokens: tuple[int, ...]  # none: the conversation is over
    error: str = ""  # else: there is no reply, as this says


@dataclass(frozen=True)
class VerifierSetup:
    """What a verifier is spawned with."""

    config: Config
    folder: str  # of the tokenizer
    ring: TrajectoryRing
    dialogue: Dialogue | None = None  # of a task with several turns


def run(setup: VerifierSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a verifier process. Ends with anything but a request, or with the pipe."""
    from tokenizers import Tokenizer  # not transformers: this process stays small

    tokenizer = Tokenizer.from_file(str(Path(setup.folder) / "tokenizer.json"))
    task = make_task(setup.config)
    limit_memory(setup.config.tasks.memory_gib)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        while not pipe.poll(BEAT_S):
            board.enter(State.WAITING_FOR_ANSWERS)
        request = pipe.recv()
        if isinstance(request, Grade):
            pipe.send(grade(request, task, setup, tokenizer, board))
        elif isinstance(request, Ask):
            pipe.send(reply(request, task, setup, tokenizer, board))
        else:
            return


def limit_memory(gib: float) -> None:
    """Of this process: private memory only, since the ring's shared memory is not its own. What
    goes beyond is a MemoryError in the code that asks for it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = int(gib * 2**30)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def grade(
    request: Grade, task: Task, setup: VerifierSetup, tokenizer: Any, board: BoardWriter
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
        view = setup.ring.read(trajectory.cell, request.group_id)
        turns = texts_of(view, tokenizer, setup.dialogue)
        answer = Answer(turns[-1], trajectory.stop, int(view.mask.sum()), turns)
        reward, why = compute(task, request.example, answer)
        error = why or error
        rewards.append(reward)
        texts.append(readable(turns))
        if rewards.count(None) > request.max_failures:
            return Graded(request.group_id, (), (), error)
    return Graded(request.group_id, tuple(rewards), tuple(texts), error)


def compute(task: Task, example: Example, answer: Answer) -> tuple[float | None, str]:
    """The reward, or None and why there is none."""
    try:
        reward = float(task.reward(example, answer))
    except MemoryError:
        raise  # what is left may be too little for the next: it takes this process down
    except Exception as failure:  # a task is the user's code: whatever it raises is one failure
        return None, f"{type(failure).__name__}: {failure}"
    return (reward, "") if math.isfinite(reward) else (None, f"reward is {reward}")


def reply(
    request: Ask, task: Task, setup: VerifierSetup, tokenizer: Any, board: BoardWriter
) -> Replied:
    board.serving(-1, request.place)
    board.enter(State.GRADING, anew=True, group=request.group_id, place=request.place, reply=True)
    assert setup.dialogue is not None
    try:
        view = setup.ring.read(request.trajectory.cell, request.group_id)
    except TornEntry as gone:  # the group was given up, and its cell is another's
        return Replied(request.group_id, request.place, (), str(gone))
    last, turns = int(view.tokens[-1]), texts_of(view, tokenizer, setup.dialogue)
    try:
        text = task.reply(request.example, turns)
        if text is None:
            return Replied(request.group_id, request.place, ())
        tokens = reply_tokens(text, request.example, last, tokenizer, setup.dialogue)
        if not tokens:
            raise ValueError("the reply has no token; None ends the conversation")
    except MemoryError:
        raise
    except Exception as failure:  # the user's code, as above
        why = f"{type(failure).__name__}: {failure}"
        return Replied(request.group_id, request.place, (), why)
    # As many as max_new_tokens never fit, and more need not be sent.
    return Replied(
        request.group_id, request.place, tuple(tokens[: setup.config.rollout.max_new_tokens])
    )


def reward_problem(reward: float, reward_range: tuple[float, ...]) -> str:
    """Why a reward may not be trained on, or ""."""
    if not math.isfinite(reward):
        return f"reward is {reward}"
    if reward_range and not reward_range[0] <= reward <= reward_range[1]:
        low, high = reward_range
        return f"reward is {reward:g}, outside guard.reward_range = [{low:g}, {high:g}]"
    return ""
