"""Synthetic batches, and trainer ranks to train them: in processes of their own, or in this one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plain_script
import torch
from plain_script import Weights
from processes import TRAINER_PLACE, Inbox, crew

from minirl import messages
from minirl.buffer import History
from minirl.config import ALGORITHMS, BufferConfig, Config, RolloutConfig, TrainConfig
from minirl.messages import CheckpointState, Save, TrainerSetup
from minirl.model import weight_table
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.board import Board
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.train.optimizer import shares
from minirl.train.trainer import Trainer
from minirl.workers import Worker

ETA = 2
FIRST_VERSION = 5  # so that there are versions to be stale by
LONGEST = 64
STATE = CheckpointState(step=1, history=History(), consumed_below=0)
CONFIG = Config(
    rollout=RolloutConfig(temperature=0.8),
    buffer=BufferConfig(max_staleness=ETA),
    train=TrainConfig(lr=1e-3, max_tokens=4096, clip_low=0.02, clip_high=0.03),
)


class Recipe(NamedTuple):
    """How the trajectories of a batch are made up."""

    num_groups: int = 4
    group_size: int = 3
    versions: tuple[int, ...] = (0,)  # of equal spans of an answer, relative to the batch's
    noise: float = 0.0  # of the logprobs that came with the tokens
    is_reward_equal: bool = False
    shortest: int = 4  # tokens of an answer


EQUAL = Recipe(is_reward_equal=True, noise=0.3)
STALE = Recipe(versions=(-ETA - 2, -ETA - 1), noise=0.3)
FRESH = Recipe()
MIXED = Recipe(versions=(-ETA - 1, -ETA, -1, 0), noise=0.8)
# Two of its answers do not fit LONGEST tokens: with two ranks and two minibatches one rank has two
# micro-batches of one trajectory, and the other has an empty one.
FEW = Recipe(num_groups=2, versions=(-1, 0), noise=0.3, shortest=40)
RECIPES = (EQUAL, STALE, FRESH, MIXED, FEW)
LORA = {"lora_rank": 4, "gradient_checkpointing": True}


def with_train(**values: Any) -> Config:
    return replace(CONFIG, train=replace(CONFIG.train, **values))


def of_algorithm(name: str, **values: Any) -> Config:
    parts = {key.removeprefix("train."): value for key, value in ALGORITHMS[name].items()}
    return with_train(algorithm=name, **{**parts, "num_minibatches": 2, **values})


class Data(NamedTuple):
    ring: TrajectoryRing
    batches: tuple[Batch, ...]

    def of(self, recipe: Recipe, step: int = 1) -> Batch:
        return self.batches[RECIPES.index(recipe)]._replace(step=step)


def make_data(tied_folder: Path) -> Data:
    """One ring and the batches of five steps, in the order of RECIPES."""
    ring = TrajectoryRing(sum(r.num_groups * r.group_size for r in RECIPES), LONGEST)
    writer, batches = GroupWriter(plain_script.load(tied_folder), ring), []
    for i, recipe in enumerate(RECIPES):
        version = FIRST_VERSION + i
        groups = [writer.write(recipe, 100 * i + j, version) for j in range(recipe.num_groups)]
        batches.append(Batch(i + 1, version, tuple(groups)))
    return Data(ring, tuple(batches))


class GroupWriter:
    """Writes groups into a ring, each trajectory into the next cell."""

    def __init__(self, model: Any, ring: TrajectoryRing, config: Config = CONFIG):
        self.model, self.ring, self.temperature = model, ring, config.rollout.temperature
        self.free, self.rng = count(), random.Random(0)

    def write(self, recipe: Recipe, group_id: int, version: int) -> Group:
        rng, trajectories = self.rng, []
        prompt = [rng.randrange(2, 384) for _ in range(rng.randrange(3, 9))]
        for cell in islice(self.free, recipe.group_size):
            num_written = rng.randrange(recipe.shortest, LONGEST - 8)
            answer = [rng.randrange(2, 384) for _ in range(num_written)]
            with torch.no_grad():
                exact_T = plain_script.logprobs(self.model, prompt + answer, self.temperature)
            exact = exact_T[len(prompt) :].tolist()
            logprobs = [value + rng.gauss(0, recipe.noise) for value in exact]
            spans = np.array_split(answer, len(recipe.versions))
            ages = zip(spans, recipe.versions, strict=True)
            versions = [version + age for span, age in ages for _ in span]
            self.ring.write(cell, group_id, prompt, answer, logprobs, versions)
            sizes, ends = (len(prompt) + num_written, num_written), (versions[0], versions[-1])
            trajectories.append(Trajectory(cell, *sizes, StopReason.LENGTH, *ends))
        places = range(recipe.group_size)
        rewards = [1.0 if recipe.is_reward_equal else i % 2 + i / 8 for i in places]
        return Group(group_id, group_id, tuple(trajectories), tuple(rewards))


def with_reward(batch: Batch, group: int, reward: float) -> Batch:
    """The first trajectory of a group has another reward."""
    groups = list(batch.groups)
    groups[group] = groups[group]._replace(rewards=(reward, *groups[group].rewards[1:]))
    return batch._replace(groups=tuple(groups))


# Ranks ----------------------------------------------------------------------------------------


def setup_of(source: Path, config: Config, ring: TrajectoryRing, **values: Any) -> TrainerSetup:
    """Of the only rank, unless `values` say otherwise."""
    store = WeightStore(weight_table(source), config.model.dtype)
    given = {"tokenizer_folder": str(source), "placement": TRAINER_PLACE, "version": FIRST_VERSION}
    given |= {"folder": str(source), **values}
    return TrainerSetup(config=config, ring=ring, store=store, **given)


def read_store(store: WeightStore) -> Weights:
    """What was published last."""
    found: Weights = {}
    store.read(lambda slot: found.update((name, w.clone()) for name, w in store.views(slot)))
    return found


def resumed(checkpoint: Path, version: int = FIRST_VERSION) -> dict[str, Any]:
    """What the setup of a rank says that resumes."""
    return {"folder": str(checkpoint), "is_resumed": True, "version": version}


class LocalRank:
    """The only rank, in this process: what most options need, without the wait for a start."""

    def __init__(self, source: Path, config: Config, ring: TrajectoryRing, **values: Any):
        torch.manual_seed(config.seed)
        setup = setup_of(source, config, ring, **values)
        self.store, self.board = setup.store, Board(1)
        self.trainer = Trainer(setup, self.board.writer(0))
        self.trainer.publish(setup.version)

    def train(self, batch: Batch) -> dict[str, float | None]:
        trained = self.trainer.train(batch)
        self.trainer.publish(self.store.latest + 1)
        return trained.values

    def save(self, folder: Path, state: CheckpointState = STATE) -> Path:
        assert not self.trainer.save(Save(str(folder), state)).error
        return folder

    def weights(self) -> Weights:
        return read_store(self.store)

    def momentum(self) -> Weights:
        """Adam's running mean of the gradient, by parameter."""
        named, state = self.trainer.policy.model.named_parameters(), self.trainer.learner.optimizer
        return {name: state.state[p]["exp_avg"].clone() for name, p in named if p.requires_grad}


