"""Trainer ranks as real processes: the update is a plain script's, however it is split; what is too
stale trains nothing; a checkpoint is an ordinary folder, and going on from it changes no bit.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import plain_script
import pytest
import torch
from crew import CUDA_TRAINER_PLACE, TRAINER_PLACE, Inbox, crew
from plain_script import PlainScript, Weights
from safetensors.torch import load_file

from minirl.config import BufferConfig, Config, ModelConfig, RolloutConfig, TrainConfig
from minirl.devices import Placement
from minirl.fleet import Died, Role, Worker
from minirl.model import weight_table
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.rollout.worker import Stop
from minirl.shm.ring import TrajectoryRing
from minirl.shm.weights import WeightStore
from minirl.train.checkpoint import read_state
from minirl.train.messages import Ready, Save, Saved, Train, Trained, TrainerSetup

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

ETA = 2
FIRST_VERSION = 5  # so that there are versions to be stale by
LONGEST = 64
CONFIG = Config(
    rollout=RolloutConfig(temperature=0.8),
    buffer=BufferConfig(max_staleness=ETA),
    train=TrainConfig(lr=1e-3, max_tokens=4096, clip_low=0.02, clip_high=0.03),
)


# Synthetic batches ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How the trajectories of a batch are made up."""

    num_groups: int = 4
    group_size: int = 3
    versions: tuple[int, ...] = (0,)  # of equal spans of an answer, relative to the batch's
    noise: float = 0.0  # of the logprobs that came with the tokens
    is_reward_equal: bool = False


EQUAL = Recipe(is_reward_equal=True, noise=0.3)
STALE = Recipe(versions=(-ETA - 2, -ETA - 1), noise=0.3)
FRESH = Recipe()
MIXED = Recipe(versions=(-ETA - 1, -ETA, -1, 0), noise=0.8)
FEW = Recipe(num_groups=2, group_size=2, versions=(-1, 0), noise=0.3)
RECIPES = (EQUAL, STALE, FRESH, MIXED, FEW)


@dataclass(frozen=True)
class Data:
    ring: TrajectoryRing
    batches: tuple[Batch, ...]


@pytest.fixture(scope="module")
def data(tied_folder: Path) -> Data:
    """One ring and the batches of five steps, in the order of RECIPES."""
    model, rng = plain_script.load(tied_folder), random.Random(0)
    num_cells = sum(recipe.num_groups * recipe.group_size for recipe in RECIPES)
    ring = TrajectoryRing(num_cells, LONGEST)
    free = iter(range(num_cells))
    batches = []
    for i, recipe in enumerate(RECIPES):
        version = FIRST_VERSION + i
        groups = [
            make_group(recipe, 100 * i + j, version, ring, free, model, rng)
            for j in range(recipe.num_groups)
        ]
        batches.append(Batch(i + 1, version, tuple(groups)))
    return Data(ring, tuple(batches))


def make_group(
    recipe: Recipe,
    group_id: int,
    version: int,
    ring: TrajectoryRing,
    free: Iterator[int],
    model: torch.nn.Module,
    rng: random.Random,
) -> Group:
    prompt = [rng.randrange(2, 384) for _ in range(rng.randrange(3, 9))]
    trajectories = []
    for _ in range(recipe.group_size):
        answer = [rng.randrange(2, 384) for _ in range(rng.randrange(4, LONGEST - 8))]
        tokens = prompt + answer
        with torch.no_grad():
            exact_T = plain_script.logprobs(model, tokens, CONFIG.rollout.temperature)
        logprobs = [value + rng.gauss(0, recipe.noise) for value in exact_T[len(prompt) :].tolist()]
        spans = np.array_split(np.arange(len(answer)), len(recipe.versions))
        ages = zip(spans, recipe.versions, strict=True)
        versions = [version + age for span, age in ages for _ in span]
        cell = next(free)
        ring.write(cell, group_id, prompt, answer, logprobs, versions)
        trajectories.append(
            Trajectory(cell, len(tokens), len(answer), StopReason.LENGTH, versions[0], versions[-1])
        )
    rewards = [1.0] * recipe.group_size
    if not recipe.is_reward_equal:
        rewards = [float(i % 2) + i / 8 for i in range(recipe.group_size)]
    return Group(group_id, group_id, tuple(trajectories), tuple(rewards))


# Ranks ----------------------------------------------------------------------------------------


