"""Stage 7, update: objectives and the loss. Pure functions over token tensors.

An objective takes `Tokens` and the recipe's [train], and gives what to maximise at each token; a
user's has the same form (`train.objective = "my_loss.py:my_loss"`). `loss_of` adds mask, KL and
weights, and gives SUMS over tokens, which the trainer divides by the trainable tokens of the global
batch: neither the split into micro-batches nor the number of ranks changes the update. Leaves out
where advantages and π_prox come from. docs/algorithms.md has every formula and its paper.

Axes: T tokens of all sequences of a micro-batch, packed; S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minirl.config import Config, TrainConfig
from minirl.errors import RecipeError
from minirl.tasks.registry import load_function
from minirl.train.batch import MicroBatch

Sums = dict[str, Tensor]  # 0-dim tensors on the device: no step waits for them


@dataclass(frozen=True)
class Tokens:
    """What an objective sees. Only `logprobs_T` carries a gradient."""

    logprobs_T: Tensor  # log π_θ, being trained
    prox_T: Tensor  # log π_prox, the policy at the start of the step
    behav_T: Tensor  # log π_behav, the distribution that was sampled from
    advantages_T: Tensor
    mask_T: Tensor  # bool: tokens that train
    sequence_T: Tensor  # the number of each token's sequence
    num_sequences: int
    weights_T: Tensor | None = None  # in the loss; None: all 1
    ref_T: Tensor | None = None  # log π_ref, where the loss has a KL term

    def sequence_mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """Of each token's sequence over its masked-in tokens, at every token; 0 where none is."""
        zeros_S = values_T.new_zeros(self.num_sequences)
        sums_S = zeros_S.index_add(0, self.sequence_T, torch.where(mask_T, values_T, 0.0))
        counts_S = zeros_S.index_add(0, self.sequence_T, mask_T.to(values_T.dtype))
        return (sums_S / counts_S.clamp(min=1)).index_select(0, self.sequence_T)


class Behaviour(NamedTuple):
    """The correction for tokens that another policy wrote."""

    w_T: Tensor  # as it goes into the loss: 0 where it is above the cap
    raw_T: Tensor  # for the metric
    kept_T: Tensor  # bool: tokens that are in the loss


class Terms(NamedTuple):
    """What an objective gives, at each token."""

    objective_T: Tensor  # to be maximised, with the graph
    clipped_T: Tensor | None = None  # bool: where the clip cut the gradient, or the weight
    behav: Behaviour | None = None  # None: no correction, every trained token is kept


Objective = Callable[[Tokens, TrainConfig], Terms]


def decoupled(tokens: Tokens, train: TrainConfig) -> Terms:
    """Decoupled PPO, the paper's eq. 5: w · min(u·A, clip(u)·A), where u = π_θ/π_prox, and
    w = π_prox/π_behav is a constant in the gradient."""
    behav = behaviour_weights(tokens, train)
    u_T = ratio(tokens.logprobs_T, tokens.prox_T.detach(), behav.kept_T)
    surrogate_T, clipped_T = clipped_surrogate(u_T, tokens.advantages_T, train)
    return Terms(behav.w_T * surrogate_T, clipped_T, behav)


def naive(tokens: Tokens, train: TrainConfig) -> Terms:
    """PPO whose ratio is to the policy that sampled: min(u·A, clip(u)·A), u = π_θ/π_behav."""
    u_T = ratio(tokens.logprobs_T, tokens.behav_T, tokens.mask_T)
    surrogate_T, clipped_T = clipped_surrogate(u_T, tokens.advantages_T, train)
    return Terms(surrogate_T, clipped_T, Behaviour(u_T.detach(), u_T.detach(), tokens.mask_T))


