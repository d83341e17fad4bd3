"""Stage 7, update: a trainer rank. Takes Train (the whole batch's descriptors) and Save from the
controller, gives version n+1 in the weight store, then Trained; inside a step it waits for the
other ranks. Rank 0 takes Score too, while it trains: answers of the version that the step starts
from, so that each version's logprobs are compared with the engines', however stale the batch is.

The loss is normalised by the trained tokens of the whole minibatch over all ranks, so neither the
number of ranks nor the micro-batch split changes the update. An update whose loss, gradient or
logprobs are not finite is left out on every rank: the weights stay as they were. Weights that are
not finite themselves end the run before they are published.
"""

import json
import math
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property, lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from minirl import devices
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import AnswerTokens, Save, Saved, Score, Started, Train, Trained, TrainerSetup
from minirl.records import Batch
from minirl.run_dir import replacing
from minirl.shm.board import BEAT_S, BoardWriter, State
from minirl.shm.ring import TornEntry
from minirl.shm.weights import CANARY_TEXT, CANARY_TOKENS, TENSORS_AT_ONCE, canary_tokens
from minirl.train import attention, checkpoint, lora
from minirl.train.batch import MicroBatch, item_of, pack, staleness_metrics, trained_staleness
from minirl.train.objective import Sums, gaps, micro_loss, value_loss
from minirl.train.optimizer import Replica, is_fully_sharded, join_ranks, over_ranks, placed
from minirl.train.policy import Critic, build_policy, load_policy, model_flops
from minirl.train.prepare import Minibatch, Prepared, Preparer

MAX_SHOWN_TOKENS = 512  # of an answer: a few dozen kB per step at most


