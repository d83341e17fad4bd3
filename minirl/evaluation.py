"""One evaluation of one version: held-out prompts, by the same rollout path as training groups.

Takes prompts and cells of the ring, gives what to ask next and, when all answers are graded, the
mean reward with its interval. During training it is of one version, whatever the number of engines:

    1. It begins right after a publication, when no batch is in training: the newest version is v.
    2. Each engine that takes part loads v, if it does not serve it yet, pins it and says so. Until
       all have, the controller sends no batch, so v stays the newest: a step or two of an engine.
    3. Then training continues and publishes; each engine keeps v until its own share is answered.
       Training groups also run there, in half of its seats, under v: their tokens say so.
    4. Where that fails (an engine died with prompts unanswered, or says another version), the
       evaluation is void: the remaining answers are awaited and discarded, then it begins again.

`minirl eval` has one version only: there the prompts of an engine that died are requeued, and a
cell is reused when its answer was taken.

Leaves out: sending, grading and deaths (groups.py).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minirl.records import Prompt, StopReason, Trajectory
from minirl.statistics import interval_of


class Ended(NamedTuple):
    """What came of one prompt."""

    group_id: int
    cell: int
    trajectory: Trajectory | None  # None: the engine refused the prompt, or gave it up
    reward: float | None  # None: it failed, as `error` says. No verdict is not a 0
    error: str = ""
    text: str | None = None  # where it was graded


@dataclass
class Evaluation:
    """Each prompt is a group of one, told apart by its place among the prompts."""

    prompts: Sequence[Prompt]
    cells: Sequence[int]
    step: int = 0  # training steps done when it began
    version: int | None = None  # None: there is one only; what an engine loses is asked again
    is_cancelled: bool = False  # a rollback took back the step whose version it evaluates
    is_void: bool = False  # its answers are not all of that version
    pinning: set[int] = field(default_factory=set)  # engines that have not pinned the version yet
    ended: dict[int, Ended] = field(default_factory=dict)  # by place

    def __post_init__(self) -> None:
        self._to_ask = deque(range(len(self.prompts)))
        self._free = deque(self.cells)
        self._untaken: list[int] = []

    def next_to_ask(self) -> Iterator[tuple[int, int]]:
        """Places of prompts, each with a free cell."""
        while self._to_ask and self._free:
            yield self._to_ask.popleft(), self._free.popleft()

    def saw(self, *versions: int) -> None:
        self.is_void |= self.version is not None and {self.version} != {*versions}

    def end(self, place: int, ended: Ended) -> None:
        self.ended[place] = ended
        self._untaken.append(place)

    def lost(self, place: int, cell: int) -> None:
        """Its engine died; the store may no longer hold the pinned weights."""
        if self.version is None:
            self._free.append(cell)
            self._to_ask.append(place)
        else:
            self.is_void = True
            self.end(place, Ended(0, cell, None, None))

    def take_ended(self) -> Iterator[tuple[int, Ended]]:
        """Those that ended since the last call; their cells are free afterwards."""
        while self._untaken:
            place = self._untaken.pop(0)
            yield place, self.ended[place]
            self._free.append(self.ended[place].cell)

    @property
    def is_done(self) -> bool:
        return len(self.ended) == len(self.prompts)

    def line(self, num_shown: int) -> dict[str, object]:
        """For evals.jsonl. Accuracy is None where no answer was graded; the answers that are shown
        are to the same first prompts every time."""
        rewards = [e.reward for e in self.ended.values() if e.reward is not None]
        written = [e.trajectory for e in self.ended.values() if e.trajectory is not None]
        interval = interval_of([(reward,) for reward in rewards]) or (None, None, None)
        num, num_cut = len(written), sum(t.stop is StopReason.LENGTH for t in written)
        return {
            "step": self.step,
            "version": self.version,
            **dict(zip(("accuracy", "low", "high"), interval, strict=True)),
            "count": len(rewards),
            "failures": len(self.ended) - len(rewards),
            "length_mean": sum(t.num_written for t in written) / num if num else None,
            "truncated_frac": num_cut / num if num else None,
            "answers": [
                {
                    "prompt": prompt.example.prompt,
                    "reference": prompt.example.reference,
                    "answer": self.ended[place].text,
                    "reward": self.ended[place].reward,
                }
                for place, prompt in enumerate(self.prompts[:num_shown])
            ],
        }
