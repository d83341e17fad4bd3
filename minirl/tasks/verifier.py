"""The verifier: a process that turns trajectories into rewards, and that can be killed.

    consumes      Grade: an example and the ring cells of its answers
    waits for     answers
    unblocked by  Grade
    gives         Graded: a reward for each, or the reason why there is none

A reward that raises is never a 0 (rule 7): it is None, and one too many fails the whole group. One
that hangs or crashes is the controller's business: it sees on the board which one this worker has
been GRADING and for how long, replaces the worker, and may have the group graded without that one.
One that runs out of memory takes this worker down, which comes to the same. An answer that was
graded here before is not graded again, unless the task says that its rewards are random.
"""

from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.guard import reward_problem
from minirl.records import Answer, Example, Trajectory
from minirl.shm.board import BEAT_S, BoardWriter, State, Total
from minirl.shm.ring import TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.bounds import RewardCache, bounded_output, limit_memory
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
    cache = None if getattr(task, "is_random", False) else RewardCache()
    limit_memory(setup.config.tasks.memory_gib)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        while not pipe.poll(BEAT_S):
            board.enter(State.WAITING_FOR_ANSWERS)
        request = pipe.recv()
        if not isinstance(request, Grade):
            return
        limits = setup.config.guard.reward_range
        graded = grade(request, task, setup.ring, tokenizer, board, cache, limits)
        pipe.send(with_forms(graded, setup.config.tasks.format))


def with_forms(graded: Graded, format: str) -> Graded:
    """Here and not in the controller: a regular expression can take for ever."""
    if not format or not graded.rewards:
        return graded
    return replace(graded, formed=tuple(is_formed(format, text) for text in graded.texts))


def grade(
    request: Grade,
    task: Task,
    ring: TrajectoryRing,
    tokenizer: Any,
    board: BoardWriter,
    cache: RewardCache | None = None,
    limits: tuple[float, ...] = (),
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
        reward = cache.get(request.example, answer) if cache is not None else None
        if reward is not None:
            board.add(Total.CACHED, 1)
        else:
            reward, why = compute(task, request.example, answer, limits)
            error = why or error
            if cache is not None and reward is not None:
                cache.put(request.example, answer, reward)
        rewards.append(reward)
        texts.append(text)
        if rewards.count(None) > request.max_failures:
            return Graded(request.group_id, (), (), error)
    return Graded(request.group_id, tuple(rewards), tuple(texts), error)


def compute(
    task: Task, example: Example, answer: Answer, limits: tuple[float, ...] = ()
) -> tuple[float | None, str]:
    """The reward, or None and why there is none."""
    try:
        with bounded_output():
            reward = float(task.reward(example, answer))
    except MemoryError:
        raise  # what is left may be too little for the next: it takes this process down
    except Exception as failure:  # a task is the user's code: whatever it raises is one failure
        return None, f"{type(failure).__name__}: {failure}"
    problem = reward_problem(reward, limits)
    return (None, problem) if problem else (reward, "")
