"""Objectives and advantages: values worked by hand, the gradient of REINFORCE on policy, masks and
caps, and exact zeros where there is nothing to learn."""

from dataclasses import replace
from math import log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minirl.config import TrainConfig
from minirl.train.advantage import ESTIMATORS, estimate, gae
from minirl.train.objective import OBJECTIVES, Sums, Tokens, loglinear_prox, loss_of
from minirl.train.prepare import loss_weights

TRAIN = TrainConfig(clip_low=0.2, clip_high=0.3, behav_cap=5.0)
NAN = float("nan")


def tokens_of(
    u: list[float],
    w: list[float],
    advantages: list[float],
    mask: list[bool] | None = None,
    sequences: list[int] | None = None,
) -> Tokens:
    """Tokens with π_prox = 0.1, so that u = π_θ/π_prox and w = π_prox/π_behav are as given."""
    prox_T = torch.full((len(u),), log(0.1))
    return Tokens(
        logprobs_T=(prox_T + torch.tensor(u).log()).requires_grad_(),
        prox_T=prox_T,
        behav_T=prox_T - torch.tensor(w).log(),
        advantages_T=torch.tensor(advantages),
        mask_T=torch.tensor(mask or [True] * len(u)),
        sequence_T=torch.tensor(sequences or [0] * len(u)),
        num_sequences=max(sequences or [0]) + 1,
    )


def grad(loss: Tensor, of: Tensor) -> list[float]:
    (grad_T,) = torch.autograd.grad(loss, of)
    return grad_T.tolist()


def check(name: str, tokens: Tokens, objective: float, gradient: list[float], **train: Any) -> Sums:
    """The objective's value, and its gradient by logprob."""
    loss, sums = loss_of(name, tokens, replace(TRAIN, **train))
    assert loss.item() == pytest.approx(-objective, abs=1e-4)
    assert grad(loss, tokens.logprobs_T) == pytest.approx([-g for g in gradient], abs=1e-4)
    return sums


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
    gradient = [1.1, 0.0, -1.5, 0.0, 2.0, 0.0, 0.0]
    sums = check("decoupled", tokens, 1.1 + 2.6 - 1.5 - 1.6 + 2.0, gradient)
    assert (sums["tokens"], sums["clip_frac"], sums["capped_frac"]) == (6, 2, 1)
    assert sums["behav_ratio_mean"].item() == pytest.approx(14.5, abs=1e-4)


def test_naive_by_hand() -> None:
    # π_θ/π_behav = u·w: 1.1, 3, 0.4. min(1.1·2, …) = 2.2; min(3, 1.3) = 1.3; min(-0.4, -0.8) = -0.8
    tokens = tokens_of(u=[1.1, 1.5, 0.8], w=[1.0, 2.0, 0.5], advantages=[2.0, 1.0, -1.0])
    sums = check("naive", tokens, 2.7, [2.2, 0.0, 0.0])
    assert (sums["clip_frac"], sums["capped_frac"]) == (2, 0)
    assert sums["behav_ratio_mean"].item() == pytest.approx(4.5, abs=1e-4)


