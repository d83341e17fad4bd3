"""A batch on disk with all that is needed to compute it again, and the computing.

    record/step-000012.safetensors   each trained batch, with log.record = true
    bad_batches/step-000012/         a batch that went bad: batch.safetensors in the same form,
                                     recipe.toml, and weights/: what the step started from

`BatchSaver` takes a batch's descriptors while its ring cells are still its own. A full disk costs a
file and a note, never the run. `replay` gives saved batches to the trainer's own code, without any
engine, in one rank. From a checkpoint it has the optimizer's state too, and its numbers equal a
one-rank run's to the bit. A bad batch has only the published weights: its critic is new, LoRA is
merged, and a second minibatch follows Adam's first step.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from minirl import model
from minirl.config import TINY, Config
from minirl.devices import Placement, use_training_device
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.recipe import load, to_toml
from minirl.records import Batch
from minirl.run_dir import replacing
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.train import checkpoint
from minirl.train.messages import TrainerSetup

if TYPE_CHECKING:  # the controller saves batches without loading a model's code
    from minirl.train.trainer import Trainer

RECORD, BAD, FILE = "record", "bad_batches", "batch.safetensors"
COLUMNS = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
MAX_SAVED = 2  # bad batches of a run that continues: each holds a whole model
COMPARED = ("train/loss", "train/grad_norm")
CLOSE = 1e-3  # relative: other ranks and threads sum in another order


@dataclass(frozen=True)
class Header:
    batch: Batch
    values: dict[str, float | None] = field(default_factory=dict)  # the step's metrics
    threads: int = 1  # of a trainer rank: the last bit of a sum may depend on them
    why: str = ""


@dataclass(frozen=True)
class SavedBatch(Header):
    columns: dict[str, NDArray] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return [t.length for group in self.batch.groups for t in group.trajectories]


HEADER = TypeAdapter(Header)


# Saving ----------------------------------------------------------------------------------------


def take(batch: Batch, ring: TrajectoryRing, **about: Any) -> SavedBatch:
    """A copy of all that the batch's cells hold. Cells are counted anew, from 0."""
    cells, views, groups = count(), [], []
    for group in batch.groups:
        views += [ring.read(t.cell, group.id) for t in group.trajectories]
        own = tuple(t._replace(cell=next(cells)) for t in group.trajectories)
        groups.append(group._replace(trajectories=own))
    columns = {name: np.concatenate([getattr(view, name) for view in views]) for name in COLUMNS}
    return SavedBatch(replace(batch, groups=tuple(groups)), columns=columns, **about)


