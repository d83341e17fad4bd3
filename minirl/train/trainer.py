"""Stage 7, update: a trainer rank. A plain loop in its own process around one replica.

    consumes      Train (the whole batch's descriptors) and Save from the controller
    waits for     a batch; inside a step, the other ranks
    unblocked by  Train
    gives         version n+1 in the weight store, then Trained

The loss is normalised by the trained tokens of the whole minibatch over all ranks, so neither the
number of ranks nor the micro-batch split changes the update. An update whose loss, gradient or
logprobs are not finite is left out on every rank and counted: the weights stay as they were, and
the controller saves the batch (bad_batch.py). Weights that are not finite themselves end the run
before they are published.
"""

import math
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from minirl import devices
from minirl.errors import MinirlError, RecipeError, one_line
from minirl.messages import AnswerTokens, Save, Saved, Started, Train, Trained, TrainerSetup
from minirl.records import Batch
from minirl.shm.board import BEAT_S, BoardWriter, State
from minirl.shm.weights import CANARY_TOKENS, canary_tokens
from minirl.train import attention, checkpoint, lora
from minirl.train.batch import MicroBatch, staleness_metrics, trained_staleness
from minirl.train.critic import build_critic, value_loss
from minirl.train.objective import Sums, micro_loss
from minirl.train.optimizer import Replica, join_ranks
from minirl.train.policy import build_policy, load_policy
from minirl.train.prepare import Minibatch, Prepared, Preparer

MAX_SHOWN_TOKENS = 512  # of an answer: a few dozen kB per step at most
BAD_WEIGHTS = "continue with --resume; if it comes again, start anew with a lower train.lr"


