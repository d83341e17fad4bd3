"""What the controller and the trainer ranks say to each other. No torch: the controller loads none
of the trainer's code.
"""

from dataclasses import dataclass, field
from typing import Any

from minirl.records import Batch


@dataclass(frozen=True)
class Train:
    """To every rank: the whole batch. Each rank works out its own part."""

    batch: Batch


@dataclass(frozen=True)
class Save:
    """To rank 0: write a checkpoint, with the controller's own state beside the trainer's."""

    folder: str
    state: dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """From each rank: the model is loaded; from rank 0 also: its first version is published."""


@dataclass(frozen=True)
class Trained:
    """From rank 0: `version` is published. Values are named as in metrics.py."""

    version: int
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    folder: str
