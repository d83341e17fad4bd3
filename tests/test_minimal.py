"""recipes/minimal.py is minirl at η = 0: its step is the trainer's to rounding, and it learns. And
the tiny model that comes with minirl is made as tests/warm_up.py makes it."""

import os
from pathlib import Path

import plain_script
import pytest
import torch
from ranks import FIRST_VERSION, LONGEST, GroupWriter, LocalRank, Recipe, relative_error

from minirl.config import TINY_FOLDER
from minirl.recipe import load
from minirl.records import Batch, Group
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.arithmetic import demonstration, draw_problem
from minirl.train.optimizer import build_optimizer
from minirl.train.policy import load_policy
from recipes import minimal
from tests import warm_up

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

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
    optimizer = build_optimizer(policy.parameters(), config.train.lr, config.train)
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


def test_warm_up_makes_the_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "STEPS", (2, 2, 2))
    warm_up.build_tiny_model(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(TINY_FOLDER))
    problem = draw_problem(0, "train", 0)
    text, shapes = problem.prompt + demonstration(problem) + "\n Ω  naïve — 3,000", []
    for here in (tmp_path, TINY_FOLDER):
        model = AutoModelForCausalLM.from_pretrained(here)
        tokenizer = AutoTokenizer.from_pretrained(here)
        assert (model.dtype, model.config.head_dim) == (torch.float32, 32)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == warm_up.EOS
        assert model.config.vocab_size == len(tokenizer)
        # The loaded tokenizer must cut as the one in training did, not as Qwen's own class would.
        assert tokenizer(text)["input_ids"] == warm_up.build_tokenizer().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]
