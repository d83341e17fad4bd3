"""The verifier: a process that turns trajectories into rewards and replies, and that can be killed.

    consumes, waits for   Grade: an example and the ring cells of its answers; Ask: those of a turn
    gives                 Graded, Replied: rewards, a reply's tokens, or why there are none

A reward that raises is never a 0 (rule 7): its whole group fails. While one runs, the board shows
GRADING: if it hangs or crashes, the controller replaces the worker and drops the group.
Leaves out: which graded groups are trained (groups.py), time limits (the controller's).
"""

import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from minirl.config import Config
from minirl.messages import Ask, Grade, Graded, Replied
from minirl.records import Answer
from minirl.shm.board import BEAT_S, BoardWriter, State
from minirl.shm.ring import TrajectoryRing
from minirl.tasks import Task
from minirl.tasks.registry import failure, make_task, score
from minirl.tasks.turns import Dialogue, readable, reply_tokens, texts_of


class VerifierSetup(NamedTuple):
    config: Config
    folder: str  # of the tokenizer
    ring: TrajectoryRing
    dialogue: Dialogue | None = None  # of a task with several turns


def run(setup: VerifierSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a verifier process. Ends with anything but a request, or with the pipe."""
    from tokenizers import Tokenizer  # not transformers: this process stays small

    tokenizer = Tokenizer.from_file(str(Path(setup.folder) / "tokenizer.json"))
    verifier = Verifier(setup, make_task(setup.config), tokenizer, board)
    limit_memory(setup.config)
    while True:
        board.enter(State.WAITING_FOR_ANSWERS)
        if not pipe.poll(BEAT_S):
            continue
        match pipe.recv():
            case Grade() as request:
                pipe.send(verifier.grade(request))
            case Ask() as request:
                pipe.send(verifier.reply(request))
            case _:
                return


def limit_memory(config: Config) -> None:
    """Private memory only: the ring's shared memory does not count. Beyond it, MemoryError."""
    limit = int(config.tasks.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class Verifier(NamedTuple):
    setup: VerifierSetup
    task: Task
    tokenizer: Any
    board: BoardWriter

    def grade(self, request: Grade) -> Graded:
        rewards, texts = list[float](), list[str]()
        for place, trajectory in enumerate(request.trajectories):
            self._show(request.group_id, place=place)
            view = self.setup.ring.read(trajectory.cell, request.group_id)
            turns = texts_of(view, self.tokenizer, self.setup.dialogue)
            answer = Answer(turns[-1], trajectory.stop, int(view.mask.sum()), turns)
            texts.append(readable(turns))
            try:
                rewards.append(score(self.task, request.example, answer))
            except MemoryError:
                raise  # too little may be left for the next reward
            except Exception as failed:  # a task is the user's code: whatever it raises
                return Graded(request.group_id, error=failure(failed, self.setup.config.tasks.kind))
        return Graded(request.group_id, tuple(rewards), tuple(texts))

    def reply(self, request: Ask) -> Replied:
        example, tokens, error = request.example, list[int](), ""
        self._show(request.group_id, place=request.place, reply=True)
        try:
            view = self.setup.ring.read(request.trajectory.cell, request.group_id)
            dialogue, last = self.setup.dialogue or Dialogue(), int(view.tokens[-1])
            text = self.task.reply(example, texts_of(view, self.tokenizer, dialogue))
            if text is not None:
                tokens = reply_tokens(text, example, last, self.tokenizer, dialogue)
                if not tokens:
                    raise ValueError("the reply has no token; None ends the conversation")
        except MemoryError:
            raise
        except Exception as failed:  # the user's code, or the cell is another group's by now
            error = failure(failed, self.setup.config.tasks.kind)
        # As many as max_new_tokens never fit, and more need not be sent.
        sent = tuple(tokens[: self.setup.config.rollout.max_new_tokens])
        return Replied(request.group_id, request.place, sent, error)

    def _show(self, group_id: int, **facts: Any) -> None:
        """Anew: tasks.timeout_s counts for each reward."""
        self.board.enter(State.GRADING, anew=True, group=group_id, **facts)
