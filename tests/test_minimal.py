"""recipes/minimal.py is minirl at η = 0: its step is the trainer's to rounding, and it learns."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import plain_script
import pytest
from ranks import FIRST_VERSION, LONGEST, GroupWriter, LocalRank, Recipe, relative_error

from minirl.recipe import load
from minirl.records import Batch, Group
from minirl.shm.ring import TrajectoryRing
from minirl.train.optimizer import build_optimizer
from minirl.train.policy import load_policy

RECIPE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
FILE = RECIPE.with_name("minimal.py")
NUM_GROUPS = 4


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["minimal"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_written(minimal: ModuleType, group: Group, ring: TrajectoryRing) -> list:
    """A group as minimal.py has it."""
    written = []
    for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
        view = ring.read(trajectory.cell, group.id)
        num_prompt = int((view.mask == 0).sum())
        written.append(minimal.Written(view.tokens.tolist(), num_prompt, reward))
    return written


def test_its_step_is_the_trainers(minimal: ModuleType, tied_folder: Path) -> None:
    assert len(FILE.read_text().splitlines()) <= 200, "it can be read in one sitting"
    config = load(RECIPE, ["buffer.max_staleness=0", f"train.batch_size={NUM_GROUPS}"]).config
    size = config.rollout.group_size
    policy = load_policy(str(tied_folder), config.model.dtype)
    optimizer = build_optimizer(policy.parameters(), config.train.lr, config.train)
    ring = TrajectoryRing(3 * NUM_GROUPS * size, LONGEST)
    rank, engine = LocalRank(tied_folder, config, ring), plain_script.load(tied_folder)
    writer = GroupWriter(engine, ring, config.rollout.temperature)
    recipes = [Recipe(group_size=size)] * (NUM_GROUPS - 1)
    recipes += [Recipe(group_size=size, is_reward_equal=True)]
    for step in (1, 2, 3):
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        engine.load_state_dict(policy.model.state_dict())
        version = FIRST_VERSION + step - 1
        groups = [writer.write(r, 100 * step + i, version) for i, r in enumerate(recipes)]
        batch = Batch(step, version, tuple(groups))
        values = rank.train(batch)
        written = [as_written(minimal, group, ring) for group in groups]
        loss = minimal.update(policy, optimizer, written, config, step - 1)
        assert loss == pytest.approx(values["train/loss"], rel=1e-4, abs=1e-6)
        assert values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
        own = dict(policy.model.named_parameters())
        after = {name: p.detach() for name, p in own.items()}
        momentum = {name: optimizer.state[p]["exp_avg"] for name, p in own.items()}
        assert relative_error(rank.momentum(), momentum) < 1e-4
        # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
        assert relative_error(rank.weights(), after, before) < 1e-3


@pytest.mark.slow
def test_it_learns(minimal: ModuleType) -> None:
    learned = minimal.run(12, 0)
    assert learned.after > learned.before + 0.2