class Ranks:
    """Trainer ranks in processes of their own."""

    def __init__(self, inbox: Inbox, workers: list[Worker], store: WeightStore):
        self.inbox, self.workers, self.store = inbox, workers, store

    def train(self, batch: Batch) -> Trained:
        for worker in self.workers:
            worker.send(Train(batch))
        return self.inbox.take(self.workers[0], Trained)

    def save(self, folder: Path, state: dict[str, int]) -> None:
        for worker in self.workers:
            worker.send(Save(str(folder), state))
        assert self.inbox.take(self.workers[0], Saved).folder == str(folder)

    def weights(self) -> Weights:
        """What was published last."""
        found: Weights = {}

        def copy(slot: int) -> None:
            found.update((name, view.clone()) for name, view in self.store.views(slot))

        self.store.read(copy)
        return found


@contextmanager
def ranks(
    tmp_path: Path,
    folder: Path,
    config: Config,
    ring: TrajectoryRing,
    num_ranks: int = 1,
    resumed_at: int | None = None,
    place: Placement = TRAINER_PLACE,
) -> Iterator[Ranks]:
    store = WeightStore(weight_table(folder), config.model.dtype)
    with crew(tmp_path / "logs", num_ranks) as inbox:
        workers = []
        for rank in range(num_ranks):
            setup = TrainerSetup(
                config=config,
                folder=str(folder),
                tokenizer_folder=str(folder),
                rank=rank,
                num_ranks=num_ranks,
                rendezvous=str(tmp_path / "rendezvous"),
                placement=place,
                ring=ring,
                store=store,
                is_resumed=resumed_at is not None,
                version=FIRST_VERSION if resumed_at is None else resumed_at,
            )
            body = "minirl.train.trainer:run"
            workers.append(inbox.fleet.spawn(Role.TRAIN, rank, body, setup, place))
        for worker in workers:
            inbox.take(worker, Ready)
        yield Ranks(inbox, workers, store)


