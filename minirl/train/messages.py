"""What the controller and the trainer ranks say to each other. Apart from trainer.py, so that the
controller loads no model's code.
"""

from dataclasses import dataclass, field
from typing import Any

from minirl.config import Config
from minirl.devices import Placement
from minirl.records import Batch
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore


@dataclass(frozen=True)
class TrainerSetup:
    """What a rank is spawned with."""

    config: Config
    folder: str  # of the model; on resume, the checkpoint
    tokenizer_folder: str
    placement: Placement
    ring: TrajectoryRing
    store: WeightStore
    version: int
    is_resumed: bool = False
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""  # a file where the ranks find each other


@dataclass(frozen=True)
class Train:
    """To every rank: the whole batch. Each rank works out its own part."""

    batch: Batch


@dataclass(frozen=True)
class Save:
    """To every rank: rank 0 writes a checkpoint, with the controller's state beside its own."""

    folder: str
    state: dict[str, Any]
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


# `minirl sft` -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SftSetup:
    """What a rank is spawned with. [train] of its config has the values of [sft]."""

    config: Config
    folder: str
    rank: int
    num_ranks: int
    rendezvous: str
    placement: Placement


@dataclass(frozen=True)
class Learn:
    """To every rank: step 0, 1, …, and after it the loss on held-out examples."""

    step: int
    is_evaluated: bool


@dataclass(frozen=True)
class SaveModel:
    folder: str


@dataclass(frozen=True)
class Learned:
    """From rank 0: once before the first step, then one per step."""

    values: dict[str, float | None]
    num_too_long: int