def test_gspo_by_hand() -> None:
    # s of the first: √(1.21 · 1) = 1.1, free, and w = √(2 · 8) = 4, though one token is above 5:
    # 4.4 at both tokens. Of the second: s = √(4 · 1) = 2, clipped to 1.3. The third has one trained
    # token: s = 0.5, A = -1: clipped to 0.8. Of the fourth: w = √(30 · 1) = 5.48: left out.
    tokens = tokens_of(
        u=[1.21, 1.0, 4.0, 1.0, 0.5, 9.0, 1.0, 1.0],
        w=[2.0, 8.0, 1.0, 1.0, 1.0, 100.0, 30.0, 1.0],
        advantages=[1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0],
        mask=[True] * 5 + [False, True, True],
        sequences=[0, 0, 1, 1, 2, 2, 3, 3],
    )
    gradient = [4.4, 4.4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    sums = check("gspo", tokens, 4.4 + 4.4 + 1.3 + 1.3 - 0.8, gradient)
    assert (sums["clip_frac"], sums["capped_frac"]) == (3, 2)
    assert sums["behav_ratio_mean"].item() == pytest.approx(8 + 2 + 1 + 2 * sqrt(30), abs=1e-3)


def test_cispo_by_hand() -> None:
    # The weight is clipped and constant: the gradient is w · clip(u) · A at every token, also at
    # those that PPO would cut (the second and third).
    tokens = tokens_of(u=[1.1, 3.0, 0.1], w=[2.0, 1.0, 1.0], advantages=[1.0, 1.0, -1.0])
    value = 2.2 * log(0.11) + 2.0 * log(0.3) - 0.1 * log(0.01)
    sums = check("cispo", tokens, value, [2.2, 2.0, -0.1], clip_low=1.0, clip_high=1.0)
    assert sums["clip_frac"] == 1


def test_w_above_the_cap_is_left_out_and_else_a_constant_in_the_gradient() -> None:
    overflowed = tokens_of(u=[1.0, 1.0], w=[1.0, float("inf")], advantages=[1.0, 1.0])
    assert check("decoupled", overflowed, 1.0, [1.0, 0.0])["capped_frac"] == 1
    # With prox = logprobs of the same graph, a w that were not constant would add w·A once more.
    tokens = tokens_of(u=[1.0, 1.0], w=[2.0, 0.5], advantages=[1.0, -3.0])
    check("decoupled", replace(tokens, prox_T=tokens.logprobs_T * 1.0), 0.5, [2.0, -1.5])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_garbage_in_masked_tokens_goes_nowhere(name: str) -> None:
    tokens = replace(
        tokens_of([1.0] * 3, [1.0] * 3, [1.0, NAN, NAN], [True, False, False]),
        logprobs_T=torch.tensor([-1.0, NAN, -1.0], requires_grad=True),
        prox_T=torch.tensor([-1.0, NAN, -1.0]),
        behav_T=torch.tensor([-1.0, NAN, -float("inf")]),
    )
    sums = check(name, tokens, -1.0 if name == "cispo" else 1.0, [1.0, 0.0, 0.0])  # A·log π, or A·u
    assert all(torch.isfinite(value) for value in sums.values())
    sums = check(name, replace(tokens, mask_T=torch.zeros(3).bool()), 0.0, [0.0] * 3)
    assert not any(sums.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_kl_is_added_where_tokens_train_and_weights_scale(name: str) -> None:
    tokens = tokens_of(u=[1.0, 1.0], w=[9.0, 1.0], advantages=[0.0, 0.0], mask=[True, False])
    tokens = replace(tokens, ref_T=torch.tensor([log(0.05), NAN]))
    k3 = 0.5 + log(2) - 1  # d = log 0.05 - log 0.1; also where w is above its cap
    sums = check(name, tokens, -0.5 * k3, [-0.5 * (1 - 0.5), 0.0], kl_coef=0.5)
    assert sums["kl"].item() == pytest.approx(k3, abs=1e-6)
    # Weights scale each token.
    tokens = tokens_of(u=[1.1, 0.9], w=[1.0, 2.0], advantages=[1.0, -2.0])
    plain = grad(loss_of(name, tokens, TRAIN)[0], tokens.logprobs_T)
    tokens = replace(tokens, weights_T=torch.tensor([3.0, 0.5]))
    weighted = grad(loss_of(name, tokens, TRAIN)[0], tokens.logprobs_T)
    assert weighted == pytest.approx([3 * plain[0], plain[1] / 2], abs=1e-5)


def test_loglinear_prox_by_hand() -> None:
    logprobs_T, behav_T = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0])
    staleness_T = torch.tensor([0.0, 1.0, 3.0])
    at = {p: loglinear_prox(logprobs_T, behav_T, staleness_T, p).tolist() for p in (0, 0.5, 1)}
    assert at[0] == [-1.0, -1.0, -1.0]  # nothing was trained yet: the policy is π_prox
    assert at[0.5] == pytest.approx([-2.0, -2 + 1 / 1.5, -2 + 3 / 3.5])
    assert at[1] == pytest.approx([-2.0, -1.5, -1.25])  # A-3PO: weight 1/(s + 1) on behaviour


# Advantages ----------------------------------------------------------------------------------

GROUPS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
STD = 0.1875**0.5 + 1e-4  # of a group: variance (3 · 0.0625 + 0.5625) / 4
ONE = 5 / (5 + 1e-4)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("grpo", [0.75 / STD, *[-0.25 / STD] * 3], [*[0.25 / STD] * 3, -0.75 / STD]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]),
        # The mean of the others is 0, or (1 + 0 + 0) / 3.
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        # Centred by group, then over the batch: mean 0, variance (2 · 0.5625 + 6 · 0.0625) / 8.
        ("reinforce++", [0.75 / STD, *[-0.25 / STD] * 3], [*[0.25 / STD] * 3, -0.75 / STD]),
        # ±5, four of each: mean 0, std 5. The question does not matter, only the answer.
        ("batch", [ONE, -ONE, -ONE, -ONE], [ONE, ONE, ONE, -ONE]),
    ],
)
def test_estimators_by_hand(name: str, first: list[float], second: list[float]) -> None:
    found = estimate(name, GROUPS)
    assert found[0] == pytest.approx(first) and found[1] == pytest.approx(second)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_without_variance_gets_zero_whatever_is_normalised_after(name: str) -> None:
    found = estimate(name, [[0.1] * 3, [1.0, 0.0, 1.0], [0.3] * 3])
    assert found[0] == found[2] == [0.0] * 3
    assert all(found[1])
    assert estimate(name, [[1.0, 1.0], [0.0, 0.0]]) == [[0.0, 0.0], [0.0, 0.0]]


def test_gae_by_hand() -> None:
    # λ 0.5; reward 1; values 0.2, 0.4, 0.6.
    # δ: 0.4 - 0.2 = 0.2;  0.6 - 0.4 = 0.2;  1 - 0.6 = 0.4
    # A, from the last: 0.4;  0.2 + 0.5·0.4 = 0.4;  0.2 + 0.5·0.4 = 0.4
    advantages_N, returns_N = gae(1.0, np.array([0.2, 0.4, 0.6], np.float32), 0.5)
    assert advantages_N == pytest.approx([0.4, 0.4, 0.4], abs=1e-6)
    assert returns_N == pytest.approx([0.6, 0.8, 1.0], abs=1e-6)


def test_loss_weights_by_hand() -> None:
    # 6 trained tokens: 2, 4 and none. The loss is divided by 6 after.
    # Each trajectory that trains counts 1/2, a token of it 1/2 of that or 1/4.
    assert loss_weights([2, 4, 0], "sequence", 10) == [6 / 4, 6 / 8, 0.0]
    assert loss_weights([2, 4, 0], "constant", 10) == [6 / 30] * 3
    assert loss_weights([0, 0], "sequence", 10) == [0.0, 0.0]
