"""Supervised learning on worked answers, with the trainer's own parts: packing, policy, replica.

    consumes      Learn and SaveModel from the controller
    waits for     those; inside a step, the other ranks
    gives         Learned and Saved (from rank 0)

An *example* is a prompt and the answer to learn: the task's worked answer where it has one, else
`solution(example)`, and the token that ends an answer. Every rank draws the same batches. Examples
longer than the recipe's limits are left out.

The loss is the mean of -logprob over the answers' tokens of the whole batch, so neither the number
of ranks nor the micro-batch split changes an update. `SftRank` also warms the tiny model up.

Axes: T tokens of all sequences in a micro-batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minirl import devices
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.model import load_tokenizer
from minirl.records import Example
from minirl.shm.board import BoardWriter, State
from minirl.tasks import Task
from minirl.tasks.prompts import PromptStream, encode
from minirl.tasks.registry import make_task
from minirl.train import attention, checkpoint
from minirl.train.messages import Learn, Learned, Saved, SaveModel, SftSetup
from minirl.train.optimizer import Replica, join_ranks
from minirl.train.packing import split_over_ranks
from minirl.train.policy import Policy, build_policy

MAX_IN_A_ROW = 1000  # examples that are too long, before the recipe is taken for wrong


@dataclass(frozen=True)
class SftExample:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


class SftData:
    def __init__(self, config: Config, task: Task, tokenizer: Any):
        self.config, self._task, self._tokenizer = config, task, tokenizer
        self._stream = PromptStream(task, tokenizer, config.seed)
        self.num_too_long = 0

    def batch(self, size: int) -> list[SftExample]:
        found: list[SftExample] = []
        num_before = self.num_too_long
        while len(found) < size:
            prompt = self._stream.next()
            found += self._fitting([self.example(prompt.example, prompt.tokens)])
            if self.num_too_long - num_before > MAX_IN_A_ROW + 100 * len(found):
                limit = self.config.rollout.max_new_tokens
                rule = "nearly all prompts or worked answers are longer than the recipe allows"
                remedy = "raise it, or tasks.max_prompt_tokens"
                raise RecipeError("rollout.max_new_tokens", limit, rule, remedy)
        return found

    def heldout(self, count: int) -> list[SftExample]:
        examples = self._task.heldout(count)
        return self._fitting([self.example(e, encode(e, self._tokenizer)) for e in examples])

    def example(self, asked: Example, prompt: tuple[int, ...]) -> SftExample:
        text = asked.worked or self._task.solution(asked)
        answer = self._tokenizer.encode(text, add_special_tokens=False)
        return SftExample(prompt, (*answer, self._tokenizer.eos_token_id))

    def _fitting(self, drawn: list[SftExample]) -> list[SftExample]:
        most = (self.config.tasks.max_prompt_tokens, self.config.rollout.max_new_tokens)
        found = [e for e in drawn if len(e.prompt) <= most[0] and len(e.answer) <= most[1]]
        self.num_too_long += len(drawn) - len(found)
        return found


@dataclass(frozen=True)
class Update:
    loss: float  # before it
    grad_norm: float | None  # None: it was not finite, and no step was taken


@dataclass
class SftRank:
    """One rank's policy and how it takes a step."""

    replica: Replica
    max_tokens: int
    device: str = "cpu"
    rank: int = 0
    num_ranks: int = 1

    def learn(self, examples: Sequence[SftExample]) -> Update:
        """All ranks are given the same examples; each takes its own part."""
        self.replica.zero_grad()
        num_tokens = sum(len(example.answer) for example in examples)
        scale = self.num_ranks / num_tokens  # DDP averages over ranks; the loss is a sum over them
        mine, total = self.micro_batches(examples), torch.zeros((), device=self.device)
        for i, micro in enumerate(mine):
            with self.replica.syncing(i == len(mine) - 1):
                loss = self.loss_sum(self.replica.parallel, micro)
                (loss * scale).backward()
            total += loss.detach()
        norm = self.replica.clip()
        total = self.over_ranks(total)
        is_finite = bool(torch.isfinite(torch.stack([total, norm])).all())  # the same on every rank
        if is_finite:
            self.replica.optimizer.step()
        return Update(float(total) / num_tokens, float(norm) if is_finite else None)

    @torch.no_grad()
    def loss(self, examples: Sequence[SftExample]) -> float | None:
        """Of examples that are not learned."""
        num_tokens = sum(len(example.answer) for example in examples)
        total = torch.zeros((), device=self.device)
        for micro in self.micro_batches(examples):
            total += self.loss_sum(self.replica.module, micro)
        return float(self.over_ranks(total)) / num_tokens if num_tokens else None

    def loss_sum(self, policy: nn.Module, examples: Sequence[SftExample]) -> Tensor:
        """Examples end to end. Where there are none: one token that teaches nothing, for DDP."""
        tokens = [token for e in examples for token in (*e.prompt, *e.answer)]
        is_answer = [i >= len(e.prompt) for e in examples for i in range(e.length)]
        device = torch.device(self.device)
        bounds = attention.boundaries([e.length for e in examples] or [1], device)
        logprobs_T, _ = policy(
            torch.tensor(tokens or [0], device=device),
            bounds.positions_T,
            bounds.cu_seqlens_S1,
            bounds.max_seqlen,
            needed_T=torch.tensor(is_answer or [False], device=device),
        )
        return -logprobs_T.sum()

    def micro_batches(self, examples: Sequence[SftExample]) -> list[list[SftExample]]:
        """This rank's part."""
        lengths = [example.length for example in examples]
        split = split_over_ranks(lengths, self.num_ranks, self.max_tokens)
        return [[examples[i] for i in places] for places in split[self.rank]]

    def over_ranks(self, total: Tensor) -> Tensor:
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total


