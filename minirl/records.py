"""The nouns. Plain records that every room of the house shares; no torch, no vLLM, no behaviour.

Glossary
    rollout      the act of sampling; a *trajectory* is its record
    trajectory   flat arrays of one length: tokens, mask (1 where the model wrote the token),
                 logprobs (of the sampling distribution), versions (which weights wrote the token,
                 -1 where no model did). It lives in one cell of the shared-memory ring
    turn         what the model wrote until it ended or met a stop text. A task may *reply*, and the
                 model continues: all turns of a conversation are one trajectory
    group        the trajectories of one prompt; it carries its id, never rebuilt from positions
    version      counts published weights: 0 before the first update
    staleness    of a token: the version a training step starts from, minus the token's version
    head         a trajectory's first written token; head staleness is that token's
    slot         a group's place in the buffer: held from dispatch until the weights trained on it
                 are published, or until the group is dropped
    cell         a trajectory's place in the ring: a slot owns group_size of them
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple


class StopReason(IntEnum):  # why a trajectory ended
    STOP = 0  # the model ended its answer
    LENGTH = 1  # cut at rollout.max_new_tokens, or at rollout.max_turns


class Drop(StrEnum):
    """Why a group was dropped; each has a count, and a metric of its own."""

    STALE = "stale"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REPLY_ERROR = "reply_error"  # of a task with several turns
    REPLY_TIMEOUT = "reply_timeout"
    TOO_LONG = "too_long"  # the prompt is longer than tasks.max_prompt_tokens
    REFUSED = "refused"  # the engine would not take the prompt
    EQUAL_REWARDS = "equal_rewards"  # nothing to learn from it (DAPO's dynamic sampling)
    TRUNCATED = "truncated"  # all its answers were cut, and cut answers are not trained
    WORKER_DIED = "worker_died"  # its prompt is queued again under a new group id

    @property
    def words(self) -> str:
        return self.replace("_", " ")


@dataclass(frozen=True)
class Example:
    """What a task asks: text (or chat messages) and the reference that its reward knows."""

    prompt: str | tuple[dict[str, str], ...]
    reference: str
    worked: str = ""  # an answer with its working, where the task has one: `minirl sft` teaches it


class Answer(NamedTuple):
    """What a reward sees of one trajectory."""

    text: str  # what the model wrote, in its last turn; decoded, special tokens left out
    stop: StopReason
    num_tokens: int  # that the model wrote, in all turns
    turns: tuple[str, ...] = ()  # the model's texts and the task's replies, in turn


@dataclass(frozen=True)
class Prompt:
    """An example that was rendered and tokenised. `index` is its place in the task's stream."""

    index: int
    example: Example
    tokens: tuple[int, ...]


class Trajectory(NamedTuple):
    """The descriptor of one finished trajectory: where it lies and what is known of it."""

    cell: int
    length: int  # prompt, written tokens and replies
    num_written: int  # tokens with mask 1
    stop: StopReason
    head_version: int
    tail_version: int
    num_replied: int = 0  # tokens of a task's replies
    num_turns: int = 1  # of the model

    @property
    def num_new(self) -> int:
        """What rollout.max_new_tokens limits."""
        return self.num_written + self.num_replied


class Group(NamedTuple):
    """A finished, graded group, ready to train."""

    id: int
    prompt_index: int
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]
    masked: frozenset[int] = frozenset()  # indices that count in the baseline but are not trained

    @property
    def trained(self) -> tuple[Trajectory, ...]:
        return tuple(t for i, t in enumerate(self.trajectories) if i not in self.masked)

    @property
    def head_version(self) -> int:
        return min([t.head_version for t in self.trained])

    @property
    def newest_version(self) -> int:
        return max([t.tail_version for t in self.trained])


class Batch(NamedTuple):
    """What one training step trains: the step starts from `version` and gives `version + 1`."""

    step: int
    version: int
    groups: tuple[Group, ...]
