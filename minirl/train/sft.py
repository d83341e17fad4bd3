"""Supervised learning on worked answers, with the trainer's own parts: packing, policy, replica.

Rank 0 gives Learned before the first step and after each, then Saved; Stop from the controller ends
the run after the step. An *example* is a prompt and the answer to learn: the task's worked answer
or its `solution`, and the token that ends it. Every rank draws the same batches, and the loss is
the mean of -logprob over the answers' tokens of a whole batch.
"""

import time
from collections.abc import Sequence
from itertools import count
from math import isfinite
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from minirl import devices
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.messages import Learned, RankSetup, Saved, SftSetup
from minirl.model import tokenizer_of
from minirl.records import Example
from minirl.run_dir import replacing
from minirl.shm.board import BoardWriter, State
from minirl.tasks import Task
from minirl.tasks.prompts import PromptStream, encode
from minirl.tasks.registry import make_task
from minirl.train.batch import Item, example_item, num_trainable, own_micro_batches
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


class SftRank:
    """One rank's policy and how it takes a step."""

    def __init__(self, setup: RankSetup, policy: Policy):
        self.setup, self.replica = setup, Replica(policy, setup, setup.config.train.lr)

    def learn(self, examples: Sequence[Item]) -> tuple[float | None, float | None]:
        """The loss before it, and the gradient's norm: None where it was not finite, and no step
        was taken. All ranks are given the same examples; each takes its own part."""
        self.replica.zero_grad()
        loss = self.loss(examples, is_learned=True)
        norm = float(self.replica.clip())
        if loss is None or not isfinite(loss + norm):  # the same on every rank
            return loss, None
        self.replica.optimizer.step()
        return loss, norm

    def loss(self, examples: Sequence[Item], is_learned: bool = False) -> float | None:
        """Over all ranks; its gradient only where it is learned."""
        num_tokens, mine = num_trainable(examples), own_micro_batches(examples, self.setup)
        scale = self.setup.num_ranks / max(1, num_tokens)  # DDP averages over ranks: a sum is meant
        total = torch.zeros((), device=self.setup.placement.torch_device)
        for i, micro in enumerate(mine):
            with torch.set_grad_enabled(is_learned), self.replica.syncing(i == len(mine) - 1):
                given = micro.tokens_T, micro.bounds
                loss = -self.replica.parallel(*given, needed_T=micro.trainable_T)[0].sum()
                if is_learned:
                    (loss * scale).backward()
            total += loss.detach()
        return float(over_ranks(total)) / num_tokens if num_tokens else None


def run(setup: SftSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a rank."""
    devices.use_training_device(setup.placement)
    join_ranks(setup)
    config, source = setup.config, Path(setup.folder)
    policy = build_policy(config, setup.folder)
    own = SftRank(setup, policy)
    tokenizer = tokenizer_of(config, source)
    data = SftData(config, make_task(config), tokenizer)
    heldout, every = data.heldout(config.eval.num_prompts), config.eval.every
    values: dict[str, float | None] = {"sft/heldout_loss": own.loss(heldout)}
    for done in count():
        if setup.rank == 0:
            pipe.send(Learned(done, values, data.num_too_long))
        is_stopped = torch.tensor(int(pipe.poll()), device=setup.placement.torch_device)
        if over_ranks(is_stopped) > 0 or done == config.train.steps:
            break
        board.enter(State.TRAINING)
        values = step(own, data, config.train.batch_size, done)
        if done + 1 == config.train.steps or (every and (done + 1) % every == 0):
            values["sft/heldout_loss"] = own.loss(heldout)
    weights = policy.gather(must_keep=setup.rank == 0)
    if setup.rank == 0:
        with replacing(Path(setup.output)) as aside:
            aside.mkdir()
            policy.save(aside, weights, source)
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
