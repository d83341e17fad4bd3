"""recipes/minimal.py is minirl at η = 0: its step is the trainer's to rounding, and it learns the
same in the mean (slow: `python -m pytest -m slow tests/test_minimal.py`, up to 10 minutes).
"""

import importlib.util
import random
import sys
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from types import ModuleType

import pytest
import torch
from ranks import FIRST_VERSION, LocalRank, relative_error

from minirl.recipe import load
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.run_dir import read_lines
from minirl.shm.ring import TrajectoryRing
from minirl.tools.sweep import train
from minirl.train.attention import boundaries
from minirl.train.optimizer import build_optimizer
from minirl.train.policy import load_policy

RECIPE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
FILE = RECIPE.with_name("minimal.py")
NUM_GROUPS, LONGEST = 4, 48
T99 = {6: 3.707, 8: 3.355}  # two-sided, by degrees of freedom


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["minimal"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_can_be_read_in_one_sitting() -> None:
    assert len(FILE.read_text().splitlines()) <= 200


@torch.no_grad()
def behaviour(policy: torch.nn.Module, tokens: list[int], num_prompt: int) -> list[float]:
    """What vLLM would have said of the answer."""
    where = boundaries([len(tokens)])
    logprobs_T, _ = policy(
        torch.tensor(tokens), where.positions_T, where.cu_seqlens_S1, where.max_seqlen
    )
    return logprobs_T[num_prompt:].tolist()


def draw(minimal: ModuleType, size: int, rng: random.Random) -> list[list]:
    """Groups as minimal.py has them; in the last one all rewards are equal."""
    groups = []
    for number in range(NUM_GROUPS):
        prompt = [rng.randrange(2, 384) for _ in range(rng.randrange(3, 9))]
        group = []
        for place in range(size):
            answer = [rng.randrange(2, 384) for _ in range(rng.randrange(1, LONGEST - 8))]
            reward = 1.0 if number == NUM_GROUPS - 1 else float((place * 7 + number) % 3 == 0)
            group.append(minimal.Written([*prompt, *answer], len(prompt), reward))
        groups.append(group)
    return groups


def as_batch(groups: list[list], step: int, ring: TrajectoryRing, policy: torch.nn.Module) -> Batch:
    """The same answers as a rollout worker leaves them: in the ring, with logprobs and versions."""
    version, found = FIRST_VERSION + step - 1, []
    for number, group in enumerate(groups):
        trajectories = []
        for place, w in enumerate(group):
            cell, num = number * len(group) + place, len(w.tokens) - w.num_prompt
            logprobs = behaviour(policy, w.tokens, w.num_prompt)
            prompt, answer = w.tokens[: w.num_prompt], w.tokens[w.num_prompt :]
            ring.write(cell, 100 * step + number, prompt, answer, logprobs, [version] * num)
            stop = StopReason.STOP
            trajectories.append(Trajectory(cell, len(w.tokens), num, stop, version, version))
        rewards = tuple(w.reward for w in group)
        found.append(Group(100 * step + number, number, tuple(trajectories), rewards))
    return Batch(step, version, tuple(found))


def test_its_step_is_the_trainers(minimal: ModuleType, tied_folder: Path) -> None:
    config = load(RECIPE, ["buffer.max_staleness=0"]).config
    config = replace(config, train=replace(config.train, batch_size=NUM_GROUPS))
    size, rng = config.rollout.group_size, random.Random(3)
    policy = load_policy(str(tied_folder), config.model.dtype)
    optimizer = build_optimizer(policy, config.train.lr, config.train.weight_decay)
    ring = TrajectoryRing(NUM_GROUPS * size, LONGEST)
    rank = LocalRank(tied_folder, config, ring)
    for step in (1, 2, 3):
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        groups = draw(minimal, size, rng)
        batch = as_batch(groups, step, ring, policy)
        values = rank.train(batch)
        loss = minimal.update(policy, optimizer, groups, config, step - 1)
        assert loss == pytest.approx(values["train/loss"], rel=1e-4, abs=1e-6)
        assert values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
        own = dict(policy.model.named_parameters())
        after = {name: p.detach() for name, p in own.items()}
        momentum = {name: optimizer.state[p]["exp_avg"] for name, p in own.items()}
        assert relative_error(rank.momentum(), momentum) < 1e-4
        # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
        assert relative_error(rank.weights(), after, before) < 1e-3


def is_close(ours: list[float], theirs: list[float], wide: float) -> bool:
    """Are the means within the noise of the seeds, and is that noise small enough to tell?"""
    freedom = len(ours) + len(theirs) - 2
    half = T99[freedom] * sqrt(variance(ours) / len(ours) + variance(theirs) / len(theirs))
    assert half < wide, f"the seeds differ by too much to tell: ± {half:.3f}"
    return abs(fmean(ours) - fmean(theirs)) <= half


@pytest.mark.slow
@pytest.mark.vllm
def test_it_learns_what_a_synchronous_run_learns(minimal: ModuleType, tmp_path: Path) -> None:
    from minirl.train.tiny import ensure_tiny_model

    folder, steps, seeds = ensure_tiny_model(0, print), 12, range(4)
    curves: dict[str, list[list[float]]] = {"file": [], "run": []}
    for seed in seeds:
        curves["file"].append(minimal.run(steps, seed, folder).rewards)
        settings = [f"seed={seed}", f"train.steps={steps}", f'model.path="{folder}"']
        settings += ["buffer.max_staleness=0", "eval.every=0", "eval.num_prompts=1"]
        train(RECIPE, tmp_path / str(seed), settings)
        lines = read_lines(tmp_path / str(seed) / "metrics.jsonl")
        curves["run"].append([line["reward/mean"] for line in lines])
    for part, wide in ((slice(0, steps), 0.08), (slice(steps - 4, steps), 0.08)):
        ours, theirs = ([fmean(c[part]) for c in curves[name]] for name in ("file", "run"))
        assert is_close(ours, theirs, wide), f"{part}: {ours} against {theirs}"
