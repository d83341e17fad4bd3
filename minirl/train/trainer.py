"""Stage 7, update: a trainer rank. A plain loop in its own process around one replica.

    consumes      Train (the whole batch's descriptors) and Save from the controller
    waits for     a batch; inside a step, the other ranks
    unblocked by  Train
    gives         version n+1 in the weight store, then Trained

Each rank reads its trajectories in place, packs them, and runs its micro-batches; gradients are
summed over ranks with the last one. The loss is normalised by the trained tokens of the whole
minibatch over all ranks, so the number of ranks and the micro-batch split do not change the update.

π_prox is the policy at the start of the step: with one minibatch it is the detached π_θ of the same
forward; with more, one forward without gradients before the first.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl import devices
from minirl.errors import MinirlError
from minirl.records import Batch
from minirl.shm.board import BoardWriter, State
from minirl.shm.weights import CANARY_TOKENS, canary_tokens
from minirl.train import attention, checkpoint
from minirl.train.batch import Item, MicroBatch, items_of, minibatches, pack, staleness
from minirl.train.messages import Ready, Save, Saved, Train, Trained, TrainerSetup
from minirl.train.objective import OBJECTIVES, Settings, Tokens
from minirl.train.optimizer import build_optimizer, learning_rate
from minirl.train.packing import split_over_ranks
from minirl.train.policy import load_policy


class Trainer:
    def __init__(self, setup: TrainerSetup, board: BoardWriter):
        config = setup.config
        self.setup, self.config, self.board = setup, config, board
        self.device = setup.placement.torch_device
        self.policy = load_policy(
            setup.folder,
            config.model.dtype,
            config.train.gradient_checkpointing,
            config.model.trust_remote_code,
        ).to(self.device)
        self.optimizer = build_optimizer(self.policy, config.train.lr, config.train.weight_decay)
        if setup.is_resumed:
            checkpoint.load(Path(setup.folder), self.policy, self.optimizer)
        self.parallel: torch.nn.Module = self.policy
        if setup.num_ranks > 1:
            ids = [0] if setup.placement.kind == "cuda" else None
            self.parallel = torch.nn.parallel.DistributedDataParallel(self.policy, device_ids=ids)
        self.objective = OBJECTIVES[config.train.objective]
        self.settings = Settings(
            config.train.clip_low, config.train.clip_high, config.train.behav_cap
        )

    # -- a step

    def train(self, batch: Batch) -> dict[str, float | None]:
        started = time.perf_counter()
        self.board.enter(State.TRAINING)
        groups = items_of(batch, self.setup.ring, self.config.buffer.max_staleness)
        parts = minibatches(groups, self.config.train.num_minibatches)
        lr = learning_rate(batch.step - 1, self.config.train.lr, self.config.train.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mine = [self.my_micro_batches(part) for part in parts]
        prox = [self.proximal(micro_batches) for micro_batches in mine]
        sums: dict[str, float] = defaultdict(float)
        norms = []
        for i, micro_batches in enumerate(mine):
            num_trainable = sum(int(item.trainable.sum()) for item in parts[i])
            norms.append(self.update(micro_batches, prox[i], max(1, num_trainable), sums, i == 0))
        self.sum_over_ranks(sums)
        seconds = time.perf_counter() - started
        everything = [item for group in groups for item in group]
        return {
            **self.summary(sums),
            **staleness(everything, batch.version),
            "train/grad_norm": float(np.mean(norms)),
            "train/lr": lr,
            "train/tokens_per_s": sum(item.length for item in everything) / seconds,
        }

    def my_micro_batches(self, items: list[Item]) -> list[MicroBatch]:
        """Every rank computes the same split and takes its own part."""
        lengths = [item.length for item in items]
        split = split_over_ranks(lengths, self.setup.num_ranks, self.config.train.max_tokens)
        return [
            pack([items[place] for place in places], self.device)
            for places in split[self.setup.rank]
        ]

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        self.board.enter(State.TRAINING)
        return self.parallel(
            micro.tokens_T,
            micro.positions_T,
            micro.cu_seqlens_S1,
            micro.max_seqlen,
            self.config.rollout.temperature,
            micro.trainable_T | micro.at_equal_version_T,
        )

    @torch.no_grad()
    def proximal(self, micro_batches: list[MicroBatch]) -> list[Tensor | None]:
        """π_prox of each micro-batch, or None where the step's own forward gives it."""
        if self.config.train.num_minibatches == 1 or self.config.train.objective == "naive":
            return [None] * len(micro_batches)
        return [self.forward(micro)[0] for micro in micro_batches]

    def update(
        self,
        micro_batches: list[MicroBatch],
        prox: list[Tensor | None],
        num_trainable: int,
        sums: dict[str, float],
        is_first: bool,
    ) -> float:
        """One optimizer step. Gives the gradient norm before clipping."""
        self.optimizer.zero_grad(set_to_none=True)
        for i, (micro, prox_T) in enumerate(zip(micro_batches, prox, strict=True)):
            with self.syncing_gradients(i == len(micro_batches) - 1):
                logprobs_T, entropy_T = self.forward(micro)
                at_start_T = logprobs_T.detach() if prox_T is None else prox_T
                tokens = Tokens(
                    logprobs_T, at_start_T, micro.behav_T, micro.advantages_T, micro.trainable_T
                )
                loss = self.objective(tokens, self.settings)
                # DDP averages over ranks; the loss is a sum over all of them.
                (loss.sum * (self.setup.num_ranks / num_trainable)).backward()
            equal_T = micro.at_equal_version_T
            if not is_first and prox_T is None:  # the weights have moved on from that version
                equal_T = torch.zeros_like(equal_T)
            sums["loss"] += loss.sum.item()
            sums["entropy"] += entropy_T[micro.trainable_T].sum().item()
            sums["gap"] += (at_start_T - micro.behav_T).abs()[equal_T].sum().item()
            sums["at_equal_version"] += equal_T.sum().item()
            sums["tokens"] += loss.metrics.num_tokens.item()
            sums["clipped"] += loss.metrics.num_clipped.item()
            sums["capped"] += loss.metrics.num_capped.item()
            sums["behav_ratio"] += loss.metrics.behav_ratio.item()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.train.grad_clip)
        self.optimizer.step()
        return float(norm)

    @contextlib.contextmanager
    def syncing_gradients(self, is_last: bool) -> Iterator[None]:
        if self.setup.num_ranks > 1 and not is_last:
            with self.parallel.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def sum_over_ranks(self, sums: dict[str, float]) -> None:
        if self.setup.num_ranks > 1:
            values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.device)
            dist.all_reduce(values)
            sums.update(zip(sums, values.tolist(), strict=True))

    def summary(self, sums: dict[str, float]) -> dict[str, float | None]:
        tokens = max(1, sums["tokens"])
        equal = sums["at_equal_version"]
        return {
            "train/loss": sums["loss"] / tokens,
            "train/entropy": sums["entropy"] / tokens,
            "train/clip_frac": sums["clipped"] / tokens,
            "train/behav_ratio_mean": sums["behav_ratio"] / tokens,
            "train/capped_frac": sums["capped"] / tokens,
            "train/tokens": sums["tokens"],
            "train/logprob_gap": sums["gap"] / equal if equal else None,
        }

    # -- what it gives

    def publish(self, version: int) -> float:
        """Rank 0 copies its weights into the store. Gives the seconds it took."""
        self.board.enter(State.PUBLISHING)
        canary = self.canary()
        started = time.perf_counter()
        weights = self.policy.model.state_dict()
        try:
            in_order = [weights[spec.name] for spec in self.setup.store.table]
        except KeyError as missing:
            raise MinirlError(f"the model has no tensor {missing}, which its file has") from None
        self.setup.store.publish(version, in_order, canary)
        return time.perf_counter() - started

    @torch.no_grad()
    def canary(self) -> np.ndarray:
        """Logprobs of the fixed sequence that every engine repeats after a reload (rule 6)."""
        tokens = canary_tokens(self.policy.model.config.get_text_config().vocab_size)
        bounds = attention.boundaries([CANARY_TOKENS], torch.device(self.device))
        logprobs_T, _ = self.policy(
            torch.tensor(tokens, device=self.device),
            bounds.positions_T,
            bounds.cu_seqlens_S1,
            bounds.max_seqlen,
        )
        return logprobs_T.float().cpu().numpy()

    def save(self, request: Save) -> None:
        self.board.enter(State.SAVING)
        source = Path(self.setup.tokenizer_folder)
        checkpoint.save(Path(request.folder), self.policy, self.optimizer, source, request.state)
        checkpoint.prune(Path(request.folder).parent.parent, self.config.checkpoint.keep)


def run(setup: TrainerSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a trainer rank."""
    devices.use_training_device(setup.placement)
    torch.manual_seed(setup.config.seed)
    if setup.num_ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one box: nothing listens elsewhere
        dist.init_process_group(
            setup.placement.process_group_backend,
            init_method=f"file://{setup.rendezvous}",
            rank=setup.rank,
            world_size=setup.num_ranks,
        )
    trainer = Trainer(setup, board)
    if setup.rank == 0:
        trainer.publish(setup.version)
    pipe.send(Ready())
    while True:
        board.enter(State.WAITING_FOR_BATCH)
        request = pipe.recv()
        if isinstance(request, Train):
            values = trainer.train(request.batch)
            if setup.rank == 0:
                version = request.batch.version + 1
                values["weights/publish_s"] = trainer.publish(version)
                pipe.send(Trained(version, values))
        elif isinstance(request, Save):
            trainer.save(request)
            pipe.send(Saved(request.folder))
        else:
            return
