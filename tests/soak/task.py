"""The recipe's own task, with bad rewards. Takes the task's name as an option, gives a task that
asks the same; but some training prompts, drawn from a seed by their place, have a bad reward:

    raises   its reward raises             must be dropped: reward_error
    exits    its reward ends the verifier  must be dropped: reward_error
    hangs    its reward never ends         must be dropped: reward_timeout
    slow     its reward takes a while      must be trained like any other

So the soak knows by itself what must be dropped, beside the run's own counts (ledger.py). Rewards
are bad for sampled answers only: the self-check and held-out prompts are not affected.
"""

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
OPTIONS = ("soak_kind", "soak_seed", "soak_share")
SLOW_S, FOR_EVER_S = 0.1, 86_400.0


class BadReward(StrEnum):
    RAISES = "raises"
    SLOW = "slow"
    EXITS = "exits"
    HANGS = "hangs"


PARTS = {BadReward.RAISES: 0.5, BadReward.SLOW: 0.3, BadReward.EXITS: 0.1, BadReward.HANGS: 0.1}
"""Of the prompts whose reward is bad."""
BROKEN = (BadReward.RAISES, BadReward.EXITS, BadReward.HANGS)


@dataclass(frozen=True)
class BadExample(Example):
    bad: BadReward = BadReward.RAISES


class BadRewards:
    """Mixed into the class of the recipe's task."""

    soak_seed: int
    soak_share: float

    def train(self, index: int) -> Example:
        example: Example = super().train(index)  # type: ignore[misc]
        bad = bad_reward_at(self.soak_seed, self.soak_share, index)
        if bad is None:
            return example
        return BadExample(**{f.name: getattr(example, f.name) for f in fields(Example)}, bad=bad)

    def reward(self, example: Example, answer: Answer) -> float:
        is_sampled = answer.num_tokens > 1  # the self-check's answers count as one token
        if isinstance(example, BadExample) and is_sampled:
            misbehave(example.bad)
        return super().reward(example, answer)  # type: ignore[misc]


def bad_reward_at(seed: int, share: float, place: int) -> BadReward | None:
    """None: the reward of this prompt is as the task has it."""
    left = random.Random(f"{seed}/fate/{place}").random()
    for bad, part in PARTS.items():
        left -= share * part
        if left < 0:
            return bad
    return None


def misbehave(bad: BadReward) -> None:
    if bad is BadReward.RAISES:
        raise ValueError("soak: this reward always raises")
    if bad is BadReward.EXITS:
        os._exit(7)
    time.sleep(SLOW_S if bad is BadReward.SLOW else FOR_EVER_S)


def options(tasks: TasksConfig, seed: int, share: float) -> TasksConfig:
    """The [tasks] of a recipe, with bad rewards."""
    mine = dict(zip(OPTIONS, (tasks.kind, seed, share), strict=True))
    return replace(tasks, kind=KIND, options={**tasks.options, **mine})


def make(tasks: TasksConfig, seed: int) -> Task:
    """What tasks.kind names: a subclass of the recipe's class, which keeps all else that it has."""
    given: dict[str, Any] = dict(tasks.options)
    kind, soak_seed, share = (given.pop(name) for name in OPTIONS)
    inner = make_task(Config(seed=seed, tasks=replace(tasks, kind=kind, options=given)))
    cls = type(inner)
    inner.__class__ = type(f"Soaked{cls.__name__}", (BadRewards, cls), {})
    inner.soak_seed, inner.soak_share = soak_seed, share  # type: ignore[attr-defined]
    return inner