def gspo(tokens: Tokens, train: TrainConfig) -> Terms:
    """GSPO: the ratio of a sequence, s = exp(mean over its tokens of log π_θ/π_prox), is clipped
    as a whole: w · min(s·A, clip(s)·A) at each of its tokens. In its token form, sg(s) ·
    π_θ/sg(π_θ), which has the same gradient, and lets advantages differ by token."""
    behav = behaviour_weights(tokens, train, by_sequence=True)
    log_u_T = torch.where(behav.kept_T, (tokens.logprobs_T - tokens.prox_T).detach(), 0.0)
    own_T = ratio(tokens.logprobs_T, tokens.logprobs_T.detach(), behav.kept_T)  # 1, with gradient
    s_T = tokens.sequence_mean(log_u_T, behav.kept_T).exp() * own_T
    surrogate_T, clipped_T = clipped_surrogate(s_T, tokens.advantages_T, train)
    return Terms(behav.w_T * surrogate_T, clipped_T, behav)


def cispo(tokens: Tokens, train: TrainConfig) -> Terms:
    """CISPO: REINFORCE with a clipped weight, w · sg(clip(u)) · A · log π_θ. The clip bounds the
    weight of a token and never takes its gradient away."""
    behav = behaviour_weights(tokens, train)
    u_T = ratio(tokens.logprobs_T.detach(), tokens.prox_T.detach(), behav.kept_T)
    bound_T = u_T.clamp(1 - train.clip_low, 1 + train.clip_high)
    logprobs_T = torch.where(behav.kept_T, tokens.logprobs_T, 0.0)
    objective_T = behav.w_T * bound_T * tokens.advantages_T * logprobs_T
    return Terms(objective_T, bound_T != u_T, behav)


OBJECTIVES: dict[str, Objective] = {f.__name__: f for f in (decoupled, naive, gspo, cispo)}


def ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """exp of the difference; exactly 1, without gradient, where masked out."""
    return torch.where(mask_T, numerator_T - denominator_T, 0.0).exp()


def clipped_surrogate(
    u_T: Tensor, advantages_T: Tensor, train: TrainConfig
) -> tuple[Tensor, Tensor]:
    """PPO's min(u·A, clip(u)·A), and where the clipped side is the smaller."""
    free_T = u_T * advantages_T
    bound_T = u_T.clamp(1 - train.clip_low, 1 + train.clip_high) * advantages_T
    return torch.minimum(free_T, bound_T), bound_T < free_T


def behaviour_weights(tokens: Tokens, train: TrainConfig, by_sequence: bool = False) -> Behaviour:
    """w = π_prox/π_behav, of a token or as the geometric mean over its sequence's tokens. Tokens
    whose w is above the cap, or not a number, are left out."""
    mask_T = tokens.mask_T
    log_w_T = torch.where(mask_T, (tokens.prox_T - tokens.behav_T).detach(), 0.0)
    if by_sequence:
        log_w_T = torch.where(mask_T, tokens.sequence_mean(log_w_T, mask_T), 0.0)
    raw_T = log_w_T.exp()
    kept_T = mask_T & (raw_T <= train.behav_cap)
    # where, not a product: a w that overflowed must not turn a masked token into nan.
    return Behaviour(torch.where(kept_T, raw_T, 0.0), raw_T, kept_T)


def loglinear_prox(
    logprobs_T: Tensor, behav_T: Tensor, staleness_T: Tensor, progress: float
) -> Tensor:
    """log π_prox ≈ log π_behav + s/(s + p) · (log π_θ - log π_behav), without a forward: a token of
    staleness s was written s versions before the step's start, and π_θ is p = (minibatches
    done)/(minibatches) of a version past it. A-3PO has p = 1 throughout."""
    if progress == 0:
        return logprobs_T.detach()
    share_T = staleness_T / (staleness_T + progress)
    return behav_T + share_T * (logprobs_T.detach() - behav_T)


