"""A batch on disk with all that is needed to compute it again, and the computing.

    record/step-000012.safetensors   each trained batch, with log.record = true
    bad_batches/step-000012/         a batch that went bad: batch.safetensors in the same form,
                                     recipe.toml, and weights/: what the step started from

One file holds tokens, mask, logprobs and versions of all trajectories, end to end; in its header,
as JSON, step, version, groups with their rewards, the step's metrics, and why it was saved.

`BatchSaver` takes a batch's descriptors while its ring cells are still its own. A full disk costs a
file and a note, never the run. `replay` gives a saved batch to the trainer's own code, without any
engine: one process, one rank. From a checkpoint of the run it has the optimizer's state too, and
its numbers equal a one-rank run's to the bit. A bad batch has only the published weights: its
critic is new, LoRA is merged, and a second minibatch follows Adam's first step.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minirl import model
from minirl.config import TINY, Config
from minirl.devices import Placement, use_training_device
from minirl.errors import MALFORMED, MinirlError, RecipeError, one_line
from minirl.recipe import load, to_toml
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.ring import TrajectoryRing, TrajectoryView
from minirl.shm.weights import WeightStore
from minirl.train.messages import TrainerSetup

if TYPE_CHECKING:  # the controller saves batches without loading a model's code
    from minirl.train.trainer import Trainer

RECORD, BAD, FILE = "record", "bad_batches", "batch.safetensors"
COLUMNS = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
MAX_SAVED = 2  # bad batches of a run that goes on: each holds a whole model
WITH_WEIGHTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json")
COMPARED = ("train/loss", "train/grad_norm")
NUM_WORST = 3
CLOSE = 1e-3  # relative, of a loss: other ranks and threads sum in another order


@dataclass(frozen=True)
class SavedBatch:
    """A batch apart from any ring. Cells are counted anew, in the order of its trajectories."""

    batch: Batch
    columns: dict[str, NDArray]
    values: dict[str, float | None] = field(default_factory=dict)  # the step's metrics
    threads: int = 1  # of a trainer rank: the last bit of a sum may depend on them
    why: str = ""
    canary: tuple[float, ...] = ()  # published with the weights

    @property
    def lengths(self) -> list[int]:
        return [t.length for group in self.batch.groups for t in group.trajectories]


# Saving ----------------------------------------------------------------------------------------


def take(batch: Batch, ring: TrajectoryRing, **about: Any) -> SavedBatch:
    """A copy of all that the batch's cells hold."""
    views = [ring.read(t.cell, g.id) for g in batch.groups for t in g.trajectories]
    columns = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(view, name) for view in views)])
        for name, dtype in COLUMNS.items()
    }
    return SavedBatch(batch, columns, **about)


def write(path: Path, saved: SavedBatch) -> None:
    """Aside, then renamed."""
    from safetensors.numpy import save_file

    header = {
        "step": saved.batch.step,
        "version": saved.batch.version,
        "groups": [group.as_json() for group in saved.batch.groups],
        "values": saved.values,
        "threads": saved.threads,
        "why": saved.why,
        "canary": saved.canary,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    try:
        save_file(saved.columns, aside, {"batch": json.dumps(header)})
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


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
        """With log.record. Gives what a person should be told: the first step that is missing."""
        if not self.config.log.record:
            return ""
        try:
            taken = take(batch, self.ring, values=values, threads=self.threads)
            write(path_of(self.run_dir, batch.step), taken)
        except Exception as error:  # safetensors has its own kind for a full disk
            self.num_missing += 1
            told = f"step {batch.step} was not recorded: {one_line(str(error))}"
            return told if self.num_missing == 1 else ""
        return ""

    def forget_after(self, step: int) -> None:
        """Recorded steps that will be trained again."""
        for path in (self.run_dir / RECORD).glob("step-*.safetensors"):
            if path.name > path_of(self.run_dir, step).name:
                path.unlink()

    def save_bad(self, batch: Batch, version: int, why: str, must_save: bool = True) -> str:
        """With the weights of `version`. Gives the end of a sentence that says where it is."""
        if self.num_saved >= MAX_SAVED and not must_save:
            return ""
        self.num_saved += 1
        folder = self.run_dir / BAD / f"step-{batch.step:06d}"
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            canary = self._write_weights(aside / "weights", version)
            taken = take(batch, self.ring, threads=self.threads, why=why, canary=canary)
            write(aside / FILE, taken)
            (aside / "recipe.toml").write_text(to_toml(self.config))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(aside, folder)
        except Exception as error:  # safetensors has its own kind for a full disk
            shutil.rmtree(aside, ignore_errors=True)
            return f"; its batch could not be saved: {one_line(str(error))}"
        return f"; look at its batch with: minirl replay {folder}"

    def _write_weights(self, folder: Path, version: int) -> tuple[float, ...]:
        """Gives the canary; nothing where the store no longer has that version."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        found = self.store.snapshot(version)
        if found is None:
            return ()
        save_file(found[0], folder / "model.safetensors", {"format": "pt"})
        for pattern in WITH_WEIGHTS:
            for path in self.source.glob(pattern):
                shutil.copy2(path, folder / path.name)
        return tuple(found[1].tolist())


# Reading ---------------------------------------------------------------------------------------


@contextmanager
def _as_one_line(path: Path) -> Iterator[None]:
    """Whatever a file that is not what it should be makes its reader, or a model, raise."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError, *MALFORMED) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise MinirlError(f"{path} cannot be computed again ({one_line(reason)})") from None


def read(path: Path) -> SavedBatch:
    from safetensors import safe_open

    with _as_one_line(path):
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {})["batch"])
            columns = {name: file.get_tensor(name) for name in COLUMNS}
        cells = count()
        groups = tuple(_group(group, cells) for group in header["groups"])
        batch = Batch(int(header["step"]), int(header["version"]), groups)
        about = [header[name] for name in ("values", "threads", "why", "canary")]
        saved = SavedBatch(batch, columns, *about)
        total = sum(saved.lengths)
        for name, dtype in COLUMNS.items():
            if columns[name].dtype != dtype or columns[name].shape != (total,):
                raise ValueError(f"{name} is not {total} times {np.dtype(dtype).name}")
    return saved


