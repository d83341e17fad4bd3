"""Trains again what a run recorded, without any engine, and compares the losses.

Takes a run directory with record/ (log.record = true) and the step to begin after: 0, or one that
has a checkpoint. Gives for each step the recorded and the replayed loss. The very trainer ranks of
a run do it, so on a CPU, with as many ranks and threads, they are the same to the bit.

Leaves out: rollout, rewards, evaluation. A single batch is train/replay.py's.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minirl import devices, model, record
from minirl.config import TINY, Config
from minirl.devices import find_devices
from minirl.errors import MinirlError, RecipeError
from minirl.recipe import load, read_model_config
from minirl.record import Recorded
from minirl.rollout.worker import Stop
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.train.checkpoint import newest_first, read_whole
from minirl.train.messages import Ready, Train, Trained, TrainerSetup
from minirl.train.tiny import tiny_model_folder
from minirl.workers import Died, Fleet, Role, Worker

BODY = "minirl.train.trainer:run"
COMPARED = ("train/loss", "train/grad_norm")


@dataclass(frozen=True)
class Compared:
    step: int
    recorded: float | None  # None: not finite
    replayed: float | None
    is_equal: bool  # loss and gradient norm, to the bit


def is_run(path: Path) -> bool:
    return (path / record.FOLDER).is_dir() and not (path / "why.json").is_file()


class Replay:
    def __init__(self, run_dir: Path, first: int):
        self.config = load(run_dir / "recipe.toml").config
        self.source = _source(self.config)
        self.folder = _checkpoint(run_dir, first) if first else self.source
        self.is_resumed = first > 0
        self.records = _records(run_dir, first)
        kind, available = find_devices(self.config.devices.kind)
        self.places = devices.place(self.config, kind, available)[1]

    @property
    def notes(self) -> list[str]:
        now = devices.made_by(self.places)
        if self.records[0].made_by == now:
            return []
        was = ", ".join(f"{count} {what}" for what, count in self.records[0].made_by.items())
        here = ", ".join(f"{count} {what}" for what, count in now.items())
        return [f"recorded with {was}; here with {here}: the last bits may differ"]

    def run(self) -> Iterator[Compared]:
        ring = record.ring_for(self.records)
        with tempfile.TemporaryDirectory() as folder:
            fleet = Fleet(Path(folder), len(self.places))
            try:
                ranks = self.spawn(fleet, ring, Path(folder) / "rendezvous")
                for recorded in self.records:
                    batch = record.put(recorded, ring)
                    for rank in ranks:
                        rank.send(Train(batch))
                    found = _wait(fleet, Trained, 1)
                    assert isinstance(found, Trained)
                    yield compare(recorded, found)
                fleet.stop(Stop())
            finally:
                fleet.kill()

    def spawn(self, fleet: Fleet, ring: TrajectoryRing, rendezvous: Path) -> list[Worker]:
        store = WeightStore(model.weight_table(self.folder), self.config.model.dtype)
        ranks = []
        for rank, place in enumerate(self.places):
            setup = TrainerSetup(
                config=self.config,
                folder=str(self.folder),
                tokenizer_folder=str(self.source),
                rank=rank,
                num_ranks=len(self.places),
                rendezvous=str(rendezvous),
                placement=place,
                ring=ring,
                store=store,
                is_resumed=self.is_resumed,
                version=self.records[0].batch.version,
            )
            ranks.append(fleet.spawn(Role.TRAIN, rank, BODY, setup, place))
        _wait(fleet, Ready, len(ranks))
        return ranks


def compare(recorded: Recorded, trained: Trained) -> Compared:
    # Through the recorder's own eyes: what is not finite is None.
    pairs = {
        name: (recorded.values.get(name), record.finite(trained.values.get(name)))
        for name in COMPARED
    }
    is_equal = all(before == now for before, now in pairs.values())
    return Compared(recorded.batch.step, *pairs["train/loss"], is_equal)


def _wait(fleet: Fleet, kind: type, count: int) -> object:
    """For `count` messages of a kind; gives the last."""
    while True:
        for worker, message in fleet.hear(1.0):
            if isinstance(message, Died):
                raise MinirlError(f"{worker.name} {message.how}\n{fleet.last_words(worker)}")
            if isinstance(message, kind):
                count -= 1
                if not count:
                    return message


def _source(config: Config) -> Path:
    if config.model.path != TINY:
        folder = model.local_folder(config)
        read_model_config(config, folder)
        return folder
    folder = tiny_model_folder(config.seed)
    if not folder.is_dir():
        remedy = "any `minirl train` with this seed builds it"
        raise RecipeError("model.path", TINY, "the tiny model is not on this machine", remedy)
    return folder


def _checkpoint(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    if not folder.is_dir():
        there = ", ".join(path.name.removeprefix("step-") for path in newest_first(run_dir))
        remedy = f"there are {there}, and 0 is the beginning" if there else "0 is the beginning"
        raise RecipeError("--from", step, "the run kept no checkpoint of this step", remedy)
    read_whole(folder)
    return folder


def _records(run_dir: Path, first: int) -> list[Recorded]:
    """All steps after the first, without a gap. Each is small; together they fit in memory."""
    steps = [step for step in record.steps_of(run_dir) if step > first]
    if not steps:
        remedy = "record a run with --set log.record=true"
        raise RecipeError("PATH", str(run_dir), f"has no recorded batch after step {first}", remedy)
    for there, wanted in zip(steps, range(first + 1, steps[-1] + 1), strict=False):
        if there != wanted:
            raise MinirlError(f"step {wanted} of {run_dir} was not recorded")
    return [record.read(record.path_of(run_dir, step)) for step in steps]
