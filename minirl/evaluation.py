"""Accuracy on held-out prompts while a run trains, by the same rollout path.

Takes held-out prompts, gives requests for the rollout workers and, when all answers are graded, the
mean reward with its interval. An evaluation is of one version, whatever the number of engines:

    1. It begins right after a publication, when no batch is in training: the newest version is v.
    2. Each engine that takes part loads v, if it does not serve it yet, pins it and says so. Until
       all have, the controller sends no batch, so v stays the newest: a step or two of an engine.
    3. Then training goes on and publishes; each engine keeps v until its own share is answered.
       It goes on with training groups too, in half of its places, under v: their tokens say so.
    4. Where that fails (an engine died with prompts unanswered, or says another version), what is
       left is heard to the end and thrown away, and the evaluation begins again at 1.
"""

from dataclasses import dataclass, field
from typing import Any

from minirl.records import Prompt, StopReason, Trajectory
from minirl.statistics import interval_of

EVAL_IDS = 1 << 40  # group ids from here on are evaluation's


def is_evaluation(group_id: int) -> bool:
    return group_id >= EVAL_IDS


@dataclass
class Evaluation:
    """One evaluation under way: each prompt is a group of one, in a ring cell of its own."""

    prompts: list[Prompt]
    first_cell: int
    step: int = 0  # training steps done when it began
    is_given_up: bool = False  # a rollback took back the step whose version it evaluates
    pinning: set[int] = field(default_factory=set)  # engines that have not pinned the version yet
    version: int | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    num_answered: int = 0
    num_truncated: int = 0
    num_written: int = 0  # tokens of the answers
    num_failed: int = 0
    num_lost: int = 0
    is_void: bool = False  # its answers are not all of one version
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def group_ids(self) -> list[int]:
        return list(range(EVAL_IDS, EVAL_IDS + len(self.prompts)))

    def prompt(self, group_id: int) -> Prompt:
        return self.prompts[group_id - EVAL_IDS]

    def cell(self, group_id: int) -> int:
        return self.first_cell + group_id - EVAL_IDS

    def pinned(self, engine: int, version: int) -> None:
        self.pinning.discard(engine)
        self.saw(version)

    def saw(self, version: int) -> None:
        self.version = version if self.version is None else self.version
        self.is_void |= version != self.version

    def answered(self, trajectory: Trajectory) -> None:
        self.saw(trajectory.head_version)
        self.saw(trajectory.tail_version)
        self.num_answered += 1
        self.num_truncated += trajectory.stop is StopReason.LENGTH
        self.num_written += trajectory.num_written

    def graded(self, group_id: int, reward: float) -> None:
        self.rewards[group_id] = reward

    def failed(self) -> None:
        """No verdict is not a 0: the prompt is left out of the mean."""
        self.num_failed += 1

    def engine_died(self, engine: int, num_lost: int) -> None:
        """Its weights are gone with it, and perhaps from the store too."""
        self.pinning.discard(engine)
        self.num_lost += num_lost
        self.is_void |= num_lost > 0

    @property
    def is_done(self) -> bool:
        return len(self.rewards) + self.num_failed + self.num_lost == len(self.prompts)

    @property
    def result(self) -> dict[str, float | None]:
        """As evals.jsonl has it (metrics.py). Accuracy is None where no answer was graded."""
        found = interval_of([(reward,) for reward in self.rewards.values()])
        num = self.num_answered
        return {
            "accuracy": found.mean if found else None,
            "low": found.low if found else None,
            "high": found.high if found else None,
            "count": len(self.rewards),
            "failures": self.num_failed,
            "length_mean": self.num_written / num if num else None,
            "truncated_frac": self.num_truncated / num if num else None,
        }

    def answers(self, count: int) -> list[dict[str, Any]]:
        """To the same first prompts every time."""
        return [
            {
                "prompt": self.prompt(group_id).example.prompt,
                "reference": self.prompt(group_id).example.reference,
                "answer": self.texts.get(group_id),
                "reward": self.rewards.get(group_id),
            }
            for group_id in self.group_ids[:count]
        ]
