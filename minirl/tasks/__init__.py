"""What is asked and what is right: prompts (stage 1) and rewards (stage 3)."""

from collections.abc import Sequence
from typing import Protocol

from minirl.records import Answer, Example


class Task(Protocol):
    """A task says what is asked and what is right. Instances are built in the controller (for
    prompts) and in every verifier process (for rewards), from the same arguments.
    """

    num_train: int
    """How many training examples there are; a generated task says a large number."""

    def train(self, index: int) -> Example:
        """The training example at `index`, the same at every call."""
        ...

    def heldout(self, count: int) -> Sequence[Example]:
        """Up to `count` held-out examples, disjoint from training, the same at every call."""
        ...

    def reward(self, example: Example, answer: Answer) -> float:
        """1 is right, 0 is wrong. An exception drops the group: it is never a reward of 0."""
        ...

    def solution(self, example: Example) -> str:
        """An answer made from the reference that must score 1: the task's self-check uses it."""
        ...