def loss_of(name: str, tokens: Tokens, train: TrainConfig) -> tuple[Tensor, Sums]:
    """Minus the objective of this name, and metrics: sums over tokens, all of them."""
    terms = (OBJECTIVES.get(name) or load_function("train.objective", name))(tokens, train)
    mask_T, objective_T = tokens.mask_T, terms.objective_T
    if objective_T.shape != mask_T.shape:
        rule = f"its objective_T has shape {[*objective_T.shape]}, not {[*mask_T.shape]}"
        raise RecipeError("train.objective", name, rule, "give one value per token, and no sum")
    ones_T = torch.ones_like(objective_T)
    _, ratio_T, kept_T = terms.behav or Behaviour(ones_T, ones_T, mask_T)
    clipped_T = torch.zeros_like(mask_T) if terms.clipped_T is None else terms.clipped_T
    objective_T = torch.where(kept_T, objective_T, 0.0)
    kl: Sums = {}
    if tokens.ref_T is not None:
        # where on both sides: exp of garbage in a masked token must not reach the gradient.
        ours_T, ref_T = (torch.where(mask_T, x, 0.0) for x in (tokens.logprobs_T, tokens.ref_T))
        d_T = ref_T - ours_T
        kl_T = d_T.exp() - d_T - 1  # k3, an estimate of KL(π‖π_ref) at one sampled token
        objective_T, kl["kl"] = objective_T - train.kl_coef * kl_T, kl_T.detach().sum()
    if tokens.weights_T is not None:
        objective_T = objective_T * tokens.weights_T
    return -objective_T.sum(), {
        "tokens": mask_T.sum(),
        "clip_frac": (clipped_T & kept_T).sum(),
        "capped_frac": (mask_T & ~kept_T).sum(),
        "behav_ratio_mean": torch.where(mask_T, ratio_T, 0.0).sum(),  # capped tokens included
        **kl,
    }


def value_loss(critic: nn.Module, micro: MicroBatch) -> Tensor:
    """Half the squared error, summed over the tokens that train."""
    assert micro.returns_T is not None
    errors_T = critic(micro.tokens_T, micro.bounds, shared=micro.shared) - micro.returns_T
    return torch.where(micro.trainable_T, errors_T, 0.0).square().sum() / 2


def micro_loss(
    policy: nn.Module, micro: MicroBatch, config: Config, progress: float = 0.0
) -> tuple[Tensor, Tensor, Sums]:
    """The loss, summed over tokens, log π_θ, detached, and sums of metrics. `progress` is the share
    of the step's minibatches that were trained before this one."""
    how = config.rollout.temperature, micro.needed_T, micro.shared
    logprobs_T, entropy_T = policy(micro.tokens_T, micro.bounds, *how)
    prox_T = logprobs_T.detach() if micro.prox_T is None else micro.prox_T
    if micro.prox_T is None and config.train.proximal == "loglinear":
        prox_T = loglinear_prox(logprobs_T, micro.behav_T, micro.staleness_T, progress)
    assert micro.advantages_T is not None
    num_sequences = len(micro.bounds.cu_seqlens_S1) - 1
    given = micro.behav_T, micro.advantages_T, micro.trainable_T, micro.sequence_T, num_sequences
    tokens = Tokens(logprobs_T, prox_T, *given, micro.weights_T, micro.ref_T)
    loss, sums = loss_of(config.train.objective, tokens, config.train)
    is_comparable = progress == 0 or micro.prox_T is not None  # else the weights have moved on
    sums |= gaps(micro, prox_T, is_comparable)
    sums |= {"loss": loss.detach(), "entropy": entropy_T[micro.trainable_T].sum()}
    return loss, logprobs_T.detach(), sums


def gaps(micro: MicroBatch, logprobs_T: Tensor, is_comparable: bool = True) -> Sums:
    """|the engine's logprob - the trainer's|, under the version that the step starts from."""
    at_T = (micro.staleness_T == 0) & is_comparable
    gap_T = torch.where(at_T, (logprobs_T - micro.behav_T).abs(), 0.0)
    return {"gap": gap_T.sum(), "compared": at_T.sum()}
