"""Stage 7, update: the losses. Pure functions: token tensors in, loss and metric sums out.

Each gives the SUM over tokens of the negative objective and sums of metrics. The caller divides
both by the number of trainable tokens of the global batch, so that neither the split into
micro-batches nor the number of ranks changes the update. Other normalisations are weights of the
tokens: see `batch.loss_weights`. docs/algorithms.md has every formula and its paper.

Leaves out where the advantages and π_prox come from. With one minibatch to a batch π_prox is
`logprobs_T.detach()`: then u = 1 and the gradient is that of w·A·log π_θ.

Axes: T tokens of all sequences of a micro-batch, packed; S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minirl.config import Config
from minirl.train.batch import MicroBatch


@dataclass(frozen=True)
class Settings:
    """Of the clip, of w and of the KL: see the recipe's [train]."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    behav_cap: float = 5.0
    behav_above: str = "mask"
    kl_coef: float = 0.0


@dataclass(frozen=True)
class Sequences:
    """Which sequence each token belongs to."""

    index_T: Tensor
    count: int

    def mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """Of each token's sequence over its masked-in tokens, at every token; 0 where none is."""
        sums_S = values_T.new_zeros(self.count)
        sums_S = sums_S.index_add(0, self.index_T, torch.where(mask_T, values_T, 0.0))
        counts_S = values_T.new_zeros(self.count)
        counts_S = counts_S.index_add(0, self.index_T, mask_T.to(values_T.dtype))
        return (sums_S / counts_S.clamp(min=1)).index_select(0, self.index_T)


@dataclass(frozen=True)
class Tokens:
    """What an objective sees. Only `logprobs_T` carries a gradient."""

    logprobs_T: Tensor  # log π_θ, being trained
    prox_T: Tensor  # log π_prox, the policy at the start of the step
    behav_T: Tensor  # log π_behav, the distribution that was sampled from
    advantages_T: Tensor
    mask_T: Tensor  # bool: tokens that train
    sequences: Sequences | None = None  # None: one sequence
    weights_T: Tensor | None = None  # in the loss; None: all 1
    ref_T: Tensor | None = None  # log π_ref, where the loss has a KL term


@dataclass(frozen=True)
class Metrics:
    """Sums over trainable tokens; 0-dim tensors, so that no step waits for the device."""

    num_tokens: Tensor
    num_clipped: Tensor  # train/clip_frac: where the clip cut the gradient, or the weight
    num_capped: Tensor  # w above the cap: masked out of the loss, or clamped
    behav_ratio: Tensor  # w (decoupled) or u (naive), capped tokens included
    kl: Tensor  # to the reference, where the loss has a KL term


@dataclass(frozen=True)
class Loss:
    sum: Tensor  # over tokens, with the graph
    metrics: Metrics


Objective = Callable[[Tokens, Settings], Loss]


def decoupled(tokens: Tokens, settings: Settings) -> Loss:
    """Decoupled PPO, the paper's eq. 5: w · min(u·A, clip(u)·A), where u = π_θ/π_prox, and
    w = π_prox/π_behav is a constant in the gradient."""
    behav = behaviour_weights(tokens, settings)
    u_T = ratio(tokens.logprobs_T, tokens.prox_T.detach(), behav.kept_T)
    surrogate_T, clipped_T = clipped_surrogate(u_T, tokens.advantages_T, settings)
    return _loss(tokens, settings, behav, behav.w_T * surrogate_T, clipped_T)


def naive(tokens: Tokens, settings: Settings) -> Loss:
    """PPO whose ratio is to the policy that sampled: min(u·A, clip(u)·A), u = π_θ/π_behav."""
    u_T = ratio(tokens.logprobs_T, tokens.behav_T, tokens.mask_T)
    surrogate_T, clipped_T = clipped_surrogate(u_T, tokens.advantages_T, settings)
    behav = Behaviour(u_T.detach(), u_T.detach(), tokens.mask_T, torch.zeros_like(tokens.mask_T))
    return _loss(tokens, settings, behav, surrogate_T, clipped_T)


