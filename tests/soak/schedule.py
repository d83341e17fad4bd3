"""The faults, their targets and their moments. Takes a seed, gives one Draw after another: the n-th
is a function of the seed and n alone, whatever the run makes of those before it.

Each fault comes as often as the table says, in random order, then all come again. So none is left
out by chance, and a soak of any length has a mixture.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from minirl.errors import RecipeError


@dataclass(frozen=True)
class Fault:
    name: str
    count: int = 1  # in one round


FAULTS = (
    Fault("kill-engine"),  # SIGKILL to a rollout worker
    Fault("kill-verifier", 2),  # SIGKILL to a verifier
    Fault("kill-rank", 2),  # SIGKILL to a trainer rank
    Fault("kill-two"),  # SIGKILL to two workers, less than a second apart
    Fault("freeze-engine"),  # SIGSTOP to a rollout worker
    Fault("freeze-verifier"),  # SIGSTOP to a verifier
    Fault("freeze-rank"),  # SIGSTOP to a trainer rank
    Fault("pause-engine"),  # SIGSTOP to a rollout worker, SIGCONT soon
    Fault("pause-verifier"),  # SIGSTOP to a verifier, SIGCONT soon
    Fault("pause-rank"),  # SIGSTOP to a trainer rank, SIGCONT soon
    Fault("fill-disk", 2),  # no room on the disk when it saves
    Fault("kill-controller"),  # SIGKILL to the controller
    Fault("kill-at-start"),  # the same while its workers start
    Fault("kill-at-save"),  # the same while a checkpoint is written
    Fault("kill-at-eval"),  # the same while it evaluates
    Fault("kill-at-full"),  # the same while the disk is full
    Fault("term-controller"),  # SIGTERM to the controller
    Fault("term-at-start"),  # SIGTERM to all its processes as they start
)
BOX = Fault("kill-box")  # all processes of a box; another one joins (--boxes)
BY_NAME = {fault.name: fault for fault in (*FAULTS, BOX)}
TEAR = Fault("tear-files")
"""Lines are torn after about half of the controller's deaths by SIGKILL (`Draw.is_torn`)."""


@dataclass(frozen=True)
class Draw:
    number: int
    fault: str
    wait_s: float  # after the run has recovered from what was before
    pick: float  # 0 to 1: which worker, of those there are
    other: float  # the same, of a second one
    moment: float  # 0 to 1: how far into the pause, the save, the evaluation, the start
    is_torn: bool
    seed: str  # of what else is random about it


class Schedule:
    def __init__(self, seed: int, names: Sequence[str] = ()):
        self._seed, self._names = seed, [*names] or [fault.name for fault in FAULTS]
        for name in self._names:
            if name not in BY_NAME:
                remedy = f"there are {', '.join(BY_NAME)}"
                raise RecipeError("--faults", name, "no such fault", remedy)
        self._number = 0

    def draw(self) -> Draw:
        round_ = [name for name in self._names for _ in range(BY_NAME[name].count)]
        turn, place = divmod(self._number, len(round_))
        random.Random(f"{self._seed}/deck/{turn}").shuffle(round_)
        seed = f"{self._seed}/{self._number}"
        dice = random.Random(seed)
        self._number += 1
        return Draw(
            number=self._number,
            fault=round_[place],
            wait_s=dice.uniform(0.2, 3.0),
            pick=dice.random(),
            other=dice.random(),
            moment=dice.random(),
            is_torn=dice.random() < 0.5,
            seed=seed,
        )
