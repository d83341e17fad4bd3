"""Supervised learning on worked answers, with the trainer's own parts: packing, policy, replica.

    consumes      Learn, Test and SaveModel from the controller
    waits for     those; inside a step, the other ranks
    gives         Learned, Tested, Saved (from rank 0)

The loss is the mean of -logprob over the answers' tokens of the whole batch, so neither the number
of ranks nor the micro-batch split changes an update. `Student` is also what warms the tiny model up
(warmup.py).

Axes: T tokens of all sequences in a micro-batch.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from minirl import devices
from minirl.model import load_tokenizer
from minirl.shm.board import BoardWriter, State
from minirl.tasks.registry import make_task
from minirl.train import attention, checkpoint, lora
from minirl.train.lessons import Learn, Learned, Lesson, Lessons, SaveModel, SftSetup, Test, Tested
from minirl.train.messages import Ready, Saved
from minirl.train.optimizer import Replica
from minirl.train.packing import split_over_ranks
from minirl.train.policy import Policy, load_policy


@dataclass(frozen=True)
class Packed:
    tokens_T: Tensor
    is_answer_T: Tensor
    bounds: attention.Boundaries


@dataclass(frozen=True)
class Update:
    loss: float  # before it
    grad_norm: float | None  # None: it was not finite, and no step was taken


class Student:
    """One rank's policy and how it takes a step."""

    def __init__(
        self, replica: Replica, max_tokens: int, device: str = "cpu", rank: int = 0, ranks: int = 1
    ):
        self.replica, self.max_tokens, self.device = replica, max_tokens, device
        self.rank, self.num_ranks = rank, ranks

    def learn(self, lessons: Sequence[Lesson]) -> Update:
        """All ranks are given the same lessons; each takes its own part."""
        self.replica.zero_grad()
        num_tokens = sum(len(lesson.answer) for lesson in lessons)
        scale = self.num_ranks / num_tokens  # DDP averages over ranks; the loss is a sum over them
        mine, total = self.micro_batches(lessons), torch.zeros((), device=self.device)
        for i, micro in enumerate(mine):
            with self.replica.syncing(i == len(mine) - 1):
                loss = self.loss_sum(self.replica.parallel, micro)
                (loss * scale).backward()
            total += loss.detach()
        norm = self.replica.clip()
        total = self.over_ranks(total)
        if not bool(torch.isfinite(torch.stack([total, norm])).all()):  # the same on every rank
            self.replica.zero_grad()
            return Update(float(total) / num_tokens, None)
        self.replica.step()
        return Update(float(total) / num_tokens, float(norm))

    @torch.no_grad()
    def loss(self, lessons: Sequence[Lesson]) -> float | None:
        """Of lessons that are not learned."""
        num_tokens = sum(len(lesson.answer) for lesson in lessons)
        if not num_tokens:
            return None
        total = torch.zeros((), device=self.device)
        for micro in self.micro_batches(lessons):
            total += self.loss_sum(self.replica.module, micro)
        return float(self.over_ranks(total)) / num_tokens

    def loss_sum(self, policy: torch.nn.Module, micro: Packed) -> Tensor:
        bounds = micro.bounds
        logprobs_T, _ = policy(
            micro.tokens_T,
            bounds.positions_T,
            bounds.cu_seqlens_S1,
            bounds.max_seqlen,
            needed_T=micro.is_answer_T,
        )
        return -logprobs_T.sum()

    def micro_batches(self, lessons: Sequence[Lesson]) -> list[Packed]:
        lengths = [lesson.length for lesson in lessons]
        split = split_over_ranks(lengths, self.num_ranks, self.max_tokens)
        return [pack([lessons[i] for i in places], self.device) for places in split[self.rank]]

    def over_ranks(self, total: Tensor) -> Tensor:
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total


def pack(lessons: Sequence[Lesson], device: str) -> Packed:
    """End to end. No lessons: one token that teaches nothing, which DDP needs."""
    tokens = [token for lesson in lessons for token in (*lesson.prompt, *lesson.answer)]
    is_answer = [
        flag
        for lesson in lessons
        for flag in (False,) * len(lesson.prompt) + (True,) * len(lesson.answer)
    ]
    return Packed(
        torch.tensor(tokens or [0], device=device),
        torch.tensor(is_answer or [False], device=device),
        attention.boundaries([lesson.length for lesson in lessons] or [1], torch.device(device)),
    )


def build_student(setup: SftSetup) -> Student:
    config, train, model = setup.config, setup.config.train, setup.config.model
    policy = load_policy(
        setup.folder, model.dtype, train.gradient_checkpointing, model.trust_remote_code
    )
    if train.lora_rank:
        torch.manual_seed(config.seed)  # every rank draws the same adapters
        lora.add_adapters(policy.model, train.lora_rank)
        if train.gradient_checkpointing:
            policy.model.enable_input_require_grads()
    if train.compile:
        policy.model.base_model.compile(dynamic=True)
    device = setup.placement.torch_device
    replica = Replica(policy.to(device), train, train.lr, train.shard_optimizer)
    replica.join(setup.num_ranks, setup.placement.kind)
    return Student(replica, train.max_tokens, device, setup.rank, setup.num_ranks)


def run(setup: SftSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a rank. Ends with anything but a message of lessons.py, or with the pipe."""
    devices.use_training_device(setup.placement)
    if setup.num_ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one box: nothing listens elsewhere
        dist.init_process_group(
            setup.placement.process_group_backend,
            init_method=f"file://{setup.rendezvous}",
            rank=setup.rank,
            world_size=setup.num_ranks,
        )
    config, is_first = setup.config, setup.rank == 0
    student = build_student(setup)
    tokenizer = load_tokenizer(Path(setup.folder), config.model.trust_remote_code)
    lessons = Lessons(config, make_task(config), tokenizer)
    heldout = lessons.heldout(config.eval.num_prompts)
    pipe.send(Ready())
    while True:
        board.enter(State.WAITING_FOR_BATCH)
        request = pipe.recv()
        board.enter(State.TRAINING)
        if isinstance(request, Learn):
            values = step(student, lessons, config.train.batch_size, request.step)
            answer: object = Learned(values, lessons.num_too_long)
        elif isinstance(request, Test):
            answer = Tested(student.loss(heldout))
        elif isinstance(request, SaveModel):
            if is_first:
                save(student, Path(request.folder), Path(setup.folder))
            answer = Saved(request.folder)
        else:
            return
        if is_first:
            pipe.send(answer)


def step(student: Student, lessons: Lessons, size: int, number: int) -> dict[str, float | None]:
    started = time.perf_counter()
    lr = student.replica.begin_step(number)
    batch = lessons.batch(size)
    update = student.learn(batch)
    seconds = time.perf_counter() - started
    return {
        "sft/loss": update.loss,
        "train/grad_norm": update.grad_norm,
        "train/skipped_updates": float(update.grad_norm is None),
        "train/lr": lr,
        "train/tokens": float(sum(len(lesson.answer) for lesson in batch)),
        "train/tokens_per_s": sum(lesson.length for lesson in batch) / seconds,
    }


def save(student: Student, folder: Path, source: Path) -> None:
    """Written aside and renamed: the folder is whole or absent."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    policy = student.replica.module
    assert isinstance(policy, Policy)
    checkpoint.save_model(aside, policy, source)
    if lora.is_adapted(policy.model):
        lora.save_adapter(policy.model, aside / "adapter", str(source))
    os.rename(aside, folder)