def gspo(tokens: Tokens, settings: Settings) -> Loss:
    """GSPO: the ratio of a sequence, s = exp(mean over its tokens of log π_θ/π_prox), is clipped
    as a whole: w · min(s·A, clip(s)·A) at each of its tokens.

    In its token form, sg(s) · π_θ/sg(π_θ): the same value and, where A is one number a sequence,
    the same gradient; advantages may then also differ by token.
    """
    behav = behaviour_weights(tokens, settings, by_sequence=True)
    log_u_T = torch.where(behav.kept_T, (tokens.logprobs_T - tokens.prox_T).detach(), 0.0)
    own_T = ratio(tokens.logprobs_T, tokens.logprobs_T.detach(), behav.kept_T)  # 1, with gradient
    s_T = sequences_of(tokens).mean(log_u_T, behav.kept_T).exp() * own_T
    surrogate_T, clipped_T = clipped_surrogate(s_T, tokens.advantages_T, settings)
    return _loss(tokens, settings, behav, behav.w_T * surrogate_T, clipped_T)


def cispo(tokens: Tokens, settings: Settings) -> Loss:
    """CISPO: REINFORCE with a clipped weight, w · sg(clip(u)) · A · log π_θ. The clip bounds the
    weight of a token and never takes its gradient away."""
    behav = behaviour_weights(tokens, settings)
    u_T = ratio(tokens.logprobs_T.detach(), tokens.prox_T.detach(), behav.kept_T)
    bound_T = u_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    logprobs_T = torch.where(behav.kept_T, tokens.logprobs_T, 0.0)
    objective_T = behav.w_T * bound_T * tokens.advantages_T * logprobs_T
    return _loss(tokens, settings, behav, objective_T, bound_T != u_T)


OBJECTIVES: dict[str, Objective] = {f.__name__: f for f in (decoupled, naive, gspo, cispo)}


# Parts ----------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Behaviour:
    """The correction for tokens that another policy wrote."""

    w_T: Tensor  # as it goes into the loss: 0 where it is masked, at most the cap where clamped
    raw_T: Tensor  # for the metric
    kept_T: Tensor
    capped_T: Tensor


def behaviour_weights(tokens: Tokens, settings: Settings, by_sequence: bool = False) -> Behaviour:
    """w = π_prox/π_behav, of a token or as the geometric mean over its sequence's tokens."""
    mask_T = tokens.mask_T
    log_w_T = torch.where(mask_T, (tokens.prox_T - tokens.behav_T).detach(), 0.0)
    if by_sequence:
        log_w_T = torch.where(mask_T, sequences_of(tokens).mean(log_w_T, mask_T), 0.0)
    raw_T = log_w_T.exp()
    capped_T = mask_T & ~(raw_T <= settings.behav_cap)  # so that nan is capped too
    if settings.behav_above == "clamp":
        return Behaviour(raw_T.clamp(max=settings.behav_cap), raw_T, mask_T, capped_T)
    kept_T = mask_T & ~capped_T
    # where, not a product: a w that overflowed must not turn a masked token into nan.
    return Behaviour(torch.where(kept_T, raw_T, 0.0), raw_T, kept_T, capped_T)


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


def kl_estimate(logprobs_T: Tensor, ref_T: Tensor) -> Tensor:
    """KL(π‖π_ref) at one sampled token: k3 = exp(d) - d - 1 with d = log π_ref - log π."""
    d_T = ref_T - logprobs_T
    return d_T.exp() - d_T - 1


def sequences_of(tokens: Tokens) -> Sequences:
    return tokens.sequences or Sequences(torch.zeros_like(tokens.mask_T, dtype=torch.int64), 1)


def _loss(
    tokens: Tokens,
    settings: Settings,
    behav: Behaviour,
    objective_T: Tensor,
    clipped_T: Tensor,
) -> Loss:
    mask_T = tokens.mask_T
    objective_T = torch.where(behav.kept_T, objective_T, 0.0)
    kl_T = torch.zeros_like(objective_T)
    if tokens.ref_T is not None:
        # where on both sides: exp of garbage in a masked token must not reach the gradient.
        ours_T, ref_T = (torch.where(mask_T, x, 0.0) for x in (tokens.logprobs_T, tokens.ref_T))
        kl_T = kl_estimate(ours_T, ref_T)
        objective_T = objective_T - settings.kl_coef * kl_T
    if tokens.weights_T is not None:
        objective_T = objective_T * tokens.weights_T
    metrics = Metrics(
        num_tokens=mask_T.sum(),
        num_clipped=(clipped_T & behav.kept_T).sum(),
        num_capped=behav.capped_T.sum(),
        behav_ratio=torch.where(mask_T, behav.raw_T, 0.0).sum(),
        kl=kl_T.detach().sum(),
    )
    return Loss(-objective_T.sum(), metrics)


# Of a micro-batch under a recipe --------------------------------------------------------------


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
