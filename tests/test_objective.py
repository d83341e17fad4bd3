"""Objectives: values worked by hand, the gradient of REINFORCE on policy, masks and caps."""

from math import log

import pytest
import torch
from torch import Tensor

from minirl.train.objective import OBJECTIVES, Settings, Tokens, decoupled, naive

SETTINGS = Settings(clip_low=0.2, clip_high=0.3, behav_cap=5.0)


def tokens_of(
    u: list[float], w: list[float], advantages: list[float], mask: list[bool] | None = None
) -> Tokens:
    """Tokens with π_prox = 0.1, so that u = π_θ/π_prox and w = π_prox/π_behav are as given."""
    prox_T = torch.full((len(u),), log(0.1))
    return Tokens(
        logprobs_T=(prox_T + torch.tensor(u).log()).requires_grad_(),
        prox_T=prox_T,
        behav_T=prox_T - torch.tensor(w).log(),
        advantages_T=torch.tensor(advantages),
        mask_T=torch.tensor(mask or [True] * len(u)),
    )


def grad(loss: Tensor, of: Tensor) -> list[float]:
    (grad_T,) = torch.autograd.grad(loss, of)
    return grad_T.tolist()


def test_decoupled_by_hand() -> None:
    #            u     w     A     w · min(u·A, clip(u)·A)            d/dlogprob = w·u·A or 0
    # free       1.1   0.5   2     0.5 · 2.2 = 1.1                    1.1
    # clipped ↑  1.5   2     1     2 · min(1.5, 1.3) = 2.6            0
    # free ↑     1.5   1     -1    min(-1.5, -1.3) = -1.5             -1.5
    # clipped ↓  0.5   1     -2    min(-1, -1.6) = -1.6               0
    # free ↓     0.5   4     1     4 · min(0.5, 0.8) = 2              2
    # capped     1     6     1     0                                  0
    # masked     1     1     9     0                                  0
    tokens = tokens_of(
        u=[1.1, 1.5, 1.5, 0.5, 0.5, 1.0, 1.0],
        w=[0.5, 2.0, 1.0, 1.0, 4.0, 6.0, 1.0],
        advantages=[2.0, 1.0, -1.0, -2.0, 1.0, 1.0, 9.0],
        mask=[True] * 6 + [False],
    )
    loss = decoupled(tokens, SETTINGS)
    assert loss.sum.item() == pytest.approx(-(1.1 + 2.6 - 1.5 - 1.6 + 2.0), abs=1e-5)
    assert grad(loss.sum, tokens.logprobs_T) == pytest.approx(
        [-1.1, 0.0, 1.5, 0.0, -2.0, 0.0, 0.0], abs=1e-5
    )
    assert loss.metrics.num_tokens == 6
    assert loss.metrics.num_clipped == 2
    assert loss.metrics.num_capped == 1
    assert loss.metrics.behav_ratio.item() == pytest.approx(14.5, abs=1e-4)
    # |log(u·w)|: 0.55, 3, 1.5, 0.5, 2, 6
    gap = -log(0.55) + log(3) + log(1.5) - log(0.5) + log(2) + log(6)
    assert loss.metrics.behav_gap.item() == pytest.approx(gap, abs=1e-4)


def test_naive_by_hand() -> None:
    # π_θ/π_behav = u·w: 1.1, 3, 0.4. min(1.1·2, …) = 2.2; min(3, 1.3) = 1.3; min(-0.4, -0.8) = -0.8
    tokens = tokens_of(u=[1.1, 1.5, 0.8], w=[1.0, 2.0, 0.5], advantages=[2.0, 1.0, -1.0])
    loss = naive(tokens, SETTINGS)
    assert loss.sum.item() == pytest.approx(-2.7, abs=1e-5)
    assert grad(loss.sum, tokens.logprobs_T) == pytest.approx([-2.2, 0.0, 0.0], abs=1e-5)
    assert loss.metrics.num_clipped == 2
    assert loss.metrics.num_capped == 0
    assert loss.metrics.behav_ratio.item() == pytest.approx(4.5, abs=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_is_reinforce(name: str) -> None:
    torch.manual_seed(0)
    logits_TV = torch.randn(7, 5, requires_grad=True)
    chosen_T, advantages_T = torch.randint(5, (7,)), torch.randn(7)
    logprobs_T = logits_TV.log_softmax(-1).gather(1, chosen_T[:, None])[:, 0]
    (reinforce_TV,) = torch.autograd.grad(
        -(logprobs_T * advantages_T).sum(), logits_TV, retain_graph=True
    )
    same_T = logprobs_T.detach()
    tokens = Tokens(logprobs_T, same_T, same_T, advantages_T, torch.ones(7, dtype=torch.bool))
    loss = OBJECTIVES[name](tokens, SETTINGS)
    (grad_TV,) = torch.autograd.grad(loss.sum, logits_TV)
    torch.testing.assert_close(grad_TV, reinforce_TV, atol=1e-6, rtol=1e-6)
    assert loss.metrics.num_clipped == 0


def test_w_is_a_constant_in_the_gradient() -> None:
    # With prox = logprobs of the same graph, a w that were not constant would add w·A once more.
    tokens = tokens_of(u=[1.0, 1.0], w=[2.0, 0.5], advantages=[1.0, -3.0])
    same_graph = Tokens(
        tokens.logprobs_T,
        tokens.logprobs_T * 1.0,
        tokens.behav_T,
        tokens.advantages_T,
        tokens.mask_T,
    )
    loss = decoupled(same_graph, SETTINGS)
    assert grad(loss.sum, tokens.logprobs_T) == pytest.approx([-2.0, 1.5], abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_masked_is_zero_with_a_graph(name: str) -> None:
    tokens = tokens_of(u=[1.0, 2.0], w=[1.0, 9.0], advantages=[1.0, 1.0], mask=[False, False])
    loss = OBJECTIVES[name](tokens, SETTINGS)
    assert loss.sum.item() == 0.0
    assert grad(loss.sum, tokens.logprobs_T) == [0.0, 0.0]
    assert all(value == 0 for value in vars(loss.metrics).values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_garbage_in_masked_tokens_goes_nowhere(name: str) -> None:
    nan = float("nan")
    logprobs_T = torch.tensor([-1.0, nan, -1.0], requires_grad=True)
    tokens = Tokens(
        logprobs_T,
        torch.tensor([-1.0, nan, -1.0]),
        torch.tensor([-1.0, nan, -float("inf")]),
        torch.tensor([1.0, nan, nan]),
        torch.tensor([True, False, False]),
    )
    loss = OBJECTIVES[name](tokens, SETTINGS)
    assert loss.sum.item() == -1.0
    assert grad(loss.sum, logprobs_T) == [-1.0, 0.0, 0.0]
    assert all(torch.isfinite(value) for value in vars(loss.metrics).values())


def test_an_overflowed_w_is_capped_not_nan() -> None:
    tokens = tokens_of(u=[1.0, 1.0], w=[1.0, float("inf")], advantages=[1.0, 1.0])
    loss = decoupled(tokens, SETTINGS)
    assert loss.sum.item() == pytest.approx(-1.0)
    assert loss.metrics.num_capped == 1
