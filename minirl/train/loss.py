"""Stage 7, update: the loss of one packed micro-batch under a recipe.

One function for the trainer, for the replay of a batch and for the benchmark, so that they cannot
differ. Axes as in objective.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minirl.config import Config
from minirl.train.batch import MicroBatch
from minirl.train.objective import (
    OBJECTIVES,
    Loss,
    Sequences,
    Settings,
    Tokens,
    loglinear_prox,
)


@dataclass(frozen=True)
class MicroLoss:
    loss: Loss
    logprobs_T: Tensor  # log π_θ, with the graph
    prox_T: Tensor
    entropy_T: Tensor


def settings_of(config: Config) -> Settings:
    train = config.train
    return Settings(
        train.clip_low, train.clip_high, train.behav_cap, train.behav_above, train.kl_coef
    )


def forward(
    policy: nn.Module, micro: MicroBatch, config: Config, needed_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T) of the tokens that train, or that `needed_T` marks."""
    return policy(
        micro.tokens_T,
        micro.positions_T,
        micro.cu_seqlens_S1,
        micro.max_seqlen,
        config.rollout.temperature,
        micro.trainable_T | micro.at_equal_version_T if needed_T is None else needed_T,
    )


def micro_loss(
    policy: nn.Module, micro: MicroBatch, config: Config, progress: float = 0.0
) -> MicroLoss:
    """`progress` is the share of the step's minibatches that were trained before this one."""
    logprobs_T, entropy_T = forward(policy, micro, config)
    if micro.prox_T is not None:
        prox_T = micro.prox_T
    elif config.train.proximal == "loglinear":
        prox_T = loglinear_prox(logprobs_T, micro.behav_T, micro.staleness_T, progress)
    else:
        prox_T = logprobs_T.detach()
    assert micro.advantages_T is not None
    tokens = Tokens(
        logprobs_T,
        prox_T,
        micro.behav_T,
        micro.advantages_T,
        micro.trainable_T,
        Sequences(micro.sequence_T, micro.num_sequences),
        micro.weights_T,
        micro.ref_T if config.train.kl_in == "loss" else None,
    )
    loss = OBJECTIVES[config.train.objective](tokens, settings_of(config))
    return MicroLoss(loss, logprobs_T, prox_T, entropy_T)


@torch.no_grad()
def logprobs_of(policy: nn.Module, micro: MicroBatch, config: Config) -> Tensor:
    return forward(policy, micro, config)[0]
