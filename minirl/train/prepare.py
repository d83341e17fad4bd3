"""Stages 5 and 6 of a step: all that must be known of a batch before its first update.

Takes a batch, gives each minibatch as this rank's micro-batches, whole: packed, with π_prox, the
reference's logprobs, advantages, returns and loss weights, each only where the recipe needs it.
Forwards without gradients run on the very micro-batches that are trained after, so that at the
first minibatch π_θ equals π_prox to the bit. What a rank computes of its own tokens is summed into
one column for the whole batch: then every rank knows all of it, and computes the same advantages.

Axes: T tokens of a micro-batch, A tokens of the whole batch, N written tokens of a trajectory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from minirl.messages import TrainerSetup
from minirl.records import Batch
from minirl.train.advantage import EPSILON, estimate, gae
from minirl.train.batch import Item, MicroBatch, items_of, num_trainable, own_micro_batches
from minirl.train.optimizer import over_ranks
from minirl.train.policy import Policy

Column = NDArray[np.float32]


class Minibatch(NamedTuple):
    """This rank's part of one optimizer step."""

    micro_batches: list[MicroBatch]
    num_trainable: int  # over all ranks
    progress: float  # the share of the step's minibatches that come before it


class Prepared(NamedTuple):
    minibatches: list[Minibatch]
    groups: list[list[Item]]  # of the whole batch
    advantages: Column  # of all its tokens

    @property
    def items(self) -> list[Item]:
        return [item for group in self.groups for item in group]


@dataclass
class Preparer:
    """What does not change from step to step. `policy` and `critic` are those being trained."""

    setup: TrainerSetup
    policy: Policy
    reference: nn.Module | None
    critic: nn.Module | None
    heartbeat: Callable[[str], None]  # with what is being done

    def prepare(self, batch: Batch) -> Prepared:
        train, device = self.setup.config.train, self.setup.placement.torch_device
        groups = items_of(batch, self.setup.ring, self.setup.config.buffer.max_staleness)
        items = [item for group in groups for item in group]
        size = len(groups) // train.num_minibatches  # whole groups, equally many in each
        starts = range(0, size * train.num_minibatches, size)
        parts = [[item for group in groups[i : i + size] for item in group] for i in starts]
        mine = [[self.with_forwards(m) for m in self.micro_batches(part)] for part in parts]
        flat = [micro for micro_batches in mine for micro in micro_batches]
        if self.critic is None:
            rewards = [[item.reward for item in group] for group in groups]
            columns = {"advantages_T": over_tokens(estimate(train.estimator, rewards), groups)}
        else:
            columns = self.by_token(items, self.values(self.critic, flat, items))
        if train.loss_norm != "token":  # else every token counts the same
            columns["weights_T"] = self.weights(parts)
        known: dict[str, Any] = {n: torch.from_numpy(c).to(device) for n, c in columns.items()}
        finished = []
        for i, (part, share) in enumerate(zip(parts, mine, strict=True)):
            own = [m._replace(**{n: c[m.index_T] for n, c in known.items()}) for m in share]
            finished.append(Minibatch(own, max(1, num_trainable(part)), i / len(parts)))
        return Prepared(finished, groups, columns["advantages_T"])

    def micro_batches(self, items: list[Item]) -> list[MicroBatch]:
        return own_micro_batches(items, self.setup, self.policy.can_share)

    @torch.no_grad()
    def with_forwards(self, micro: MicroBatch) -> MicroBatch:
        """π_prox and the reference. One minibatch needs no forward for π_prox: it is the detached
        π_θ of the step's own."""
        train, temperature = self.setup.config.train, self.setup.config.rollout.temperature
        found: dict[str, Any] = {}
        if train.num_minibatches > 1 and train.objective != "naive" and train.proximal == "forward":
            self.heartbeat("prox forward")
            how = temperature, micro.needed_T, micro.shared
            found["prox_T"], _ = self.policy(micro.tokens_T, micro.bounds, *how)
        if self.reference is not None:
            self.heartbeat("reference forward")
            how = temperature, micro.trainable_T, micro.shared
            found["ref_T"], _ = self.reference(micro.tokens_T, micro.bounds, *how)
        return micro._replace(**found)

    # -- columns of the whole batch

    @torch.no_grad()
    def values(self, critic: nn.Module, flat: list[MicroBatch], items: list[Item]) -> Column:
        """Each rank computes those of its own tokens, and every rank gets all."""
        num_tokens = sum(item.length for item in items)
        column_A = torch.zeros(num_tokens, device=self.setup.placement.torch_device)
        for micro in flat:
            self.heartbeat("critic forward")
            values_T = critic(micro.tokens_T, micro.bounds, shared=micro.shared).float()
            column_A.index_add_(0, micro.index_T, values_T)
        return over_ranks(column_A).cpu().numpy()

    def by_token(self, items: list[Item], values_A: Column) -> dict[str, Column]:
        """GAE over the written tokens, advantages normalised over the batch's trained tokens."""
        advantages_A, returns_A = np.zeros_like(values_A), np.zeros_like(values_A)
        for item in items:
            at = np.flatnonzero(item.written) + item.start
            if len(at):
                lam = self.setup.config.train.gae_lambda
                advantages_A[at], returns_A[at] = gae(item.reward, values_A[at], lam)
        trainable_A = np.concatenate([item.trainable for item in items])
        if trainable_A.any():
            trained = advantages_A[trainable_A]
            advantages_A = (advantages_A - trained.mean()) / (trained.std() + EPSILON)
        return {"advantages_T": advantages_A, "returns_T": returns_A}

    def weights(self, parts: list[list[Item]]) -> Column:
        config = self.setup.config
        kind, longest = config.train.loss_norm, config.rollout.max_new_tokens
        counts = [[num_trainable([item]) for item in part] for part in parts]
        return over_tokens([loss_weights(part, kind, longest) for part in counts], parts)


def loss_weights(counts: Sequence[int], kind: str, max_new_tokens: int) -> list[float]:
    """What each trained token of a trajectory counts, where a mean over tokens has 1.

    `counts` are the trained tokens of each trajectory of a minibatch. The loss is then divided by
    their sum, so "sequence" gives 1/(count · trajectories that train) and "constant"
    1/(trajectories · max_new_tokens) to a token.
    """
    total = sum(counts)
    if kind == "constant":
        return [total / (len(counts) * max_new_tokens)] * len(counts)
    num_training = sum(count > 0 for count in counts)
    return [total / (count * num_training) if count else 0.0 for count in counts]


def over_tokens(values: list[list[float]], parts: list[list[Item]]) -> Column:
    """From one value per trajectory to one per token."""
    lengths = [item.length for part in parts for item in part]
    return np.repeat(np.concatenate(values).astype(np.float32), lengths)
