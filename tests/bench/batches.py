"""What the trainer's bench trains on: a model with weights, and a batch of long-tailed lengths.

Takes a Shape and a Size, gives a Hugging Face folder and a Batch whose trajectories lie in a ring,
as a rollout worker would have left them. The tokens are random: only lengths matter for speed.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from minirl import devices
from minirl.config import Config, LogConfig, RolloutConfig, TasksConfig, TrainConfig
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.ring import TrajectoryRing
from tests.bench.models import Shape
from tests.tiny_models import tokenizer

SEED = 5


@dataclass(frozen=True)
class Size:
    num_groups: int
    group_size: int
    prompt_tokens: int
    median_new_tokens: int
    sigma: float  # of the logarithm of an answer's length
    max_new_tokens: int
    max_tokens: int  # of a micro-batch
    repeats: int
    min_prompt_tokens: int = 8

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that may come."""
        return self.prompt_tokens + self.max_new_tokens

    def config(self, **train: object) -> Config:
        return Config(
            tasks=TasksConfig(max_prompt_tokens=self.prompt_tokens),
            rollout=RolloutConfig(group_size=self.group_size, max_new_tokens=self.max_new_tokens),
            train=TrainConfig(batch_size=self.num_groups, max_tokens=self.max_tokens, **train),  # type: ignore[arg-type]
            log=LogConfig(samples=0),  # the models have no tokenizer
        )


@dataclass(frozen=True)
class Drawn:
    ring: TrajectoryRing
    batch: Batch
    sequences: list[list[int]]  # prompt and answer of each trajectory, in the batch's order


def draw(size: Size, vocab: int) -> Drawn:
    rng = random.Random(SEED)
    num_cells = size.num_groups * size.group_size
    ring = TrajectoryRing(num_cells, size.longest)
    groups, sequences, span = [], [], (size.min_prompt_tokens, size.prompt_tokens)
    for group_id in range(size.num_groups):
        prompt = [rng.randrange(2, vocab) for _ in range(rng.randint(*span))]
        trajectories = []
        for place in range(size.group_size):
            drawn = rng.lognormvariate(0, size.sigma) * size.median_new_tokens
            length = max(1, min(size.max_new_tokens, round(drawn)))
            answer = [rng.randrange(2, vocab) for _ in range(length)]
            cell = group_id * size.group_size + place
            logprobs = [-rng.random() for _ in answer]
            ring.write(cell, group_id, prompt, answer, logprobs, [0] * length)
            total = len(prompt) + length
            trajectories.append(Trajectory(cell, total, length, StopReason.STOP, 0, 0))
            sequences.append(prompt + answer)
        rewards = tuple(float(rng.random() < 0.5) for _ in range(size.group_size))
        groups.append(Group(group_id, group_id, tuple(trajectories), rewards))
    return Drawn(ring, Batch(1, 0, tuple(groups)), sequences)


def write_model(shape: Shape, folder: Path) -> str:
    """With weights, unlike `Shape.write`: a trainer loads its model from a folder."""
    devices.hide_broken_torchvision()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config.from_pretrained(shape.write(folder))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer(512).save_pretrained(folder)  # of the canary
    return str(folder)
