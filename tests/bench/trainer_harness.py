"""One real trainer rank, and the loops that a script would write instead, on the same batch.

Each loop is one pass over the batch with one optimizer step, and gives the seconds it took.
Axes: T packed tokens, B sequences, L tokens of the longest, V vocabulary.
"""

from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.config import Config
from minirl.devices import Placement
from minirl.messages import TrainerSetup
from minirl.model import weight_table
from minirl.shm.board import Board
from minirl.shm.weights import WeightStore
from minirl.train import attention
from minirl.train.batch import Item, MicroBatch, pack
from minirl.train.prepare import Preparer
from minirl.train.trainer import Trainer
from tests.bench.batches import Drawn, Size, draw
from tests.bench.clock import steady

LR = 1e-6


@dataclass
class FixedCount(Preparer):
    """What dynamic micro-batches replace: as many sequences in each, however long they are.

    Sorted by length too, and packed: only the count is compared.
    """

    count: int = 1

    def micro_batches(self, items: list[Item]) -> list[MicroBatch]:
        order = sorted(range(len(items)), key=lambda place: -items[place].length)
        starts = range(0, len(order), self.count)
        return [
            pack([items[i] for i in order[start : start + self.count]], "cpu") for start in starts
        ]


class TrainerHarness:
    def __init__(self, pipe: Connection, folder: str, size: Size, vocab: int):
        torch.manual_seed(0)
        self.drawn, self.size = draw(size, vocab), size
        self.dynamic, self.fixed = self.make_pair(folder, size.max_tokens)
        self.tight_dynamic, self.tight_fixed = self.make_pair(folder, size.longest)
        (minibatch,) = self.dynamic.preparer.prepare(self.drawn.batch).minibatches
        self.packed = minibatch.micro_batches
        self.bare, self.padded = (make_bare(folder, kind) for kind in (attention.NAME, "sdpa"))

    def make_pair(self, folder: str, max_tokens: int) -> tuple[Trainer, Trainer]:
        """With dynamic micro-batches, and with as many sequences as are sure to fit."""
        dynamic, fixed = (self.make_trainer(folder, max_tokens) for _ in range(2))
        count = max_tokens // self.size.longest
        fixed.preparer = FixedCount(**vars(fixed.preparer), count=count)
        (minibatch,) = fixed.preparer.prepare(self.drawn.batch).minibatches
        assert len(minibatch.micro_batches) == -(-len(self.drawn.sequences) // count)
        return dynamic, fixed

    def make_trainer(self, folder: str, max_tokens: int) -> Trainer:
        config = replace(self.size, max_tokens=max_tokens).config(lr=LR)
        trainer = Trainer(trainer_setup(folder, config, self.drawn), Board(1).writer(0))
        trainer.policy.can_share = False  # what it is compared with packs whole sequences
        return trainer


def trainer_setup(
    folder: str, config: Config, drawn: Drawn, rendezvous: str = "", rank: int = 0, num: int = 1
) -> TrainerSetup:
    """Of one rank of `num`, with a weight store of its own."""
    return TrainerSetup(
        config=config,
        folder=folder,
        tokenizer_folder=folder,
        rank=rank,
        num_ranks=num,
        rendezvous=rendezvous,
        placement=Placement("cpu"),
        ring=drawn.ring,
        store=WeightStore(weight_table(Path(folder)), "float32"),
        is_resumed=False,
        version=0,
    )


def make_bare(folder: str, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=kind
    ).train()
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def count_tokens(harness: TrainerHarness) -> int:
    return sum(map(len, harness.drawn.sequences))


# Loops ----------------------------------------------------------------------------------------


def step(harness: TrainerHarness) -> float:
    return _step(harness.dynamic, harness)


def fixed(harness: TrainerHarness) -> float:
    return _step(harness.fixed, harness)


def tight_dynamic(harness: TrainerHarness) -> float:
    return _step(harness.tight_dynamic, harness)


def tight_fixed(harness: TrainerHarness) -> float:
    return _step(harness.tight_fixed, harness)


def _step(trainer: Trainer, harness: TrainerHarness) -> float:
    started = steady()
    trainer.train(harness.drawn.batch)
    trainer.publish(trainer.setup.store.latest + 1)
    return steady() - started


def with_prox(harness: TrainerHarness) -> float:
    """A step that asks for π_prox although it has one minibatch."""
    started = steady()
    for micro in harness.packed:
        with torch.no_grad():
            harness.dynamic.policy(micro.tokens_T, micro.bounds, needed_T=micro.needed_T)
    return steady() - started + step(harness)


def bare(harness: TrainerHarness) -> float:
    """transformers' own forward with its logits, over tensors that are packed already."""
    model, optimizer = harness.bare
    started = steady()
    optimizer.zero_grad()
    for micro in harness.packed:
        logits_TV = model(
            input_ids=micro.tokens_T[None],
            position_ids=micro.bounds.positions_T[None],
            cu_seqlens=micro.bounds.cu_seqlens_S1,
            max_seqlen=micro.bounds.max_seqlen,
            use_cache=False,
        ).logits[0]
        losses_T = F.cross_entropy(logits_TV[:-1], micro.tokens_T[1:], reduction="none")
        (losses_T * micro.trainable_T[1:]).sum().backward()
    optimizer.step()
    return steady() - started


def padded(harness: TrainerHarness) -> float:
    """Sequences in the order they came, as many at once as fit when padded to the longest."""
    model, optimizer = harness.padded
    started = steady()
    optimizer.zero_grad()
    sequences = [torch.tensor(tokens) for tokens in harness.drawn.sequences]
    longest = max(map(len, sequences))
    count = max(1, harness.size.max_tokens // longest)
    for start in range(0, len(sequences), count):
        _padded_loss(model, sequences[start : start + count]).backward()
    optimizer.step()
    return steady() - started


def _padded_loss(model: Any, sequences: list[Tensor]) -> Tensor:
    tokens_BL = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask_BL = torch.arange(tokens_BL.shape[1]) < torch.tensor([len(s) for s in sequences])[:, None]
    logits_BLV = model(tokens_BL, attention_mask=mask_BL.long(), use_cache=False).logits
    losses_BL = F.cross_entropy(
        logits_BLV[:, :-1].transpose(1, 2), tokens_BL[:, 1:], reduction="none"
    )
    return (losses_BL * mask_BL[:, 1:]).sum()


LOOPS = {
    loop.__name__: loop for loop in (step, padded, fixed, tight_dynamic, tight_fixed, with_prox)
}