def _group(entry: dict[str, Any], cells: Iterator[int]) -> Group:
    trajectories = []
    for found in entry["trajectories"]:
        numbers: dict[str, Any] = {name: int(value) for name, value in found.items()}
        numbers |= {"stop": StopReason(numbers["stop"]), "cell": next(cells)}
        trajectories.append(Trajectory(**numbers))
        if trajectories[-1].length < 1:
            raise ValueError("a trajectory is empty")
    rewards = tuple(float(reward) for reward in entry["rewards"])
    if not trajectories or len(rewards) != len(trajectories):
        raise ValueError("a group has not one reward per trajectory")
    ids = int(entry["id"]), int(entry["prompt_index"])
    return Group(*ids, tuple(trajectories), rewards, frozenset(entry["masked"]))


def put(saved: SavedBatch, ring: TrajectoryRing) -> Batch:
    """Into the first cells of a ring, whatever these held."""
    start = 0
    for group in saved.batch.groups:
        for trajectory in group.trajectories:
            at = slice(start, start + trajectory.length)
            view = TrajectoryView(**{name: saved.columns[name][at] for name in COLUMNS})
            ring.restore(trajectory.cell, group.id, view)
            start = at.stop
    return saved.batch


# Computing again -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenAt:
    """A token that is worth a look: its group, its trajectory's place there, its own place."""

    group: int
    place: int
    token: int
    what: str


@dataclass(frozen=True)
class Replayed:
    saved: SavedBatch
    values: dict[str, float | None]  # the step's metrics, computed here
    bad_tokens: tuple[TokenAt, ...] = ()  # the first that is not finite, of each trajectory
    bad_gradients: tuple[str, ...] = ()  # names of parameters
    worst: tuple[TokenAt, ...] = ()  # the largest logprob gaps
    canary_gap: float | None = None  # published against these weights
    is_detailed: bool = False  # each token was looked at; else it is compared with its record

    @property
    def difference(self) -> float:
        """Of loss and gradient norm from the recorded ones, relative; 0: equal to the bit."""
        found = 0.0
        for name in COMPARED:
            ours, theirs = self.values.get(name), self.saved.values.get(name)
            ours = ours if ours is not None and math.isfinite(ours) else None
            if ours is None or theirs is None:
                found = found if ours is theirs else math.inf
            elif ours != theirs:
                found = max(found, abs(ours - theirs) / max(abs(ours), abs(theirs)))
        return found

    @property
    def is_good(self) -> bool:
        numbers = [self.values.get(name) for name in COMPARED]
        if not all(number is None or math.isfinite(number) for number in numbers):
            return False
        is_clean = not self.bad_tokens and not self.bad_gradients
        return is_clean if self.is_detailed else self.difference < CLOSE

    @property
    def lines(self) -> list[str]:
        """As `minirl replay` prints it."""
        if not self.is_detailed:
            losses = f"{self.saved.values.get('train/loss')}, here {self.values.get('train/loss')}"
            gap = self.difference
            answer = "equal" if not gap else f"close ({gap:.0e})" if gap < CLOSE else "DIFFERENT"
            return [f"step {self.saved.batch.step:>6}  loss recorded {losses}  {answer}"]
        shown = (*COMPARED, "train/logprob_gap", "train/entropy")
        numbers = {n: self.values.get(n) for n in shown} | {"canary gap": self.canary_gap}
        places = [
            f"group {t.group}, trajectory {t.place}, token {t.token}: {t.what}"
            for t in (*self.bad_tokens, *self.worst)
        ]
        return [
            *([self.saved.why] if self.saved.why else []),
            *(f"{name:<18}{value:.6g}" for name, value in numbers.items() if value is not None),
            *places,
            *(f"gradients that are not finite: {name}" for name in self.bad_gradients[:5]),
        ]