class Trainer:
    def __init__(self, setup: TrainerSetup, board: BoardWriter, pipe: Connection | None = None):
        self.setup, self.config, self.board, self.pipe = setup, setup.config, board, pipe
        self.device = setup.placement.torch_device
        # Of the last batch:
        self.version = setup.version  # that its step started from
        self.problem = ""  # why its first update was left out
        self.bad_gradients: list[str] = []  # parameters whose gradient was not finite then
        self.logprobs_A: Tensor  # by the trainer; 0 where none is needed
        self.prepared: Prepared
        # Until a rank has its slices it holds the whole model on the host: one after another.
        for turn in range(setup.num_ranks) if is_fully_sharded(setup) else [setup.rank]:
            if turn == setup.rank:
                self.build()
            over_ranks(torch.zeros((), device=self.device)).item()

    def build(self) -> None:
        """The models and their optimizers. Where they are sliced nothing here is a collective."""
        setup, train, model = self.setup, self.config.train, self.config.model
        # A checkpoint's weights are merged: LoRA resumes from the first model and the adapter.
        folder = setup.tokenizer_folder if train.lora_rank else setup.folder
        self.policy = build_policy(self.config, folder)
        self.learner = Replica(self.policy, setup, train.lr)
        self.critic: Replica | None = None
        if train.estimator == "gae":
            start = load_policy(setup.folder, model.dtype, train.gradient_checkpointing)
            self.critic = Replica(Critic(start), setup, train.critic_lr)
        self.replicas = [self.learner] + ([self.critic] if self.critic else [])
        if setup.is_resumed:  # every rank from the same file
            with checkpoint.as_one_line(Path(setup.folder)):
                for replica in self.replicas:
                    replica.load(Path(setup.folder) / "trainer")
        reference = None  # the model that the run began with, frozen
        if train.kl_coef:
            reference = load_policy(setup.tokenizer_folder, model.dtype)
            placed(reference.requires_grad_(False), setup)
        critic = self.critic.module if self.critic else None
        self.preparer = Preparer(setup, self.policy, reference, critic, self.heartbeat)

    def heartbeat(self, phase: str) -> None:
        self.board.enter(State.TRAINING, phase=phase)

    # -- a step

    def train(self, batch: Batch) -> Trained:
        started = time.perf_counter()
        self.board.enter(State.TRAINING, phase=f"pack step {batch.step}", version=batch.version)
        lr, *_ = [replica.begin_step(batch.step - 1) for replica in self.replicas]
        prepared = self.preparer.prepare(batch)
        self.problem, self.bad_gradients, self.prepared = "", [], prepared
        self.version = batch.version
        num_tokens = len(prepared.advantages)
        self.logprobs_A = torch.zeros(num_tokens, device=self.device)
        sums: Sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.device))
        norms = [self.update(minibatch, sums) for minibatch in prepared.minibatches]
        if bad := next(filter(None, (replica.bad_weight() for replica in self.replicas)), ""):
            remedy = "continue with --resume; if it comes again, start anew with a lower train.lr"
            raise MinirlError(f"step {batch.step}: {bad} is not finite after the update; {remedy}")
        taken = [norm for norm in norms if norm is not None]
        values = {
            **self.summary(sums),
            **staleness_metrics(prepared.items, self.config.buffer.max_staleness),
            "train/grad_norm": float(np.mean(taken)) if taken else None,
            "train/skipped_updates": len(norms) - len(taken),
            "train/lr": lr,
            "train/tokens_per_s": num_tokens / (seconds := time.perf_counter() - started),
        }
        if peak := self.setup.peak_flops:
            micros = (micro for part in prepared.minibatches for micro in part.micro_batches)
            own = sum(model_flops(self.policy, *micro.lengths) for micro in micros)
            flops = over_ranks(torch.tensor(own, dtype=torch.float64, device=self.device))
            values["train/mfu"] = float(flops) / (seconds * peak * self.setup.num_ranks)
        counts = tuple(np.bincount(trained_staleness(prepared.items)).tolist())
        samples = self.shown_answers(prepared)
        return Trained(batch.version + 1, values, counts, self.problem, samples)

    def update(self, minibatch: Minibatch, sums: Sums) -> float | None:
        """One optimizer step. Gives the policy's gradient norm before clipping, or None if the
        step could not be taken."""
        for replica in self.replicas:
            replica.zero_grad()
        total, logprobs, behav = torch.zeros(3, device=self.device).unbind()
        # DDP averages over ranks; the loss is a sum over all of them.
        scale = self.setup.num_ranks / minibatch.num_trainable
        for micro in minibatch.micro_batches:
            self.heartbeat("forward and backward")
            is_last = micro is minibatch.micro_batches[-1]
            with self.learner.syncing(is_last):
                policy, progress = self.learner.parallel, minibatch.progress
                loss, logprobs_T, found = micro_loss(policy, micro, self.config, progress)
                (loss * scale).backward()
            if self.critic is not None:
                with self.critic.syncing(is_last):
                    error = value_loss(self.critic.parallel, micro)
                    (error * scale).backward()
                found["value_loss"] = error.detach()
            for name, value in found.items():
                sums[name] += value
            total += found["loss"] + found.get("value_loss", 0.0)
            # Apart from the loss: a cap or a clip may hide an infinite one from it.
            logprobs += torch.where(micro.trainable_T, logprobs_T, 0.0).sum()
            behav += torch.where(micro.trainable_T, micro.behav_T, 0.0).sum()
            # No value leaves the device: no micro-batch is waited for.
            known_T = logprobs_T if micro.prox_T is None else micro.prox_T
            self.logprobs_A.index_add_(0, micro.index_T, known_T)
        if minibatch.progress == 0:  # the last moment at which the weights are those of the version
            self.take_scores(sums)
        self.heartbeat("optimizer step")
        norms = [replica.clip() for replica in self.replicas]
        # In the order in which one spoils the next.
        seen = {
            "vLLM's logprobs were": behav,
            "the trainer's logprobs were": logprobs,
            "the loss was": total,
            "the gradient was": torch.stack(norms).sum(),
        }
        bad = [what for what, value in seen.items() if not value.isfinite()]
        # All ranks must step, or none.
        if over_ranks(torch.tensor(len(bad), device=self.device)) > 0:
            what = bad[0] if bad else "the loss or its gradient, on another rank, was"
            self.problem = self.problem or f"{what} not finite"
            self.bad_gradients += self.learner.bad_gradients()
            return None
        for replica in self.replicas:
            replica.optimizer.step()
        return float(norms[0])

    @torch.no_grad()
    def take_scores(self, sums: Sums) -> None:
        """By rank 0. Where a forward is a collective the others run one of the canary beside it."""
        found = [*self.read_scores()]
        num = torch.tensor(len(found), device=self.device)
        if self.learner.is_sharded:
            over_ranks(num)
        for micro in found:
            temperature = self.config.rollout.temperature
            logprobs_T, _ = self.policy(micro.tokens_T, micro.bounds, temperature)
            for name, value in gaps(micro, logprobs_T).items():
                sums[name] += value
        for _ in range(int(num) - len(found)):
            self.canary()

    def read_scores(self) -> Iterator[MicroBatch]:
        while self.pipe is not None and self.pipe.poll():
            score = self.pipe.recv()  # nothing else is sent while a batch is trained
            for cell in score.cells if score.version == self.version else ():
                with suppress(TornEntry):  # its group was dropped, and the cell reused
                    view = self.setup.ring.read(*cell)
                    micro = pack([item_of(view, self.version)], self.device)
                    self.setup.ring.read(*cell)  # still that entry: the copy is whole
                    yield micro

    def summary(self, sums: Sums) -> dict[str, float | None]:
        """Metrics, over all ranks."""
        totals = over_ranks(torch.stack(list(sums.values())))
        of = dict(zip(sums, totals.tolist(), strict=True))
        gap, compared, tokens = (of.pop(name) for name in ("gap", "compared", "tokens"))
        return {f"train/{name}": total / max(1, tokens) for name, total in of.items()} | {
            "train/tokens": tokens,
            "train/logprob_gap": gap / compared if compared else None,
        }

    # -- what readable answers show of their tokens

    def shown_answers(self, prepared: Prepared) -> tuple[AnswerTokens, ...]:
        """The first answer of the first log.samples groups; rank 0 gets what others computed."""
        num_shown = self.config.log.samples
        if num_shown:
            over_ranks(self.logprobs_A)
        if self.setup.rank != 0:
            return ()
        # Without π_prox the weights have moved after the first minibatch: no gap is known.
        has_prox = prepared.minibatches[-1].micro_batches[0].prox_T is not None
        num_known = len(prepared.groups) // (1 if has_prox else len(prepared.minibatches))
        found = []
        for number, (item, *_) in enumerate(prepared.groups[:num_shown]):
            at = np.flatnonzero(item.written)[:MAX_SHOWN_TOKENS]
            gaps = np.abs(self.logprobs_A[item.place].cpu().numpy() - item.view.logprobs)
            is_known = (item.trainable | (item.staleness == 0)) & (number < num_known)
            gaps[~is_known] = np.nan
            shown = [float(f"{g:.3g}") if math.isfinite(g) else None for g in gaps[at].tolist()]
            alone = [[token] for token in item.view.tokens[at].tolist()]
            texts = self.tokenizer.decode_batch(alone, skip_special_tokens=False)
            found.append(AnswerTokens(texts, item.view.versions[at].tolist(), shown))
        return tuple(found)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(Path(self.setup.tokenizer_folder) / "tokenizer.json"))

    # -- what it gives

    def publish(self, version: int) -> float:
        """Rank 0 copies its weights into the store; where they are sharded all ranks gather one
        tensor after another, and never hold a second model. Gives the seconds it took."""
        if self.setup.rank and not self.learner.is_sharded:
            return 0.0
        started = time.perf_counter()
        weights, store = lora.merged(self.policy.model), self.setup.store
        try:
            in_order = self.each_tensor(weights, version)
            if self.setup.rank:
                deque(in_order, maxlen=0)
                self.canary()
                return 0.0
            side = torch.cuda.Stream() if self.device != "cpu" else None  # beside the canary
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with store.publishing(version) as slot:
                with torch.cuda.stream(side):
                    slot.fill(in_order, 1 if self.learner.is_sharded else TENSORS_AT_ONCE)
                slot.canary["tokens"] = self.canary_tokens
                slot.canary["logprobs"] = self.canary()
                if side is not None:
                    side.synchronize()
                if self.config.takes_turns:  # the engine wakes when this version is published
                    torch.cuda.empty_cache()  # does nothing on a CPU
        except KeyError as missing:
            raise MinirlError(f"the model has no tensor {missing}, which its file has") from None
        return time.perf_counter() - started

    def each_tensor(self, weights: lora.Weights, version: int) -> Iterator[Tensor]:
        """In the store's order, each with a heartbeat. A layer's fused experts are fetched once."""
        fused = lru_cache(2)(lambda name: weights[name]())
        for spec in self.setup.store.table:
            self.board.enter(State.PUBLISHING, version=version)
            yield lora.named(weights, spec.name, fused)

    @torch.no_grad()
    def canary(self) -> np.ndarray:
        """Logprobs of the fixed sequence that every engine repeats after a reload (rule 6)."""
        bounds = attention.boundaries([CANARY_TOKENS], self.device)
        tokens_T = torch.tensor(self.canary_tokens, device=self.device)
        logprobs_T, _ = self.policy(tokens_T, bounds)
        return logprobs_T.float().cpu().numpy()

    @cached_property
    def canary_tokens(self) -> list[int]:
        text = self.tokenizer.encode(CANARY_TEXT, add_special_tokens=False).ids
        return canary_tokens(self.policy.model.config.get_text_config().vocab_size, text)

    def save(self, request: Save) -> Saved:
        """A disk that is full or gone does not end the run: what was saved stays."""
        self.board.enter(State.SAVING)
        folder, setup = Path(request.folder), self.setup
        num_done = torch.zeros((), device=self.device)
        shares = folder.with_name(f".{folder.name}.shares")  # what ranks hold is put there first
        weights = self.policy.gather(setup.rank == 0)
        try:
            try:
                shares.mkdir(parents=True, exist_ok=True)
                for replica in self.replicas:
                    replica.save(shares)
                num_done += 1
            finally:  # also a rank that fails: the others wait for it
                over_ranks(num_done)
            if num_done < setup.num_ranks:
                raise OSError("another rank could not write its share")
            if setup.rank == 0:
                with replacing(folder) as aside:
                    aside.mkdir()
                    self.policy.save(aside, weights, Path(setup.tokenizer_folder))
                    shares.rename(aside / "trainer")
                    (aside / checkpoint.STATE).write_text(json.dumps(asdict(request.state)))
                keep, run_dir = self.config.checkpoint.keep, folder.parent.parent
                checkpoint.prune(run_dir, keep, request.accuracies)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Saved(request.folder, f"it could not be written ({one_line(reason)})")
        finally:
            if setup.rank == 0:
                shutil.rmtree(shares, ignore_errors=True)
        return Saved(request.folder)