class Trainer:
    def __init__(self, setup: TrainerSetup, board: BoardWriter):
        self.setup, self.config, self.board = setup, setup.config, board
        self.device = setup.placement.torch_device
        # Of the last batch:
        self.problem = ""  # why its first update was left out
        self.bad_gradients: list[str] = []  # parameters whose gradient was not finite then
        self.logprobs = np.zeros(0, np.float32)  # of its tokens, by the trainer; NaN: not known
        self.prepared: Prepared | None = None
        self.samples: tuple[AnswerTokens, ...] = ()
        self.ages: tuple[int, ...] = ()  # trained tokens by staleness
        train, model = self.config.train, self.config.model
        is_sharded = train.shard_optimizer
        # A checkpoint's weights are merged: LoRA resumes from the first model and the adapter.
        folder = setup.tokenizer_folder if train.lora_rank else setup.folder
        self.policy = build_policy(self.config, folder).to(self.device)
        self.learner = Replica(self.policy, train, train.lr, is_sharded)
        self.critic: Replica | None = None
        if train.estimator == "gae":
            critic = build_critic(self.config, setup.folder).to(self.device)
            self.critic = Replica(critic, train, train.critic_lr, is_sharded)
        self.replicas = [self.learner] + ([self.critic] if self.critic else [])
        if setup.is_resumed:
            checkpoint.load(Path(setup.folder), self.learner, self.critic, setup.rank)
        for replica in self.replicas:
            replica.join(setup.num_ranks, setup.placement.kind)
        self.publisher = devices.Publisher(setup.placement.kind, setup.store.memory)
        reference = None  # the model that the run began with, frozen
        if train.kl_coef:
            source, trusts = setup.tokenizer_folder, model.trust_remote_code
            reference = load_policy(source, model.dtype, trust_remote_code=trusts)
            reference = reference.requires_grad_(False).to(self.device)
        critic_module = self.critic.module if self.critic else None
        self.preparer = Preparer(setup, self.policy, reference, critic_module, self.heartbeat)

    def heartbeat(self, phase: str) -> None:
        self.board.enter(State.TRAINING, phase=phase)

    # -- a step

    def train(self, batch: Batch) -> dict[str, float | None]:
        started = time.perf_counter()
        self.board.enter(State.TRAINING, phase=f"pack step {batch.step}", version=batch.version)
        lr, *_ = [replica.begin_step(batch.step - 1) for replica in self.replicas]
        prepared = self.preparer.prepare(batch)
        self.problem, self.bad_gradients, self.prepared = "", [], prepared
        num_tokens = sum(item.length for item in prepared.items)
        self._logprobs_A = torch.zeros(num_tokens, device=self.device)
        sums: Sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.device))
        norms = [self.update(minibatch, sums) for minibatch in prepared.minibatches]
        if bad := self.bad_weight():
            line = f"step {batch.step}: {bad} is not finite after the update; {BAD_WEIGHTS}"
            raise MinirlError(line)
        taken = [norm for norm in norms if norm is not None]
        values = self.summary(sums)
        seconds = time.perf_counter() - started
        self.samples = self.shown_answers(batch, prepared)
        self.ages = tuple(np.bincount(trained_staleness(prepared.items)).tolist())
        return {
            **values,
            **prepared.values,
            **staleness_metrics(prepared.items),
            "train/grad_norm": float(np.mean(taken)) if taken else None,
            "train/skipped_updates": len(norms) - len(taken),
            "train/lr": lr,
            "train/tokens_per_s": num_tokens / seconds,
        }

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
                found = micro_loss(self.learner.parallel, micro, self.config, minibatch.progress)
                (found.loss * scale).backward()
            if self.critic is not None:
                with self.critic.syncing(is_last):
                    error = value_loss(self.critic.parallel, micro)
                    (error * scale).backward()
                found.sums["value_loss"] = error.detach()
            for name, value in found.sums.items():
                sums[name] += value
            total += found.sums["loss"] + found.sums.get("value_loss", 0.0)
            # Apart from the loss: a cap or a clip may hide an infinite one from it.
            logprobs += torch.where(micro.trainable_T, found.logprobs_T, 0.0).sum()
            behav += torch.where(micro.trainable_T, micro.behav_T, 0.0).sum()
            self.keep_logprobs(micro, found.logprobs_T)
        self.heartbeat("optimizer step")
        norms = [replica.clip() for replica in self.replicas]
        # In the order in which one spoils the next.
        seen = {
            "vLLM's logprobs were": behav,
            "the trainer's logprobs were": logprobs,
            "the loss was": total,
            "the gradient was": torch.stack(norms).sum(),
        }
        if self.is_finite(*seen.values()):
            for replica in self.replicas:
                replica.optimizer.step()
            return float(norms[0])
        bad = [what for what, value in seen.items() if not value.isfinite()]
        what = bad[0] if bad else "the loss or its gradient, on another rank, was"
        self.problem = self.problem or f"{what} not finite"
        self.bad_gradients += self.learner.bad_gradients()
        return None

    def is_finite(self, *values: Tensor) -> bool:
        """On every rank: they must all step, or none."""
        finite = torch.stack(values).isfinite().all().float()
        if self.setup.num_ranks > 1:
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def bad_weight(self) -> str:
        """The first parameter that is not finite, or ""."""
        return next((bad for replica in self.replicas if (bad := replica.bad_weight())), "")

    def summary(self, sums: Sums) -> dict[str, float | None]:
        """Metrics, over all ranks."""
        totals = torch.stack(list(sums.values()))
        if self.setup.num_ranks > 1:
            dist.all_reduce(totals)
        of = dict(zip(sums, totals.tolist(), strict=True))
        means = ["loss", "entropy"] + (["value_loss"] if self.critic else [])
        if self.preparer.reference is not None and self.config.train.kl_in == "loss":
            means.append("kl")
        named = {f"train/{name}": name for name in means} | {
            "train/clip_frac": "clipped",
            "train/behav_ratio_mean": "behav_ratio",
            "train/capped_frac": "capped",
        }
        equal, spliced, tokens = of["compared"], of["spliced_compared"], of["tokens"]
        return {metric: of[name] / max(1, tokens) for metric, name in named.items()} | {
            "train/tokens": tokens,
            "train/logprob_gap": of["gap"] / equal if equal else None,
            "train/spliced_gap": of["spliced_gap"] / spliced if spliced else None,
        }

    # -- what readable answers show of their tokens

    def keep_logprobs(self, micro: MicroBatch, logprobs_T: Tensor) -> None:
        """No value leaves the device here, so that no micro-batch is waited for."""
        if not micro.is_dummy:
            logprobs_T = logprobs_T if micro.prox_T is None else micro.prox_T
            is_known_T = micro.trainable_T | micro.at_equal_version_T
            self._logprobs_A[micro.index_T] = torch.where(is_known_T, logprobs_T.float(), torch.nan)

    def shown_answers(self, batch: Batch, prepared: Prepared) -> tuple[AnswerTokens, ...]:
        """The first answer of the first log.samples groups; rank 0 gets what others computed."""
        num_shown = self.config.log.samples
        if self.setup.num_ranks > 1 and num_shown:
            dist.all_reduce(self._logprobs_A)
        if self.setup.rank != 0:
            return ()
        self.logprobs = self._logprobs_A.cpu().numpy()
        # Without π_prox the weights have moved after the first minibatch: no gap is known.
        num_first = len(batch.groups) // self.config.train.num_minibatches
        has_prox = prepared.minibatches[-1].micro_batches[0].prox_T is not None
        found, place = [], 0
        for number, group in enumerate(batch.groups[:num_shown]):
            item = prepared.items[place]
            place += len(group.trajectories)
            at = np.flatnonzero(item.written)[:MAX_SHOWN_TOKENS]
            gaps = np.abs(self.logprobs[item.place][at] - item.view.logprobs[at]).tolist()
            is_known = number < num_first or has_prox
            shown = [float(f"{g:.3g}") if is_known and math.isfinite(g) else None for g in gaps]
            texts = self.texts_of(item.view.tokens[at].tolist())
            found.append(AnswerTokens(texts, item.view.versions[at].tolist(), shown))
        return tuple(found)

    def texts_of(self, ids: list[int]) -> list[str]:
        """Each token as text, where the model's folder says how."""
        path = Path(self.setup.tokenizer_folder) / "tokenizer.json"
        if not path.is_file():
            return [f"<{token}>" for token in ids]
        if not hasattr(self, "_tokenizer"):
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]

    # -- what it gives

    def publish(self, version: int) -> float:
        """Rank 0 copies its weights into the store. Gives the seconds it took."""
        self.board.enter(State.PUBLISHING, version=version)
        started = time.perf_counter()
        weights, store = lora.merged(self.policy.model), self.setup.store
        try:
            in_order = (weights[spec.name]() for spec in store.table)
            # On CUDA the copies run on a stream of their own, beside the canary's forward.
            with store.publishing(version) as slot:
                self.publisher.copy(slot.tensors, in_order)
                slot.canary[:] = self.canary()
                self.publisher.wait()
        except KeyError as missing:
            raise MinirlError(f"the model has no tensor {missing}, which its file has") from None
        return time.perf_counter() - started

    @torch.no_grad()
    def canary(self) -> np.ndarray:
        """Logprobs of the fixed sequence that every engine repeats after a reload (rule 6)."""
        tokens = canary_tokens(self.policy.model.config.get_text_config().vocab_size)
        bounds = attention.boundaries([CANARY_TOKENS], self.device)
        logprobs_T, _ = self.policy(torch.tensor(tokens, device=self.device), *bounds)
        return logprobs_T.float().cpu().numpy()

    def save(self, request: Save) -> None:
        self.board.enter(State.SAVING)
        for replica in self.replicas:
            replica.gather_state()
        generators = self.generators()
        if self.setup.rank != 0:
            return
        states = (replica.bad_state() for replica in self.replicas)
        if bad := self.bad_weight() or next(filter(None, states), ""):
            raise MinirlError(f"{bad} is not finite, and was not saved; {BAD_WEIGHTS}")
        source, folder = Path(self.setup.tokenizer_folder), Path(request.folder)
        checkpoint.save(folder, self.learner, self.critic, source, request.state, generators)
        checkpoint.prune(folder.parent.parent, self.config.checkpoint.keep, request.accuracies)

    def generators(self) -> dict[str, Tensor]:
        """The state of every rank's random generator."""
        mine = torch.get_rng_state().to(self.device)
        parts = [mine]
        if self.setup.num_ranks > 1:
            parts = [torch.empty_like(mine) for _ in range(self.setup.num_ranks)]
            dist.all_gather(parts, mine)
        return {f"rank-{rank}": part for rank, part in enumerate(parts)}

    def try_to_save(self, request: Save) -> Saved:
        """A disk that is full or gone does not end the run: what was saved before stays."""
        try:
            self.save(request)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Saved(request.folder, f"it could not be written ({one_line(reason)})")
        return Saved(request.folder)


def run(setup: TrainerSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a trainer rank."""
    devices.use_training_device(setup.placement)
    torch.manual_seed(setup.config.seed)
    join_ranks(setup)
    trainer = Trainer(setup, board)
    if bad := trainer.bad_weight():
        raise RecipeError("model.path", setup.folder, f"its {bad} is not finite", "take another")
    if setup.rank == 0:
        trainer.publish(setup.version)
    pipe.send(Started())
    while True:
        board.enter(State.WAITING_FOR_BATCH)
        while not pipe.poll(BEAT_S):
            board.enter(State.WAITING_FOR_BATCH)
        request = pipe.recv()
        if isinstance(request, Train):
            values = trainer.train(request.batch)
            if setup.rank == 0:
                version = request.batch.version + 1
                values["weights/publish_s"] = trainer.publish(version)
                found = (trainer.ages, trainer.problem, trainer.samples)
                pipe.send(Trained(version, values, *found))
        elif isinstance(request, Save):
            saved = trainer.try_to_save(request)
            if setup.rank == 0:
                pipe.send(saved)
        else:
            return
