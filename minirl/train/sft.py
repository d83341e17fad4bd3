"""Supervised learning on worked answers, with the trainer's own parts: packing, policy, replica.

Rank 0 gives Learned before the first step and after each, then Saved; Stop from the controller ends
the run after the step. An *example* is a prompt and the answer to learn: the task's worked answer
or its `solution`, and the token that ends it. Every rank draws the same batches, and the loss is
the mean of -logprob over the answers' tokens of a whole batch. `SftRank` also warms the tiny model.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from minirl import devices
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.messages import Learned, RankSetup, Saved, SftSetup
from minirl.model import load_tokenizer
from minirl.records import Example
from minirl.shm.board import BoardWriter, State
from minirl.tasks import Task
from minirl.tasks.prompts import PromptStream, encode
from minirl.tasks.registry import make_task
from minirl.train import checkpoint
from minirl.train.batch import Item, MicroBatch, example_item, num_trainable, own_micro_batches
from minirl.train.optimizer import Replica, join_ranks, over_ranks
from minirl.train.policy import Policy, build_policy


class SftData:
    """Examples of a task. Those longer than the recipe's limits are left out and counted."""

    def __init__(self, config: Config, task: Task, tokenizer: Any):
        self.config, self._task, self._tokenizer = config, task, tokenizer
        self._stream = PromptStream(task, tokenizer, config.seed)
        self.num_too_long = 0

    def batch(self, size: int) -> list[Item]:
        found: list[Item] = []
        for _ in range(1000 + 100 * size):
            prompt = self._stream.next()
            found += self._fitting(prompt.example, prompt.tokens)
            if len(found) == size:
                return found
        rule = "nearly all prompts or worked answers are longer than the recipe allows"
        limit, remedy = self.config.rollout.max_new_tokens, "raise it, or tasks.max_prompt_tokens"
        raise RecipeError("rollout.max_new_tokens", limit, rule, remedy)

    def heldout(self, count: int) -> list[Item]:
        examples = self._task.heldout(count)
        return [f for e in examples for f in self._fitting(e, encode(e, self._tokenizer))]

    def _fitting(self, asked: Example, prompt: tuple[int, ...]) -> list[Item]:
        """The example, or nothing where it is too long."""
        text = asked.worked or self._task.solution(asked)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        answer = (*ids, self._tokenizer.eos_token_id)
        most = (self.config.tasks.max_prompt_tokens, self.config.rollout.max_new_tokens)
        if len(prompt) <= most[0] and len(answer) <= most[1]:
            return [example_item(prompt, answer)]
        self.num_too_long += 1
        return []


@dataclass
class SftRank:
    """One rank's policy and how it takes a step."""

    setup: RankSetup
    replica: Replica

    def learn(self, examples: Sequence[Item]) -> tuple[float, float | None]:
        """The loss before it, and the gradient's norm: None where it was not finite, and no step
        was taken. All ranks are given the same examples; each takes its own part."""
        self.replica.optimizer.zero_grad()
        num_tokens = num_trainable(examples)
        scale = self.setup.num_ranks / num_tokens  # DDP averages over ranks; the loss is their sum
        mine, total = own_micro_batches(examples, self.setup), self.zero()
        for i, micro in enumerate(mine):
            with self.replica.syncing(i == len(mine) - 1):
                loss = loss_sum(self.replica.parallel, micro)
                (loss * scale).backward()
            total += loss.detach()
        norm = self.replica.clip()
        is_finite = bool((over_ranks(total) + norm).isfinite())  # the same on every rank
        if is_finite:
            self.replica.optimizer.step()
        return float(total) / num_tokens, float(norm) if is_finite else None

    @torch.no_grad()
    def loss(self, examples: Sequence[Item]) -> float | None:
        """Of examples that are not learned."""
        num_tokens, total = num_trainable(examples), self.zero()
        for micro in own_micro_batches(examples, self.setup):
            total += loss_sum(self.replica.module, micro)
        return float(over_ranks(total)) / num_tokens if num_tokens else None

    def zero(self) -> Tensor:
        return torch.zeros((), device=self.setup.placement.torch_device)


def loss_sum(policy: nn.Module, micro: MicroBatch) -> Tensor:
    return -policy(*micro.inputs, needed_T=micro.trainable_T)[0].sum()


def build_rank(setup: SftSetup) -> SftRank:
    train, place = setup.config.train, setup.placement
    policy = build_policy(setup.config, setup.folder).to(place.torch_device)
    replica = Replica(policy, train, train.lr)
    replica.join(setup.num_ranks, place.kind)
    return SftRank(setup, replica)


def run(setup: SftSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a rank."""
    devices.use_training_device(setup.placement)
    join_ranks(setup)
    config, own, source = setup.config, build_rank(setup), Path(setup.folder)
    tokenizer = load_tokenizer(source, config.model.trust_remote_code)
    data = SftData(config, make_task(config), tokenizer)
    heldout, every = data.heldout(config.eval.num_prompts), config.eval.every
    values: dict[str, float | None] = {"sft/heldout_loss": own.loss(heldout)}
    for done in count():
        if setup.rank == 0:
            pipe.send(Learned(done, values, data.num_too_long))
        is_stopped = over_ranks(own.zero() + pipe.poll()) > 0
        if is_stopped or done == config.train.steps:
            break
        board.enter(State.TRAINING)
        values = step(own, data, config.train.batch_size, done)
        if done + 1 == config.train.steps or (every and (done + 1) % every == 0):
            values["sft/heldout_loss"] = own.loss(heldout)
    if setup.rank == 0:
        with checkpoint.written_aside(Path(setup.output)) as aside:
            checkpoint.save_model(aside, cast(Policy, own.replica.module), source)
        pipe.send(Saved(setup.output))
    pipe.recv()  # Stop


def step(own: SftRank, data: SftData, size: int, number: int) -> dict[str, float | None]:
    lr, started = own.replica.begin_step(number), time.perf_counter()
    batch = data.batch(size)
    loss, norm = own.learn(batch)
    return {
        "sft/loss": loss,
        "train/grad_norm": norm,
        "train/skipped_updates": float(norm is None),
        "train/lr": lr,
        "train/tokens": float(num_trainable(batch)),
        "train/tokens_per_s": sum(e.length for e in batch) / (time.perf_counter() - started),
    }