def run(setup: TrainerSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a trainer rank."""
    devices.use_training_device(setup.placement, None if setup.rank else setup.store.memory)
    if setup.config.devices.share and setup.placement.kind == "cuda":
        devices.leave_room_for_engine(setup.config, setup.store.slot_bytes)
    torch.manual_seed(setup.config.seed)
    join_ranks(setup)
    trainer = Trainer(setup, board, pipe if setup.rank == 0 else None)
    if bad := trainer.learner.bad_weight():
        raise RecipeError("model.path", setup.folder, f"its {bad} is not finite", "take another")
    trainer.publish(setup.version)
    note = "" if trainer.policy.can_share else "this model trains the prompt anew in each answer"
    pipe.send(Started("" if setup.rank else note))
    while True:
        board.enter(State.WAITING_FOR_BATCH)
        if not pipe.poll(BEAT_S):
            continue
        request = pipe.recv()
        if isinstance(request, Train):
            trained = trainer.train(request.batch)
            if setup.config.takes_turns:  # `publish` frees the gradients' memory
                for replica in trainer.replicas:
                    replica.zero_grad()
            trained.values["weights/publish_s"] = trainer.publish(trained.version)
            if setup.rank == 0:
                pipe.send(trained)
        elif isinstance(request, Save):
            saved = trainer.save(request)
            if setup.rank == 0:
                pipe.send(saved)
        elif not isinstance(request, Score):  # one that came too late
            return
