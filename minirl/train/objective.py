"""Stage 7, update: the losses. Pure functions: token tensors in, loss and metric sums out.

Each gives the SUM over tokens of the negative objective and sums of metrics. The caller divides
both by the number of trainable tokens of the global batch, so that neither the split into
micro-batches nor the number of ranks changes the update.

Leaves out where the advantages and π_prox come from. With one minibatch to a batch π_prox is
`logprobs_T.detach()`: then u = 1 and the gradient is that of w·A·log π_θ.

Axes: T tokens of all sequences of a micro-batch, packed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """Of the clip and of w: see the recipe's [train]."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    behav_cap: float = 5.0


@dataclass(frozen=True)
class Tokens:
    """What an objective sees. Only `logprobs_T` carries a gradient."""

    logprobs_T: Tensor  # log π_θ, being trained
    prox_T: Tensor  # log π_prox, the policy at the start of the step
    behav_T: Tensor  # log π_behav, the distribution that was sampled from
    advantages_T: Tensor
    mask_T: Tensor  # bool: tokens that train


@dataclass(frozen=True)
class Metrics:
    """Sums over trainable tokens; 0-dim tensors, so that no step waits for the device."""

    num_tokens: Tensor
    num_clipped: Tensor  # train/clip_frac: where the clip cut the gradient
    num_capped: Tensor  # masked out of the loss, w above the cap
    behav_ratio: (
        Tensor  # train/behav_ratio_mean: w (decoupled) or u (naive), capped tokens included
    )
    behav_gap: Tensor  # |log π_θ - log π_behav|


@dataclass(frozen=True)
class Loss:
    sum: Tensor  # over tokens, with the graph
    metrics: Metrics


Objective = Callable[[Tokens, Settings], Loss]


def decoupled(tokens: Tokens, settings: Settings) -> Loss:
    """Decoupled PPO, the paper's eq. 5: w · min(u·A, clip(u)·A).

    u = π_θ/π_prox and w = π_prox/π_behav. w is a constant in the gradient, and tokens with w
    above the cap are left out of the loss.
    """
    w_T = ratio(tokens.prox_T.detach(), tokens.behav_T, tokens.mask_T).detach()
    kept_T = tokens.mask_T & (w_T <= settings.behav_cap)
    u_T = ratio(tokens.logprobs_T, tokens.prox_T.detach(), kept_T)
    surrogate_T, clipped_T = clipped_surrogate(u_T, tokens.advantages_T, settings)
    # where, not a product: a w that overflowed must not turn a masked token into nan.
    objective_T = torch.where(kept_T, w_T, 0.0) * surrogate_T
    return _loss(tokens, objective_T, kept_T, clipped_T, w_T)


def naive(tokens: Tokens, settings: Settings) -> Loss:
    """PPO whose ratio is to the policy that sampled: min(u·A, clip(u)·A), u = π_θ/π_behav."""
    u_T = ratio(tokens.logprobs_T, tokens.behav_T, tokens.mask_T)
    surrogate_T, clipped_T = clipped_surrogate(u_T, tokens.advantages_T, settings)
    return _loss(tokens, surrogate_T, tokens.mask_T, clipped_T, u_T.detach())


OBJECTIVES: dict[str, Objective] = {"decoupled": decoupled, "naive": naive}


def ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """exp of the difference; exactly 1, without gradient, where masked out."""
    return torch.where(mask_T, numerator_T - denominator_T, 0.0).exp()


def clipped_surrogate(
    u_T: Tensor, advantages_T: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """PPO's min(u·A, clip(u)·A), and where the clipped side is the smaller."""
    free_T = u_T * advantages_T
    bound_T = u_T.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_T
    return torch.minimum(free_T, bound_T), bound_T < free_T


def _loss(
    tokens: Tokens, objective_T: Tensor, kept_T: Tensor, clipped_T: Tensor, behav_ratio_T: Tensor
) -> Loss:
    mask_T = tokens.mask_T
    gap_T = (tokens.logprobs_T.detach() - tokens.behav_T).abs()
    metrics = Metrics(
        num_tokens=mask_T.sum(),
        num_clipped=(clipped_T & kept_T).sum(),
        num_capped=(mask_T & ~kept_T).sum(),
        behav_ratio=torch.where(mask_T, behav_ratio_T, 0.0).sum(),
        behav_gap=torch.where(mask_T, gap_T, 0.0).sum(),
    )
    return Loss(-torch.where(kept_T, objective_T, 0.0).sum(), metrics)
