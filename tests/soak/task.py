"""The recipe's own task, with rewards that fail. Takes the task's name as an option, gives a task
that asks the same; but some training prompts have a fate, drawn from a seed by their place:

    raises   its reward raises            must be dropped: reward_error
    exits    its reward ends the verifier must be dropped: reward_error
    hangs    its reward never ends        must be dropped: reward_timeout
    slow     its reward takes a while     must be trained like any other

Fates are the soak's own knowledge of what must be dropped, beside the run's counts (ledger.py).
They strike in verifiers alone: the self-check in the controller and held-out prompts are as ever.
"""

import multiprocessing
import os
import random
import time
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from minirl.config import Config, TasksConfig
from minirl.records import Answer, Example
from minirl.tasks import Task
from minirl.tasks.registry import make_task

KIND = "tests.soak.task:make"
OPTIONS = ("chaos_kind", "chaos_seed", "chaos_share")
SLOW_S, FOR_EVER_S = 0.1, 86_400.0


class Fate(StrEnum):
    FINE = "fine"
    SLOW = "slow"
    RAISES = "raises"
    EXITS = "exits"
    HANGS = "hangs"


PARTS = {Fate.RAISES: 0.5, Fate.SLOW: 0.3, Fate.EXITS: 0.1, Fate.HANGS: 0.1}
"""Of the prompts that have a fate."""
BROKEN = (Fate.RAISES, Fate.EXITS, Fate.HANGS)


@dataclass(frozen=True)
class Fated(Example):
    fate: Fate = Fate.FINE


class Fates:
    """Mixed into the class of the recipe's task."""

    chaos_seed: int
    chaos_share: float

    def train(self, index: int) -> Example:
        example: Example = super().train(index)  # type: ignore[misc]
        fate = fate_at(self.chaos_seed, self.chaos_share, index)
        if fate is Fate.FINE:
            return example
        return Fated(**{f.name: getattr(example, f.name) for f in fields(Example)}, fate=fate)

    def reward(self, example: Example, answer: Answer) -> float:
        if isinstance(example, Fated) and multiprocessing.parent_process() is not None:
            suffer(example.fate)
        return super().reward(example, answer)  # type: ignore[misc]


def fate_at(seed: int, share: float, place: int) -> Fate:
    left = random.Random(f"{seed}/fate/{place}").random()
    for fate, part in PARTS.items():
        left -= share * part
        if left < 0:
            return fate
    return Fate.FINE


def suffer(fate: Fate) -> None:
    if fate is Fate.RAISES:
        raise ValueError("chaos: this reward always raises")
    if fate is Fate.EXITS:
        os._exit(7)
    time.sleep(SLOW_S if fate is Fate.SLOW else FOR_EVER_S)


def options(tasks: TasksConfig, seed: int, share: float) -> TasksConfig:
    """[tasks] of a recipe whose rewards fail."""
    mine = dict(zip(OPTIONS, (tasks.kind, seed, share), strict=True))
    return replace(tasks, kind=KIND, options={**tasks.options, **mine})


def make(tasks: TasksConfig, seed: int) -> Task:
    """What tasks.kind names. A child of the recipe's class: whatever else it has is as ever."""
    given: dict[str, Any] = dict(tasks.options)
    kind, chaos_seed, share = (given.pop(name) for name in OPTIONS)
    inner = make_task(Config(seed=seed, tasks=replace(tasks, kind=kind, options=given)))
    cls = type(inner)
    inner.__class__ = type(f"Chaos{cls.__name__}", (Fates, cls), {})
    inner.chaos_seed, inner.chaos_share = chaos_seed, share  # type: ignore[attr-defined]
    return inner
