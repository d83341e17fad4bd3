"""What the controller and the trainer ranks say to each other, for `minirl train` and `minirl sft`.
Apart from trainer.py, so that the controller loads no model's code.
"""

from dataclasses import dataclass, field

from minirl.buffer import History
from minirl.config import Config
from minirl.devices import Placement
from minirl.records import Batch
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank is spawned with."""

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


@dataclass(frozen=True, kw_only=True)
class SftSetup(RankSetup):
    """Of `minirl sft`. [train] of its config has the values of [sft]."""

    output: str  # the folder of the trained model


@dataclass(frozen=True)
class Train:
    """To every rank: the whole batch. Each rank works out its own part."""

    batch: Batch


@dataclass(frozen=True)
class CheckpointState:
    """The controller's part of a checkpoint."""

    step: int
    history: History
    consumed_below: int  # prompts: all before this one, and those of `consumed_above`
    consumed_above: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()  # prompts that come again on resume
    evaluating: int | None = None  # the version whose evaluation was under way
    recipe: str = ""


@dataclass(frozen=True)
class Save:
    """To every rank: rank 0 writes a checkpoint, with the controller's state beside its own."""

    folder: str
    state: CheckpointState
    accuracies: tuple[tuple[int, float], ...] = ()  # by version: the best checkpoint stays


@dataclass(frozen=True)
class Ready:
    """From each rank: the model is loaded; from rank 0 also: its first version is published."""


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens of one readable answer, as samples.jsonl has them."""

    tokens: list[str]
    token_versions: list[int]
    token_gaps: list[float | None]  # |engine's logprob - trainer's|; None: not known


@dataclass(frozen=True)
class Trained:
    """From rank 0: `version` is published. Values are named as in metrics.py."""

    version: int
    values: dict[str, float | None] = field(default_factory=dict)
    ages: tuple[int, ...] = ()  # trained tokens of staleness 0, 1, …
    problem: str = ""  # why an update was left out: "the loss was not finite"
    samples: tuple[AnswerTokens, ...] = ()  # of the first log.samples groups


@dataclass(frozen=True)
class Saved:
    """From rank 0: the checkpoint is whole, or why there is none."""

    folder: str
    error: str = ""


@dataclass(frozen=True)
class Learned:
    """From rank 0 of `minirl sft`: once before the first step, then one per step."""

    step: int
    values: dict[str, float | None]
    num_too_long: int
