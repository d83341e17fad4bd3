"""A batch on disk with all that is needed to compute it again, and the computing.

    record/step-000012.safetensors   each trained batch, with log.record = true
    bad_batches/step-000012/         a batch that went bad: batch.safetensors in the same form, and
                                     weights/: what the step started from

A full disk costs a file and a note, never the run. `replay` trains in one rank: from a checkpoint
to the bit; a bad batch from the published weights alone (a new critic and optimizer, LoRA merged).
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

from minirl import model
from minirl.config import Config
from minirl.devices import Placement, use_training_device
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
COMPARED = ("train/loss", "train/grad_norm")
MAX_SAVED = 2  # bad batches of a run that continues: each holds a whole model


@dataclass(frozen=True)
class SavedBatch:
    batch: Batch
    config: Config
    threads: int  # of a trainer rank: the last bit of a sum may depend on them
    values: dict[str, float | None] = field(default_factory=dict)  # the step's metrics
    why: str = ""  # it went bad
    columns: dict[str, Any] = field(default_factory=dict)  # of all trajectories, end to end

    @property
    def lengths(self) -> list[int]:
        return [t.length for group in self.batch.groups for t in group.trajectories]


HEADER = TypeAdapter(SavedBatch)


def write(path: Path, saved: SavedBatch) -> None:
    from safetensors.numpy import save_file

    about = HEADER.dump_python(saved, mode="json", exclude={"columns"})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        save_file(saved.columns, aside, {"batch": json.dumps(about)})


def read(path: Path) -> SavedBatch:
    from safetensors import safe_open

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


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "record" / f"step-{step:06d}.safetensors"


@dataclass
class BatchSaver:
    """In the controller. `source` is the model folder whose config is saved with weights."""

    config: Config
    run_dir: Path
    ring: TrajectoryRing
    store: WeightStore
    source: Path
    threads: int = 1
    num_missing: int = 0  # steps that could not be recorded
    num_saved: int = 0  # bad batches

    def record(self, batch: Batch, values: dict[str, float | None]) -> str:
        """With log.record. Returns a note for the first step that is missing, else ""."""
        try:
            if self.config.log.record:
                write(path_of(self.run_dir, batch.step), self.take(batch, values=values))
        except Exception as error:  # safetensors has its own kind for a full disk
            self.num_missing += 1
            if self.num_missing == 1:
                return f"step {batch.step} was not recorded: {one_line(str(error))}"
        return ""

    def forget_after(self, step: int) -> None:
        """Recorded steps that will be trained again."""
        for path in (self.run_dir / "record").glob("step-*.safetensors"):
            if path.name > path_of(self.run_dir, step).name:
                path.unlink()

    def save_bad(self, batch: Batch, version: int, why: str, must_save: bool = True) -> str:
        """With the weights of `version`. Returns the end of a sentence that says where it is."""
        from safetensors.torch import save_file

        if not batch.groups or (self.num_saved >= MAX_SAVED and not must_save):
            return ""
        self.num_saved += 1
        folder = self.run_dir / "bad_batches" / f"step-{batch.step:06d}"
        try:
            with checkpoint.written_aside(folder) as aside:
                if (found := self.store.snapshot(version)) is None:
                    raise MinirlError(f"version {version} is no longer in memory")
                (weights := aside / "weights").mkdir()
                save_file(found, weights / "model.safetensors", {"format": "pt"})
                shutil.copy2(self.source / "config.json", weights)
                checkpoint.copy_tokenizer(self.source, weights)
                write(aside / FILE, self.take(batch, why=why))
        except Exception as error:  # safetensors has its own kind for a full disk
            return f"; its batch could not be saved: {one_line(str(error))}"
        return f"; look at its batch with: minirl replay {folder}"

    def take(self, batch: Batch, **about: Any) -> SavedBatch:
        """A copy of all that the batch's cells hold. Cells are counted anew, from 0."""
        cells, views, groups = count(), [], []
        for group in batch.groups:
            views += [self.ring.read(t.cell, group.id) for t in group.trajectories]
            own = tuple(t._replace(cell=next(cells)) for t in group.trajectories)
            groups.append(group._replace(trajectories=own))
        columns = {name: np.concatenate([getattr(v, name) for v in views]) for name in COLUMNS}
        batch = replace(batch, groups=tuple(groups))
        return SavedBatch(batch, self.config, self.threads, columns=columns, **about)


class Replayed(NamedTuple):
    saved: SavedBatch
    values: dict[str, float | None]  # the step's metrics, computed here
    bad: list[str]  # what is not finite

    @property
    def is_good(self) -> bool:
        """Finite, and close to its record: other ranks and threads sum in another order."""
        both = (self.values, self.saved.values or self.values)
        here, there = (np.array([v.get(name) for name in COMPARED], float) for v in both)
        return not self.bad and np.allclose(here, there, rtol=1e-3)

    @property
    def lines(self) -> list[str]:
        """As `minirl replay` prints it."""
        lines = [self.saved.why] if self.saved.why else []
        for name in COMPARED:
            recorded = f"; recorded {self.saved.values.get(name)!r}" if self.saved.values else ""
            lines.append(f"step {self.saved.batch.step}: {name} {self.values[name]!r}{recorded}")
        return lines + self.bad


def replay(path: Path) -> Iterator[Replayed]:
    """A folder of bad_batches/, or a file of record/: with the recorded batches before it, from the
    last checkpoint on."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        remedy = "name a folder of a run's bad_batches/, or a file of record/ (log.record = true)"
        raise RecipeError("PATH", str(path), "is no saved batch", remedy)
    batches, folder = [read(path)], path.parent / "weights"
    if not folder.is_dir():
        run_dir, last = path.parent.parent, batches[0].batch.step
        before = [p for p in checkpoint.found(run_dir) if int(p.name[5:]) < last]
        folder = before[-1] if before else model.local_folder(batches[0].config)
        first = int(folder.name[5:]) if before else 0
        batches = [read(path_of(run_dir, step)) for step in range(first + 1, last + 1)]
    with checkpoint.as_one_line(folder, "cannot be computed again"):
        trainer = _trainer(batches, folder)
        for saved in batches:
            trained = trainer.train(put(saved, trainer.setup.ring))
            yield Replayed(saved, trained.values, [*_not_finite(trainer, saved.batch)])


def _trainer(batches: list[SavedBatch], folder: Path) -> "Trainer":
    import torch

    from minirl.train.trainer import Trainer

    config, is_merged = batches[0].config, folder.name == "weights"
    if is_merged:
        config = replace(config, train=replace(config.train, lora_rank=0))
    is_gpu = config.devices.kind != "cpu" and torch.cuda.is_available()
    place = Placement("cuda" if is_gpu else "cpu", cores=tuple(range(batches[0].threads)))
    use_training_device(place)
    torch.manual_seed(config.seed)
    lengths = [saved.lengths for saved in batches]
    is_alone = is_merged and not config.train.kl_coef
    setup = TrainerSetup(
        config=config,
        folder=str(folder),
        tokenizer_folder=str(folder if is_alone else model.local_folder(config)),
        placement=place,
        ring=TrajectoryRing(max(map(len, lengths)), max(map(max, lengths))),
        store=WeightStore(model.weight_table(folder), config.model.dtype),
        is_resumed=(folder / checkpoint.STATE).is_file(),
        version=batches[0].batch.version,
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
