"""Everything that processes say to each other. Records apart from the workers themselves, so that
the controller loads neither vLLM nor a model's code. Tokens and weights never go through a pipe:
they are in shared memory (shm/), and messages name cells and versions.

    worker    is sent                          says
    any       Stop                             Died, which comes from workers.py
    engine    Submit, Abort, Continue          Started, Pinned, Finished, Gone
    verifier  Grade, Ask                       Graded, Replied (of a self-check: Checked)
    rank      Train, Score, Save               Started, Trained, Saved (`minirl sft`: Learned)
    link      Relayed                          Relayed (outpost.py)
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from minirl.buffer import History
from minirl.config import Config
from minirl.devices import Placement
from minirl.records import Batch, Example, Trajectory
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore


class Role(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"
    VERIFY = "verify"
    SFT = "sft"  # a rank of `minirl sft`
    LINK = "link"  # the head's process that talks with the other boxes


class Started(NamedTuple):
    """It is up: an engine serves its first version; rank 0 has published one."""

    note: str = ""  # for the console


class Stop: ...


class StartThere(NamedTuple):  # to another box: start this worker in place of its predecessor
    delay_s: float


class Relayed(NamedTuple):
    """What a worker of another box is sent, or says."""

    name: str
    start: int  # so that a restarted worker neither gets nor repeats its predecessor's messages
    message: object
    rows: tuple[tuple[int, int, bytes], ...] = ()  # cell, group id, columns of the ring


class Died(NamedTuple):
    """The worker is gone, and all that it sent was received. One that fails says so itself."""

    how: str
    is_final: bool  # a MinirlError: a new worker would fail the same way


class GroupRequest(NamedTuple):
    group_id: int
    prompt: tuple[int, ...]
    cells: tuple[int, ...]  # of the ring, one for each trajectory
    is_eval: bool = False  # sampled as [eval] says, under one pinned version


class Submit(NamedTuple):
    groups: tuple[GroupRequest, ...]
    seed: int | None = None  # at η = 0, where runs are repeatable: the idle engine reseeds


class Abort(NamedTuple):
    group_id: int


class Continue(NamedTuple):
    """After turns: (group id, place, tokens of the reply); no tokens: that turn was the last."""

    replies: tuple[tuple[int, int, tuple[int, ...]], ...]


class Pinned(NamedTuple):
    version: int  # that the evaluation groups of a Submit are sampled under


class Finished(NamedTuple):
    """Trajectories that are sealed in the ring: (group id, place in the group, descriptor)."""

    trajectories: tuple[tuple[int, int, Trajectory], ...]
    are_turns: bool = False  # which continue if the task has a reply


class Gone(NamedTuple):
    group_id: int  # nothing will come of it, and its cells are no longer written to
    why: str  # empty where the controller asked for it


class Grade(NamedTuple):
    group_id: int
    example: Example
    trajectories: tuple[Trajectory, ...]


class Graded(NamedTuple):
    group_id: int
    rewards: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    error: str = ""  # else: one of the rewards failed, as this says


class Ask(NamedTuple):
    group_id: int
    place: int
    example: Example
    trajectory: Trajectory


class Replied(NamedTuple):
    group_id: int
    place: int
    tokens: tuple[int, ...]  # none: the conversation is over
    error: str = ""  # else: there is no reply, as this says


class Checked(NamedTuple):
    """A task has passed its self-check (tasks/check.py)."""

    shown: str
    warning: str = ""  # held-out prompts that are trained on


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    config: Config
    folder: str  # of the model; on resume, the checkpoint
    placement: Placement
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""  # a file where the ranks find each other


@dataclass(frozen=True, kw_only=True)
class TrainerSetup(RankSetup):
    tokenizer_folder: str
    ring: TrajectoryRing
    store: WeightStore
    version: int
    is_resumed: bool = False
    peak_flops: float | None = None  # of its GPU, in bfloat16, per second; None: not known


@dataclass(frozen=True, kw_only=True)
class SftSetup(RankSetup):  # [train] of its config has the values of [sft]
    output: str  # the folder of the trained model


class Train(NamedTuple):
    batch: Batch  # the whole: each rank works out its own part


class Score(NamedTuple):
    """To rank 0, which trains from `version`: answers that ended under it, to compare the engine's
    logprobs with its own. It skips a cell that is reused by then (TornEntry) or comes too late."""

    version: int
    cells: tuple[tuple[int, int], ...]  # (cell, group id)


@dataclass(frozen=True)
class CheckpointState:
    step: int
    history: History
    consumed_below: int  # prompts: all before this one, and those of `consumed_above`
    consumed_above: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()  # prompts that come again on resume
    evaluating: int | None = None  # the version whose evaluation was under way
    recipe: str = ""


class Save(NamedTuple):
    folder: str  # rank 0 writes it
    state: CheckpointState
    accuracies: tuple[tuple[int, float], ...] = ()  # by version: the best checkpoint stays


class AnswerTokens(NamedTuple):  # of one readable answer, in samples.jsonl
    tokens: list[str]
    token_versions: list[int]
    token_gaps: list[float | None]  # |engine's logprob - trainer's|; None: not known


class Trained(NamedTuple):
    """From rank 0: `version` is published. Values are named as in metrics.py."""

    version: int
    values: dict[str, float | None]
    staleness_counts: tuple[int, ...] = ()  # trained tokens of staleness 0, 1, …
    problem: str = ""  # why an update was left out: "the loss was not finite"
    samples: tuple[AnswerTokens, ...] = ()  # of the first log.samples groups


class Saved(NamedTuple):
    folder: str
    error: str = ""  # why there is no checkpoint


class Learned(NamedTuple):
    """From rank 0 of `minirl sft`: once before the first step, then one per step."""

    step: int
    values: dict[str, float | None]
    num_too_long: int