class Ranks:
    """Trainer ranks in processes of their own."""

    def __init__(self, inbox: Inbox, workers: list[Worker], store: WeightStore):
        self.inbox, self.workers, self.store = inbox, workers, store

    def send(self, message: object) -> None:
        for worker in self.workers:
            worker.send(message)

    def train(self, batch: Batch) -> dict[str, float | None]:
        self.send(messages.Train(batch))
        trained = self.inbox.take(self.workers[0], messages.Trained)
        assert trained.version == self.store.latest
        return trained.values

    def save(self, folder: Path) -> None:
        self.send(Save(str(folder), STATE))
        assert self.inbox.take(self.workers[0], messages.Saved).folder == str(folder)

    def stop(self) -> None:
        self.send(messages.Stop())
        for worker in self.workers:
            assert self.inbox.take(worker, messages.Died).how == "ended with exit code 0"

    def weights(self) -> Weights:
        return read_store(self.store)


@contextmanager
def ranks(
    tmp_path: Path, source: Path, config: Config, ring: TrajectoryRing, num: int = 1, **values: Any
) -> Iterator[Ranks]:
    rest = {"num_ranks": num, "rendezvous": str(tmp_path / "rendezvous"), **values}
    first = setup_of(source, config, ring, **rest)
    with crew(tmp_path / "logs", num) as inbox:
        spawn, body = inbox.workers.spawn, "minirl.train.trainer:run"
        setups = [replace(first, rank=rank) for rank in range(num)]
        workers = [spawn(messages.Role.TRAIN, s.rank, body, s, s.placement) for s in setups]
        for worker in workers:
            inbox.take(worker, messages.Started)
        yield Ranks(inbox, workers, first.store)


@torch.no_grad()
def relative_error(ours: Weights, theirs: Weights, before: Weights | None = None) -> float:
    """|ours - theirs| / |theirs - before|, over all weights."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n] - theirs[n]).square().sum()) for n in theirs)
    moved = sum(float((theirs[n] - (before[n] if before else 0)).square().sum()) for n in theirs)
    return (difference / moved) ** 0.5


def are_equal(ours: Weights, theirs: Weights) -> bool:
    same = (torch.equal(ours[name], theirs[name]) for name in ours)
    return ours.keys() == theirs.keys() and all(same)


def saved(checkpoint: Path, name: str) -> Weights:
    """From one file, or from all shares."""
    return {key: read() for key, read in shares(checkpoint, name).items()}


def momentum(checkpoint: Path) -> Weights:
    end, state = "/exp_avg", saved(checkpoint, "trainer/optimizer")
    return {key.removesuffix(end): state[key] for key in state if key.endswith(end)}


def masters(checkpoint: Path) -> Weights:
    """The weights that training continues from, in float32."""
    weights = saved(checkpoint, "trainer/master") or saved(checkpoint, "model")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    return weights
