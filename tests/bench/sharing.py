"""One real trainer rank whose answers share their prompts, or do not."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from minirl.shm.board import Board
from minirl.train.objective import micro_loss
from minirl.train.trainer import Trainer
from tests.bench.batches import Size, draw
from tests.bench.clock import steady
from tests.bench.memory import resident_bytes
from tests.bench.trainer_harness import LR, trainer_setup


class Sharing:
    def __init__(self, pipe: Connection, folder: str, size: Size, vocab: int):
        torch.manual_seed(0)
        self.drawn = draw(size, vocab)
        setup = trainer_setup(folder, size.config(lr=LR), self.drawn)
        self.trainer = Trainer(setup, Board(1).writer(0))


def step_of(harness: Sharing, can_share: bool) -> float:
    harness.trainer.policy.can_share = can_share
    started = steady()
    harness.trainer.train(harness.drawn.batch)
    return steady() - started


def peak_of(pipe: Connection, folder: str, size: Size, vocab: int, can_share: bool) -> int:
    """Of forward and backward, above weights and gradients; in a process of its own."""
    harness = Sharing(pipe, folder, size, vocab)
    trainer = harness.trainer
    trainer.policy.can_share = can_share
    (minibatch,) = trainer.preparer.prepare(harness.drawn.batch).minibatches
    for parameter in trainer.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    for micro in minibatch.micro_batches:
        micro_loss(trainer.policy, micro, trainer.config)[0].backward()
    return resident_bytes("VmHWM") - before