def build_rank(setup: SftSetup) -> SftRank:
    train, place = setup.config.train, setup.placement
    policy = build_policy(setup.config, setup.folder).to(place.torch_device)
    replica = Replica(policy, train, train.lr, train.shard_optimizer)
    replica.join(setup.num_ranks, place.kind)
    return SftRank(replica, train.max_tokens, place.torch_device, setup.rank, setup.num_ranks)


def run(setup: SftSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a rank. Ends with anything but a request, or with the pipe."""
    devices.use_training_device(setup.placement)
    join_ranks(setup)
    config, is_first = setup.config, setup.rank == 0
    own, source = build_rank(setup), Path(setup.folder)
    tokenizer = load_tokenizer(source, config.model.trust_remote_code)
    data = SftData(config, make_task(config), tokenizer)
    heldout = data.heldout(config.eval.num_prompts)
    answer: object = Learned({"sft/heldout_loss": own.loss(heldout)}, 0)
    while True:
        if is_first:
            pipe.send(answer)
        board.enter(State.WAITING_FOR_BATCH)
        request = pipe.recv()
        board.enter(State.TRAINING)
        if isinstance(request, Learn):
            values = step(own, data, config.train.batch_size, request.step)
            if request.is_evaluated:
                values["sft/heldout_loss"] = own.loss(heldout)
            answer = Learned(values, data.num_too_long)
        elif isinstance(request, SaveModel):
            if is_first:
                with checkpoint.written_aside(Path(request.folder)) as aside:
                    checkpoint.save_model(aside, cast(Policy, own.replica.module), source)
            answer = Saved(request.folder)
        else:
            return


def step(own: SftRank, data: SftData, size: int, number: int) -> dict[str, float | None]:
    started = time.perf_counter()
    lr = own.replica.begin_step(number)
    batch = data.batch(size)
    update = own.learn(batch)
    return {
        "sft/loss": update.loss,
        "train/grad_norm": update.grad_norm,
        "train/skipped_updates": float(update.grad_norm is None),
        "train/lr": lr,
        "train/tokens": float(sum(len(e.answer) for e in batch)),
        "train/tokens_per_s": sum(e.length for e in batch) / (time.perf_counter() - started),
    }