@dataclass(frozen=True)
class Plan:
    """What to train again: `batches` in order, from the weights of `folder`."""

    config: Config
    folder: Path
    source: Path  # the model that the run began with
    batches: list[SavedBatch]
    is_resumed: bool = False  # `folder` is a checkpoint
    is_detailed: bool = True  # look at each token of the last batch


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
    checkpoints = {int(p.name[5:]): p for p in sorted((run_dir / "checkpoints").glob("step-*"))}
    last = None if is_run else read(path).batch.step
    if last is not None:
        first = max((step for step in checkpoints if step < last), default=0)
    if first and first not in checkpoints:
        remedy = f"there are {', '.join(map(str, checkpoints)) or 'none'}, and 0 is the beginning"
        raise RecipeError("--from", first, "the run kept no checkpoint of this step", remedy)
    source = _source(config)
    folder, batches = checkpoints.get(first, source), _recorded(run_dir, first, last)
    return Plan(config, folder, source, batches, is_resumed=first > 0, is_detailed=not is_run)


def _plan_of_bad(path: Path) -> Plan:
    config, weights = load(path / "recipe.toml").config, path / "weights"
    if not (weights / "model.safetensors").is_file():
        raise MinirlError(f"{path} has no weights: their version was gone when it was saved")
    source = _source(config) if config.train.kl_coef else weights
    merged = replace(config, train=replace(config.train, lora_rank=0))
    return Plan(merged, weights, source, [read(path / FILE)])


def _source(config: Config) -> Path:
    from minirl.train.tiny import tiny_model_folder

    if config.model.path != TINY:
        return model.local_folder(config)
    folder = tiny_model_folder(config.seed)
    if not folder.is_dir():
        remedy = "any `minirl train` with this seed builds it"
        raise RecipeError("model.path", TINY, "the tiny model is not on this machine", remedy)
    return folder


def _recorded(run_dir: Path, first: int, last: int | None) -> list[SavedBatch]:
    """All steps after the first, without a gap. Each is small; together they fit in memory."""
    names = [path.stem[5:] for path in (run_dir / RECORD).glob("step-*.safetensors")]
    steps = [step for step in sorted(map(int, names)) if first < step <= (last or math.inf)]
    if not steps:
        remedy = "record a run with --set log.record=true"
        raise RecipeError("PATH", str(run_dir), f"has no recorded batch after step {first}", remedy)
    missing = sorted(set(range(first + 1, steps[-1] + 1)) - set(steps))
    if missing:
        raise MinirlError(f"step {missing[0]} of {run_dir} was not recorded")
    return [read(path_of(run_dir, step)) for step in steps]


def replay(plan: Plan) -> Iterator[Replayed]:
    """Trains the batches again, one after another."""
    with _as_one_line(plan.folder):
        most = max(len(saved.lengths) for saved in plan.batches)
        longest = max(max(saved.lengths, default=1) for saved in plan.batches)
        ring = TrajectoryRing(max(1, most), longest)
        trainer = _trainer(plan, ring)
        for saved in plan.batches:
            batch = put(saved, ring)
            if plan.is_detailed and saved is plan.batches[-1]:
                yield _look(trainer, saved, batch)
            else:
                yield Replayed(saved, trainer.train(batch))


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
        rank=0,
        num_ranks=1,
        rendezvous="",
        placement=place,
        ring=ring,
        store=WeightStore(model.weight_table(plan.folder), config.model.dtype),
        is_resumed=plan.is_resumed,
        version=first.batch.version,
    )
    return Trainer(setup, Board(1).writer(0))


def _look(trainer: "Trainer", saved: SavedBatch, batch: Batch) -> Replayed:
    """Trains a batch, and says which tokens and gradients are not finite."""
    canary_gap = None
    if saved.canary:
        canary_gap = float(np.abs(trainer.canary() - np.array(saved.canary))[1:].mean())
    if not batch.groups:
        return Replayed(saved, {}, canary_gap=canary_gap, is_detailed=True)
    prepared = trainer.preparer.prepare(batch)
    values = trainer.train(batch)
    places = [(group.id, i) for group in batch.groups for i in range(len(group.trajectories))]
    bad, gaps = [], []
    for at, item in zip(places, prepared.items, strict=True):
        theirs, ours = item.view.logprobs, trainer.logprobs[item.place]
        columns = {
            "vLLM's logprob": theirs,
            "the advantage": prepared.advantages[item.place],
            "the trainer's logprob": ours,
        }
        for what, column in columns.items():
            if len(tokens := np.flatnonzero(item.trainable & ~np.isfinite(column))):
                bad.append(TokenAt(*at, int(tokens[0]), f"{what} is not finite"))
                break
        gap = np.where(item.trainable & item.at_equal_version, np.abs(ours - theirs), 0.0)
        token = int(np.nan_to_num(gap, nan=np.inf).argmax())
        said = f"vLLM {theirs[token]:.4f}, here {ours[token]:.4f}"
        gaps.append((float(gap[token]), TokenAt(*at, token, said)))
    worst = [token for gap, token in sorted(gaps, key=lambda pair: -pair[0])[:NUM_WORST] if gap]
    names = tuple(trainer.bad_gradients)
    return Replayed(saved, values, tuple(bad), names, tuple(worst), canary_gap, True)
