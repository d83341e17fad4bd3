"""recipes/minimal.py is minirl at η = 0: its step is the trainer's to rounding, and it learns."""

from pathlib import Path

import plain_script
import pytest
from ranks import FIRST_VERSION, LONGEST, GroupWriter, LocalRank, Recipe, relative_error

from minirl.recipe import load
from minirl.records import Batch, Group
from minirl.shm.ring import TrajectoryRing
from minirl.train.optimizer import build_optimizer
from minirl.train.policy import load_policy
from recipes import minimal

NUM_GROUPS = 4


def as_written(group: Group, ring: TrajectoryRing) -> list[minimal.Written]:
    """A group as minimal.py has it."""
    views = [ring.read(trajectory.cell, group.id) for trajectory in group.trajectories]
    pairs = zip(views, group.rewards, strict=True)
    return [minimal.Written(v.tokens.tolist(), int((v.mask == 0).sum()), r) for v, r in pairs]


def test_its_step_is_the_trainers(tied_folder: Path) -> None:
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 200, "read in one sitting"
    sets = ["buffer.max_staleness=0", f"train.batch_size={NUM_GROUPS}"]
    config = load(minimal.RECIPE, sets).config
    size = config.rollout.group_size
    policy = load_policy(str(tied_folder), config.model.dtype)
    optimizer = build_optimizer(policy, config.train.lr, config.train.weight_decay)
    ring = TrajectoryRing(3 * NUM_GROUPS * size, LONGEST)
    rank, engine = LocalRank(tied_folder, config, ring), plain_script.load(tied_folder)
    writer, own = GroupWriter(engine, ring, config), dict(policy.model.named_parameters())
    recipes = [Recipe(group_size=size, is_reward_equal=i == 0) for i in range(NUM_GROUPS)]
    for step in (1, 2, 3):
        before = {name: p.detach().clone() for name, p in own.items()}
        engine.load_state_dict(policy.model.state_dict())
        version = FIRST_VERSION + step - 1
        groups = [writer.write(r, 100 * step + i, version) for i, r in enumerate(recipes)]
        values = rank.train(Batch(step, version, tuple(groups)))
        written = [as_written(group, ring) for group in groups]
        loss = minimal.update(policy, optimizer, written, config, step - 1)
        assert loss == pytest.approx(values["train/loss"], rel=1e-4, abs=1e-6)
        assert values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
        momentum = {name: optimizer.state[p]["exp_avg"] for name, p in own.items()}
        assert relative_error(rank.momentum(), momentum) < 1e-4
        # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
        assert relative_error(rank.weights(), own, before) < 1e-3


@pytest.mark.slow
def test_it_learns() -> None:
    learned = minimal.run(12, 0)
    assert learned.after > learned.before + 0.2