def relative_error(ours: Weights, theirs: Weights, before: Weights | None = None) -> float:
    """|ours - theirs| / |theirs - before|, over all weights."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n] - theirs[n]).square().sum()) for n in theirs)
    moved = sum(float((theirs[n] - (before[n] if before else 0)).square().sum()) for n in theirs)
    return (difference / moved) ** 0.5


def are_equal(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


# Tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens", "num_minibatches"),
    [(1, 4096, 1), (1, LONGEST, 2), (2, LONGEST, 1), (3, 100, 2)],
)
def test_the_update_is_a_plain_scripts_however_it_is_split(
    num_ranks: int,
    max_tokens: int,
    num_minibatches: int,
    data: Data,
    tied_folder: Path,
    tmp_path: Path,
) -> None:
    train = replace(CONFIG.train, max_tokens=max_tokens, num_minibatches=num_minibatches)
    config = replace(CONFIG, train=train)
    plain = PlainScript(tied_folder, config)
    initial = plain.weights()
    with ranks(tmp_path, tied_folder, config, data.ring, num_ranks) as trainer:
        assert trainer.store.latest == FIRST_VERSION
        assert are_equal(trainer.weights(), initial)
        for recipe, batch in zip(RECIPES, data.batches, strict=True):
            before = plain.weights()
            trained = trainer.train(batch)
            assert trained.version == trainer.store.latest == batch.version + 1
            expected = plain.train(batch, data.ring)
            for name, value in expected.items():
                assert trained.values[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            check_staleness(recipe, batch, trained, data.ring)
            if recipe in (EQUAL, STALE):  # nothing to learn: nothing moves, not by a bit
                assert trained.values["train/grad_norm"] == 0
                assert are_equal(trainer.weights(), initial)
                continue
            folder = tmp_path / "run" / "checkpoints" / f"step-{batch.step:06d}"
            trainer.save(folder, {})
            assert relative_error(momentum(folder), plain.momentum()) < 1e-4
            # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
            assert relative_error(trainer.weights(), plain.weights(), before) < 1e-3
            if recipe is FRESH:  # sampled by the very weights that the step starts from
                assert trained.values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
                assert trained.values["train/logprob_gap"] == pytest.approx(0, abs=1e-5)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005"]  # checkpoint.keep is 2


def momentum(checkpoint: Path) -> Weights:
    state = load_file(checkpoint / "trainer" / "optimizer.safetensors")
    field = "/exp_avg"
    return {key.removesuffix(field): state[key] for key in state if key.endswith(field)}


def check_staleness(recipe: Recipe, batch: Batch, trained: Trained, ring: TrajectoryRing) -> None:
    versions = np.concatenate(
        [
            ring.read(t.cell, g.id).versions[ring.read(t.cell, g.id).mask == 1]
            for g in batch.groups
            for t in g.trajectories
        ]
    )
    ages = batch.version - versions
    values = trained.values
    assert values["buffer/masked_frac"] == pytest.approx((ages > ETA).mean())
    assert values["buffer/staleness_max"] == max(ages[ages <= ETA], default=0)
    assert values["buffer/versions_per_trajectory"] == len(recipe.versions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_an_ordinary_folder_and_going_on_from_it_changes_no_bit(
    dtype: str, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    # In bfloat16 an update this small is lost on every weight: only masters can add them up.
    train = replace(CONFIG.train, lr=1e-3 if dtype == "float32" else 1e-6, num_minibatches=2)
    config = replace(CONFIG, model=ModelConfig(dtype=dtype), train=train)
    first, second = (replace(data.batches[i], step=i - 1) for i in (2, 3))
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    with ranks(tmp_path / "one", tied_folder, config, data.ring) as trainer:
        trainer.train(first)
        published = trainer.weights()
        trainer.save(folders[0], {"version": second.version})
        trainer.train(second)
        uninterrupted = trainer.weights()
        trainer.save(folders[1], {"version": second.version + 1})
        trainer.workers[0].send(Stop())
        assert trainer.inbox.take(trainer.workers[0], Died).how == "ended with exit code 0"
    # Nothing that was written aside is left.
    assert sorted((tmp_path / "one" / "checkpoints").iterdir()) == folders
    assert read_state(folders[0]) == {"version": second.version}
    check_ordinary(folders[0], published, tied_folder)

    again = tmp_path / "two" / "checkpoints" / "step-000002"
    with ranks(
        tmp_path / "two", folders[0], config, data.ring, resumed_at=second.version
    ) as trainer:
        assert trainer.store.latest == second.version
        assert are_equal(trainer.weights(), published)
        assert trainer.train(second).version == second.version + 1
        assert are_equal(trainer.weights(), uninterrupted)
        trainer.save(again, {})
    assert are_equal(masters(again), masters(folders[1]))
    assert are_equal(momentum(again), momentum(folders[1]))
    assert not are_equal(masters(folders[1]), masters(folders[0]))
    if dtype == "bfloat16":
        assert {w.dtype for w in uninterrupted.values()} == {torch.bfloat16}
        rounded = {name: w.bfloat16() for name, w in masters(folders[1]).items()}
        assert are_equal(rounded, uninterrupted)


def check_ordinary(checkpoint: Path, published: Weights, source: Path) -> None:
    """transformers loads it as it is, and finds the weights that were published."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    found = dict(model.named_parameters())
    assert are_equal({name: p.detach() for name, p in found.items()}, published)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "3 plus 4 is 7\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(source).encode(text)


def masters(checkpoint: Path) -> Weights:
    """The weights that training goes on from, in float32."""
    path = checkpoint / "trainer" / "master.safetensors"
    weights = load_file(path if path.is_file() else checkpoint / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    return weights


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_rank_on_cuda_learns_the_same_and_goes_on_from_its_checkpoint(
    dtype: str, bound: float, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, model=ModelConfig(dtype=dtype))
    first, second = (replace(data.batches[i], step=i - 1) for i in (2, 3))
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    plain = PlainScript(tied_folder, config)
    with ranks(tmp_path / "one", tied_folder, config, data.ring, place=CUDA_TRAINER_PLACE) as one:
        trained, expected = one.train(first), plain.train(first, data.ring)
        for name in ("train/grad_norm", "train/entropy"):
            assert trained.values[name] == pytest.approx(expected[name], rel=bound), name
        one.save(folders[0], {})
        assert relative_error(momentum(folders[0]), plain.momentum()) < bound
        one.train(second)
        one.save(folders[1], {})
    again = tmp_path / "two" / "checkpoints" / "step-000002"
    with ranks(
        tmp_path / "two",
        folders[0],
        config,
        data.ring,
        resumed_at=second.version,
        place=CUDA_TRAINER_PLACE,
    ) as two:
        two.train(second)
        two.save(again, {})
    assert relative_error(momentum(again), momentum(folders[1])) < 1e-3
    assert relative_error(masters(again), masters(folders[1]), masters(folders[0])) < 1e-2
