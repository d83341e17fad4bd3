"""The policy: packed equals a plain forward in logprobs and gradients, for each kind of model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_script
import pytest
import tiny_models
import torch
from torch import Tensor

from minirl.config import Config, TrainConfig
from minirl.errors import MinirlError
from minirl.train import attention
from minirl.train.attention import boundaries, packed_attention
from minirl.train.optimizer import build_optimizer, learning_rate
from minirl.train.policy import Head, Policy, build_policy, check_head, load_policy

import transformers  # isort: skip  (after minirl, which hides a broken torchvision)

LENGTHS = [9, 5, 5, 1, 12, 1]
TEMPERATURE = 0.7


def random_tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(1, tiny_models.VOCAB, (sum(LENGTHS),))


def run(
    policy: torch.nn.Module, tokens_T: Tensor, needed_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return policy(tokens_T, boundaries(LENGTHS), TEMPERATURE, needed_T)


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


def test_the_optimizer_decays_matrices_only(tied_folder: Path) -> None:
    policy = load_policy(str(tied_folder))
    groups = build_optimizer(policy.parameters(), 1e-2, TrainConfig(weight_decay=0.1)).param_groups
    decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {p: 0.1 if p.ndim >= 2 else 0.0 for p in policy.parameters()}


def test_the_learning_rate_warms_up_and_then_stays_or_falls_to_zero() -> None:
    def of(schedule: Any, warmup: int) -> list[float]:
        train = TrainConfig(schedule=schedule, warmup_steps=warmup, steps=4 + warmup)
        return [learning_rate(step, 4.0, train) for step in range(train.steps)]

    assert of("constant", 3) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    assert of("linear", 0) == [4.0, 3.0, 2.0, 1.0]
    assert of("linear", 1) == [2.0, 4.0, 3.0, 2.0, 1.0]
    assert of("cosine", 0) == pytest.approx([4.0, 2 + 2 * 0.5**0.5, 2.0, 2 - 2 * 0.5**0.5])
    longer = TrainConfig(schedule="linear", warmup_steps=1, steps=5)  # not negative after its end
    assert learning_rate(9, 4.0, longer) == 0.0


def test_packed_attention_refuses_what_it_cannot_do_only_where_it_matters() -> None:
    torch.manual_seed(0)
    qkv, bounds = [torch.randn(1, heads, 8, 8) for heads in (4, 2, 2)], boundaries([5, 3])

    def packed(**rest: Any) -> Tensor:
        given = dict(cu_seqlens=bounds.cu_seqlens_S1, max_seqlen=5, scaling=0.3, **rest)
        return packed_attention(torch.nn.Identity(), *qkv, None, **given)[0]

    torch.testing.assert_close(packed(sliding_window=5), packed())
    with pytest.raises(MinirlError, match="sliding window of 4 tokens for sequences of 5"):
        packed(sliding_window=4)
    with pytest.raises(MinirlError, match="needs softcap"):
        packed(softcap=30.0)


SMALL: dict[str, Any] = dict(vocab_size=300, hidden_size=64, intermediate_size=128)
SMALL |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2)
FAMILIES = {  # the layers that look across packed sequences, and the config's own values
    "Qwen3Config": ("", {"head_dim": 16}),
    "LlamaConfig": ("", {}),
    "Qwen3MoeConfig": ("", dict(head_dim=16, **EXPERTS)),
    "CohereConfig": ("scaled", dict(logit_scale=0.5)),
    "Lfm2Config": ("conv", {"layer_types": ["conv", "full_attention"]}),
    "GraniteMoeHybridConfig": (
        "linear_attention",
        dict(num_local_experts=0, mamba_expand=1, layer_types=["mamba", "attention"], **MAMBA),
    ),
    "FalconH1Config": ("hybrid", dict(mamba_d_ssm=64, mamba_chunk_size=16, **MAMBA)),
    "Qwen3_5TextConfig": (  # it has its own use of the boundaries: a TypeError
        "linear_attention",
        dict(head_dim=16, layer_types=["linear_attention", "full_attention"], **LINEAR),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_packing_would_change_is_refused(name: str) -> None:
    layers, values = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL, **values)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation=attention.NAME)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.1)
    policy = Policy(model.float().eval())
    if not layers:
        check_head(policy)
        return
    refusal = f"ForCausalLM: {layers} layers look across packed sequences: minirl cannot train it"
    refusal = "more to its logits" if name == "CohereConfig" else refusal
    with pytest.raises(MinirlError, match=refusal):
        check_head(policy)


def test_a_compiled_head_gives_the_same(tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1, where nothing is divided, and at another; over several chunks."""
    monkeypatch.setattr("minirl.train.policy.CHUNK", 7)
    policy, tokens_T, found = load_policy(str(tied_folder)), random_tokens(), []
    compiled = Head(*(torch.compile(part, dynamic=True, backend="eager") for part in Head()[:2]))
    for policy.head in (Head(), compiled):
        for temperature in (1.0, TEMPERATURE):
            policy.zero_grad()
            logprobs_T, entropy_T = policy(tokens_T, boundaries(LENGTHS), temperature)
            (logprobs_T * torch.linspace(-1, 1, len(tokens_T))).sum().backward()
            grads = [parameter.grad for parameter in policy.parameters()]
            found.append([logprobs_T, entropy_T, *grads])
    torch.testing.assert_close(found[2:], found[:2])
    assert not torch.equal(found[0][0], found[1][0])
    recipe = replace(Config(), train=replace(Config().train, compile=True))
    assert build_policy(recipe, str(tied_folder)).head != Head()
