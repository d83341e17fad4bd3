"""A batch that went bad, on disk with all that is needed to compute it again, and the computing.

    bad_batches/step-000012/   batch.safetensors, and weights/: what the step started from
    record/step-000012/        the same of every step, where log.record is true

A full disk costs the folder and a note, never the run. `replay` trains it in one rank, from the
published weights alone: with a new critic and optimizer, and LoRA merged.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays

from minirl import model
from minirl.config import Config
from minirl.devices import Placement, num_cores, use_training_device
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import TrainerSetup
from minirl.records import Batch
from minirl.run_dir import replacing
from minirl.shm.board import Board
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.train import checkpoint

if TYPE_CHECKING:  # the controller saves batches without loading a model's code
    from minirl.train.trainer import Trainer

FILE = "batch.safetensors"
COLUMNS = ("tokens", "logprobs", "versions")  # as a ring takes them; versions give the mask
SHOWN = ("train/loss", "train/grad_norm")
MAX_SAVED = 2  # of a run that continues: each holds a whole model


@dataclass(frozen=True)
class SavedBatch:
    batch: Batch
    config: Config
    why: str  # it went bad
    columns: dict[str, Any] = field(default_factory=dict)  # of all trajectories, end to end

    @property
    def lengths(self) -> list[int]:
        return [t.length for group in self.batch.groups for t in group.trajectories]


HEADER = TypeAdapter(SavedBatch)


def read(path: Path) -> SavedBatch:
    with checkpoint.as_one_line(path, "cannot be computed again"):
        with safe_open(path, framework="np") as file:
            saved = HEADER.validate_json((file.metadata() or {})["batch"])
            saved.columns.update({name: file.get_tensor(name) for name in COLUMNS})
        shapes = {column.shape for column in saved.columns.values()}
        if shapes != {(sum(saved.lengths),)} or min(saved.lengths) < 1:
            raise ValueError("its trajectories have other lengths than their tokens")
    return saved


def put(saved: SavedBatch, ring: TrajectoryRing) -> Batch:
    """Into the first cells of a ring, whatever these held."""
    ends = np.cumsum(saved.lengths)[:-1]
    views = zip(*(np.split(saved.columns[name], ends) for name in COLUMNS), strict=True)
    for group in saved.batch.groups:
        for trajectory in group.trajectories:
            ring.write(trajectory.cell, group.id, (), *next(views))
    return saved.batch


@dataclass
class BatchSaver:
    """In the controller. `source` is the model folder whose config is saved with weights."""

    config: Config
    run_dir: Path
    ring: TrajectoryRing
    store: WeightStore
    source: Path
    num_saved: int = 0

    def save_bad(self, batch: Batch, why: str, must_save: bool = True) -> str:
        """With the weights it began with. Returns the end of a sentence that says where it is."""
        if not batch.groups or (self.num_saved >= MAX_SAVED and not must_save):
            return ""
        self.num_saved += 1
        return self.save("bad_batches", batch, why)

    def save(self, name: str, batch: Batch, why: str) -> str:
        from safetensors.torch import save_file

        folder = self.run_dir / name / f"step-{batch.step:06d}"
        try:
            with replacing(folder) as aside:
                if (found := self.store.attempt(batch.version, self.copy)) is None:
                    raise MinirlError(f"version {batch.version} is no longer in memory")
                (weights := aside / "weights").mkdir(parents=True)
                save_file(found.loaded, weights / "model.safetensors", {"format": "pt"})
                shutil.copy2(self.source / "config.json", weights)
                checkpoint.copy_tokenizer(self.source, weights)
                saved = self.take(batch, why)
                about = HEADER.dump_python(saved, mode="json", exclude={"columns"})
                save_arrays(saved.columns, aside / FILE, {"batch": json.dumps(about)})
        except Exception as error:  # safetensors has its own kind for a full disk
            return f"; its batch could not be saved: {one_line(str(error))}"
        return f"; look at its batch with: minirl replay {folder}"

    def copy(self, slot: int) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.store.views(slot)}

    def take(self, batch: Batch, why: str) -> SavedBatch:
        """A copy of all that the batch's cells hold. Cells are counted anew, from 0."""
        cells, views, groups = count(), [], []
        for group in batch.groups:
            views += [self.ring.read(t.cell, group.id) for t in group.trajectories]
            own = tuple(t._replace(cell=next(cells)) for t in group.trajectories)
            groups.append(group._replace(trajectories=own))
        columns = {name: np.concatenate([getattr(v, name) for v in views]) for name in COLUMNS}
        return SavedBatch(batch._replace(groups=tuple(groups)), self.config, why, columns)


class Replayed(NamedTuple):
    saved: SavedBatch
    values: dict[str, float | None]  # the step's metrics, computed here
    bad: list[str]  # what is not finite

    @property
    def lines(self) -> list[str]:
        """As `minirl replay` prints it."""
        step = self.saved.batch.step
        shown = [f"step {step}: {name} {self.values[name]!r}" for name in SHOWN]
        return [self.saved.why, *shown, *self.bad]


def replay(folder: Path) -> Replayed:
    """A folder of bad_batches/ or record/."""
    if not (folder / FILE).is_file():
        remedy = "name a folder of a run's bad_batches/ or record/"
        raise RecipeError("PATH", str(folder), "holds no saved batch", remedy)
    saved = read(folder / FILE)
    with checkpoint.as_one_line(folder, "cannot be computed again"):
        trainer = _trainer_of(saved, folder / "weights")
        trained = trainer.train(put(saved, trainer.setup.ring))
    return Replayed(saved, trained.values, [*_not_finite(trainer, saved.batch)])


def _trainer_of(saved: SavedBatch, weights: Path) -> "Trainer":
    import torch

    config = replace(saved.config, train=replace(saved.config.train, lora_rank=0))
    is_gpu = config.devices.kind != "cpu" and torch.cuda.is_available()
    place = Placement("cuda" if is_gpu else "cpu", cores=tuple(range(num_cores())))
    use_training_device(place)
    torch.manual_seed(config.seed)
    ring = TrajectoryRing(len(saved.lengths), max(saved.lengths))
    return lone_trainer(config, weights, place, ring, saved.batch.version)


def lone_trainer(
    config: Config, folder: Path, place: Placement, ring: TrajectoryRing, version: int = 0
) -> "Trainer":
    """Of one rank, which no controller sees."""
    from minirl.train.trainer import Trainer

    setup = TrainerSetup(
        config=config,
        folder=str(folder),
        tokenizer_folder=str(model.local_folder(config) if config.train.kl_coef else folder),
        placement=place,
        ring=ring,
        store=WeightStore(model.weight_table(folder), config.model.dtype),
        version=version,
    )
    return Trainer(setup, Board(1).writer(0))


def _not_finite(trainer: "Trainer", batch: Batch) -> Iterator[str]:
    """The first token that is not finite, of each trajectory, and the first gradients."""
    logprobs_A = trainer.logprobs_A.cpu().numpy()
    for group, items in zip(batch.groups, trainer.prepared.groups, strict=True):
        for place, item in enumerate(items):
            for what, column in {
                "vLLM's logprob": item.view.logprobs,
                "the advantage": trainer.prepared.advantages[item.place],
                "the trainer's logprob": logprobs_A[item.place],
            }.items():
                if len(at := np.flatnonzero(item.trainable & ~np.isfinite(column))):
                    where = f"group {group.id}, trajectory {place}, token {at[0]}"
                    yield f"{where}: {what} is not finite"
                    break
    for name in trainer.bad_gradients[:5]:
        yield f"the gradient of {name} is not finite"
