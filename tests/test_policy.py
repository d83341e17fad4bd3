"""The policy: packed equals a plain forward in logprobs and gradients, for each kind of model."""

from pathlib import Path

import plain_script
import pytest
import tiny_models
import torch
from torch import Tensor

from minirl.errors import MinirlError
from minirl.train.attention import boundaries
from minirl.train.optimizer import build_optimizer, learning_rate
from minirl.train.policy import load_policy

LENGTHS = [9, 5, 5, 1, 12, 1]
TEMPERATURE = 0.7


def random_tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(1, tiny_models.VOCAB, (sum(LENGTHS),))


def run(
    policy: torch.nn.Module, tokens_T: Tensor, needed_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return policy(tokens_T, *boundaries(LENGTHS), TEMPERATURE, needed_T)


def one_by_one(model: plain_script.PreTrainedModel, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sequence alone, through Hugging Face's own forward. (logprobs_T, entropy_T)"""
    logprobs, entropies = [], []
    for sequence in tokens_T.split(LENGTHS):
        all_TV = plain_script.distributions(model, sequence.tolist(), TEMPERATURE)
        logprobs.append(plain_script.own(all_TV, sequence.tolist()))
        entropies.append(torch.cat([torch.zeros(1), -(all_TV.exp() * all_TV).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Qwen3Config", "Qwen2Config", "LlamaConfig"])
def test_packed_equals_one_by_one(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minirl.train.policy.CHUNK", 7 if tied else 64)  # several chunks, or one
    folder = tiny_models.write(tmp_path, tied, kind=kind)
    policy = load_policy(str(folder), gradient_checkpointing=tied)
    plain = plain_script.load(folder)
    tokens_T = random_tokens()
    logprobs_T, entropy_T = run(policy, tokens_T)
    expected_T, expected_entropy_T = one_by_one(plain, tokens_T)
    torch.testing.assert_close(logprobs_T, expected_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_T, expected_entropy_T, atol=1e-5, rtol=1e-5)
    assert policy.training and not entropy_T.requires_grad
    needed_T = torch.rand(len(tokens_T)) < 0.5
    for some_T, all_T in zip(run(policy, tokens_T, needed_T), (logprobs_T, entropy_T), strict=True):
        torch.testing.assert_close(some_T, torch.where(needed_T, all_T, 0.0))

    weight_T = torch.randn(len(tokens_T)) / len(tokens_T)
    (logprobs_T * weight_T).sum().backward()
    (expected_T * weight_T).sum().backward()
    grads = {key: p.grad for key, p in policy.model.named_parameters()}
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(grads.pop(key), parameter.grad, atol=1e-5, rtol=1e-5)
    assert not grads


def test_a_head_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path, kind="CohereConfig", logit_scale=0.5)
    with pytest.raises(MinirlError, match="more to its logits"):
        load_policy(str(folder))


def test_the_optimizer_decays_matrices_only(tied_folder: Path) -> None:
    policy = load_policy(str(tied_folder))
    groups = build_optimizer(policy, lr=1e-2, weight_decay=0.1).param_groups
    decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {p: 0.1 if p.ndim >= 2 else 0.0 for p in policy.parameters()}


def test_the_learning_rate_warms_up_and_then_stays_or_falls_to_zero() -> None:
    def of(schedule: str, warmup: int) -> list[float]:
        steps = range(4 + warmup)
        return [learning_rate(step, 4.0, warmup, schedule, len(steps)) for step in steps]

    assert of("constant", 3) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    assert of("linear", 0) == [4.0, 3.0, 2.0, 1.0]
    assert of("linear", 1) == [2.0, 4.0, 3.0, 2.0, 1.0]
    assert of("cosine", 0) == pytest.approx([4.0, 2 + 2 * 0.5**0.5, 2.0, 2 - 2 * 0.5**0.5])
    assert learning_rate(9, 4.0, 1, "linear", 5) == 0.0  # a run that was made longer: no negative
