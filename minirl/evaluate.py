"""Accuracy on held-out prompts, by the same rollout path as training.

Takes held-out prompts, gives requests for the rollout workers and, when all answers are graded, the
mean reward. Workers pin their version while an evaluation runs; training generation goes on.
"""

from dataclasses import dataclass, field

from minirl.records import Prompt, Trajectory

EVAL_IDS = 1 << 40  # group ids from here on are evaluation's


def is_evaluation(group_id: int) -> bool:
    return group_id >= EVAL_IDS


@dataclass
class Evaluation:
    """One evaluation under way: each prompt is a group of one, in a ring cell of its own."""

    prompts: list[Prompt]
    first_cell: int
    rewards: dict[int, float] = field(default_factory=dict)
    num_failed: int = 0
    versions: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def group_ids(self) -> list[int]:
        return list(range(EVAL_IDS, EVAL_IDS + len(self.prompts)))

    def prompt(self, group_id: int) -> Prompt:
        return self.prompts[group_id - EVAL_IDS]

    def cell(self, group_id: int) -> int:
        return self.first_cell + group_id - EVAL_IDS

    def answered(self, trajectory: Trajectory) -> None:
        self.versions.append(trajectory.head_version)

    def graded(self, group_id: int, reward: float) -> None:
        self.rewards[group_id] = reward

    def failed(self) -> None:
        """No verdict is not a 0: the prompt is left out of the mean."""
        self.num_failed += 1

    @property
    def is_done(self) -> bool:
        return len(self.rewards) + self.num_failed == len(self.prompts)

    @property
    def accuracy(self) -> float:
        return sum(self.rewards.values()) / max(1, len(self.rewards))

    @property
    def version(self) -> int:
        """The oldest that answered."""
        return min(self.versions, default=-1)