def write(path: Path, saved: SavedBatch) -> None:
    from safetensors.numpy import save_file

    header = json.dumps(HEADER.dump_python(saved, mode="json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        save_file(saved.columns, aside, {"batch": header})


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / RECORD / f"step-{step:06d}.safetensors"


@dataclass
class BatchSaver:
    """In the controller. `source` is the model folder whose config goes with saved weights."""

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
        if not self.config.log.record:
            return ""
        try:
            taken = take(batch, self.ring, values=values, threads=self.threads)
            write(path_of(self.run_dir, batch.step), taken)
        except Exception as error:  # safetensors has its own kind for a full disk
            self.num_missing += 1
            note = f"step {batch.step} was not recorded: {one_line(str(error))}"
            return note if self.num_missing == 1 else ""
        return ""

    def forget_after(self, step: int) -> None:
        """Recorded steps that will be trained again."""
        for path in (self.run_dir / RECORD).glob("step-*.safetensors"):
            if path.name > path_of(self.run_dir, step).name:
                path.unlink()

    def save_bad(self, batch: Batch, version: int, why: str, must_save: bool = True) -> str:
        """With the weights of `version`. Returns the end of a sentence that says where it is."""
        if not batch.groups or (self.num_saved >= MAX_SAVED and not must_save):
            return ""
        self.num_saved += 1
        folder = self.run_dir / BAD / f"step-{batch.step:06d}"
        try:
            with checkpoint.written_aside(folder) as aside:
                self._write_weights(aside / "weights", version)
                write(aside / FILE, take(batch, self.ring, threads=self.threads, why=why))
                (aside / "recipe.toml").write_text(to_toml(self.config))
        except Exception as error:  # safetensors has its own kind for a full disk
            return f"; its batch could not be saved: {one_line(str(error))}"
        return f"; look at its batch with: minirl replay {folder}"

    def _write_weights(self, folder: Path, version: int) -> None:
        """Nothing where the store no longer has that version."""
        from safetensors.torch import save_file

        folder.mkdir()
        if (found := self.store.snapshot(version)) is not None:
            save_file(found[0], folder / "model.safetensors", {"format": "pt"})
            checkpoint.copy_tokenizer(self.source, folder)
            shutil.copy2(self.source / "config.json", folder)


# Reading ---------------------------------------------------------------------------------------


def read(path: Path) -> SavedBatch:
    from safetensors import safe_open

    with checkpoint.as_one_line(path, "cannot be computed again"):
        with safe_open(path, framework="np") as file:
            header = HEADER.validate_json((file.metadata() or {})["batch"])
            columns = {name: file.get_tensor(name) for name in COLUMNS}
        saved = SavedBatch(**vars(header), columns=columns)
        total, groups = sum(saved.lengths), saved.batch.groups
        for name, dtype in COLUMNS.items():
            if columns[name].dtype != dtype or columns[name].shape != (total,):
                raise ValueError(f"{name} is not {total} times {np.dtype(dtype).name}")
        cells = [t.cell for group in groups for t in group.trajectories]
        are_graded = all(len(group.rewards) == len(group.trajectories) for group in groups)
        if not are_graded or min(saved.lengths) < 1 or cells != list(range(len(cells))):
            raise ValueError("a trajectory is empty, or has no cell or no reward")
    return saved


def put(saved: SavedBatch, ring: TrajectoryRing) -> Batch:
    """Into the first cells of a ring, whatever these held."""
    start = 0
    for group in saved.batch.groups:
        for trajectory in group.trajectories:
            at = slice(start, start + trajectory.length)
            own = {name: saved.columns[name][at] for name in ("tokens", "logprobs", "versions")}
            ring.write(trajectory.cell, group.id, (), **own)  # the mask follows from versions
            start = at.stop
    return saved.batch


# Computing again -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    saved: SavedBatch
    values: dict[str, float | None]  # the step's metrics, computed here
    bad_tokens: tuple[str, ...] = ()  # the first that is not finite, of each trajectory
    bad_gradients: tuple[str, ...] = ()  # names of parameters

    @property
    def difference(self) -> float:
        """Of loss and gradient norm from the recorded ones, relative; 0: equal to the bit."""
        return max(_gap(self.values[name], self.saved.values.get(name)) for name in COMPARED)

    @property
    def is_good(self) -> bool:
        """Finite, and as recorded where there is a record of its numbers."""
        is_same = not self.saved.values or self.difference < CLOSE
        is_finite = not self.values["train/skipped_updates"]
        return is_same and is_finite and not self.bad_tokens

    @property
    def lines(self) -> list[str]:
        """As `minirl replay` prints it."""
        here = ", ".join(f"{name} {self.values[name]!r}" for name in COMPARED)
        if self.saved.values:
            gap, loss = self.difference, self.saved.values.get("train/loss")
            answer = "equal" if not gap else f"close ({gap:.0e})" if gap < CLOSE else "DIFFERENT"
            here += f"; recorded loss {loss!r}: {answer}"
        bad = [f"gradients that are not finite: {name}" for name in self.bad_gradients[:5]]
        why = [self.saved.why] if self.saved.why else []
        return [*why, f"step {self.saved.batch.step}: {here}", *self.bad_tokens, *bad]


def _gap(ours: float | None, theirs: float | None) -> float:
    """Relative. A record has null for what is not finite."""
    ours = ours if ours is not None and math.isfinite(ours) else None
    if ours == theirs:
        return 0.0
    if ours is None or theirs is None:
        return math.inf
    return abs(ours - theirs) / max(abs(ours), abs(theirs))


@dataclass(frozen=True)
class Plan:
    """What to train again: `batches` in order, from the weights of `folder`."""

    config: Config
    folder: Path
    source: Path  # the model that the run began with
    batches: list[SavedBatch]
    is_resumed: bool = False  # `folder` is a checkpoint


def plan(path: Path, first: int = 0) -> Plan:
    """`path`: a run with record/, one file of it, or a folder of bad_batches/."""
    if (path / FILE).is_file():
        return _plan_of_bad(path)
    is_run = (path / RECORD).is_dir()
    if not is_run and not (path.is_file() and path.parent.name == RECORD):
        rule = "holds no saved batch" if path.exists() else "does not exist"
        remedy = "name a folder of a run's bad_batches/, or a run trained with log.record = true"
        raise RecipeError("PATH", str(path), rule, remedy)
    run_dir = path if is_run else path.parent.parent
    config = load(run_dir / "recipe.toml").config
    checkpoints = {int(p.name[5:]): p for p in checkpoint.found(run_dir)}
    last = math.inf if is_run else read(path).batch.step
    if not is_run:
        first = max((step for step in checkpoints if step < last), default=0)
    if first and first not in checkpoints:
        remedy = f"there are {', '.join(map(str, checkpoints)) or 'none'}, and 0 is the beginning"
        raise RecipeError("--from", first, "the run kept no checkpoint of this step", remedy)
    source, batches = _source(config), _recorded(run_dir, first, last)
    return Plan(config, checkpoints.get(first, source), source, batches, is_resumed=first > 0)


def _plan_of_bad(path: Path) -> Plan:
    config, weights = load(path / "recipe.toml").config, path / "weights"
    if not (weights / "model.safetensors").is_file():
        raise MinirlError(f"{path} has no weights: their version was gone when it was saved")
    source = _source(config) if config.train.kl_coef else weights
    merged = replace(config, train=replace(config.train, lora_rank=0))
    return Plan(merged, weights, source, [read(path / FILE)])


def _source(config: Config) -> Path:
    from minirl.train.tiny import ensure_tiny_model

    if config.model.path == TINY:
        return ensure_tiny_model(config.seed, lambda line: None)
    return model.local_folder(config)


def _recorded(run_dir: Path, first: int, last: float) -> list[SavedBatch]:
    """All steps after the first, without a gap. Each is small; together they fit in memory."""
    names = [path.stem[5:] for path in (run_dir / RECORD).glob("step-*.safetensors")]
    steps = [step for step in sorted(map(int, names)) if first < step <= last]
    if not steps or steps[-1] - first != len(steps):
        rule = f"lacks recorded batches after step {first}"
        remedy = "take --from a later checkpoint, or record a run with --set log.record=true"
        raise RecipeError("PATH", str(run_dir), rule, remedy)
    return [read(path_of(run_dir, step)) for step in steps]


def replay(plan: Plan) -> Iterator[Replayed]:
    """Trains the batches again, one after another."""
    with checkpoint.as_one_line(plan.folder, "cannot be computed again"):
        num_cells = max(len(saved.lengths) for saved in plan.batches)
        ring = TrajectoryRing(num_cells, max(max(saved.lengths) for saved in plan.batches))
        trainer = _trainer(plan, ring)
        for saved in plan.batches:
            values = trainer.train(put(saved, ring))
            bad = tuple(_bad_tokens(trainer, saved.batch))
            yield Replayed(saved, values, bad, tuple(trainer.bad_gradients))


def _trainer(plan: Plan, ring: TrajectoryRing) -> "Trainer":
    import torch

    from minirl.shm.board import Board
    from minirl.train.trainer import Trainer

    config, first = plan.config, plan.batches[0]
    is_gpu = config.devices.kind != "cpu" and torch.cuda.is_available()
    place = Placement("cuda" if is_gpu else "cpu", cores=tuple(range(first.threads)))
    use_training_device(place)
    torch.manual_seed(config.seed)
    setup = TrainerSetup(
        config=config,
        folder=str(plan.folder),
        tokenizer_folder=str(plan.source),
        placement=place,
        ring=ring,
        store=WeightStore(model.weight_table(plan.folder), config.model.dtype),
        is_resumed=plan.is_resumed,
        version=first.batch.version,
    )
    return Trainer(setup, Board(1).writer(0))


def _bad_tokens(trainer: "Trainer", batch: Batch) -> Iterator[str]:
    prepared = trainer.prepared
    assert prepared is not None
    places = [(group.id, i) for group in batch.groups for i in range(len(group.trajectories))]
    for (group, place), item in zip(places, prepared.items, strict=True):
        columns = {
            "vLLM's logprob": item.view.logprobs,
            "the advantage": prepared.advantages[item.place],
            "the trainer's logprob": trainer.logprobs[item.place],
        }
        for what, column in columns.items():
            if len(tokens := np.flatnonzero(item.trainable & ~np.isfinite(column))):
                yield f"group {group}, trajectory {place}, token {tokens[0]}: {what} is not finite"
                break
