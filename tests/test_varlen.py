"""The branch of packed attention that CUDA takes, on a CPU kernel for torch's own operation."""

from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
import varlen_cpu  # noqa: F401  registers the kernel
from test_attention import assert_equals_block_mask, random_qkv
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from minirl.train import attention, policy
from minirl.train.attention import boundaries
from minirl.train.policy import Policy, load_policy


@pytest.fixture()
def model(tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """Loaded and checked in float32, as on CUDA, and then used as there."""
    found = load_policy(str(tied_folder), "bfloat16")
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    return found


def test_it_equals_sdpa_with_a_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    monkeypatch.setattr(attention, "_by_runs", None)  # it is not what runs
    lengths = [70, 33, 33, 1]
    assert_equals_block_mask(random_qkv(sum(lengths), dtype=torch.bfloat16), lengths, 3e-2)


def test_queries_may_be_the_last_of_more_keys() -> None:
    """Bottom-right: an answer's queries over its prompt's keys and its own."""
    torch.manual_seed(0)
    num_q, num_k = [3, 1, 5], [7, 4, 5]
    query, key, value = (
        torch.randn(sum(lengths), heads, 16, dtype=torch.bfloat16, requires_grad=True)
        for lengths, heads in ((num_q, 4), (num_k, 2), (num_k, 2))
    )
    bounds = [F.pad(torch.tensor(n).cumsum(0), (1, 0)).int() for n in (num_q, num_k)]
    options = {"window_size": (-1, 0), "enable_gqa": True, "scale": 0.3}
    out = varlen_attn(query, key, value, *bounds, max(num_q), max(num_k), **options)
    parts = []
    for q, k, v in zip(query.split(num_q), key.split(num_k), value.split(num_k), strict=True):
        mask = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        own = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
        parts.append(own.transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((o * weight).sum(), (query, key, value)) for o in (out, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=5e-2, rtol=5e-2)


def logprobs_and_gradient(model: Policy, lengths: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(len(lengths))
    tokens_T = torch.randint(2, model.model.config.vocab_size, (sum(lengths),))
    model.zero_grad()
    logprobs_T, _ = model(tokens_T, *boundaries(lengths))
    (logprobs_T * torch.linspace(-1, 1, len(logprobs_T))).sum().backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters()]
    return logprobs_T.detach(), torch.cat(grads)


def test_a_policy_in_bfloat16_has_the_same_logprobs_compiled_or_not(
    model: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph without a break serves every shape."""
    lengths = [40, 23, 23, 1]
    varlen = logprobs_and_gradient(model, lengths)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    with monkeypatch.context() as patch:
        patch.setattr(attention, "VARLEN_ON", set())
        runs = logprobs_and_gradient(model, lengths)
        patch.setattr(policy, "AUTOCAST_ON", set())
        exact = logprobs_and_gradient(model, lengths)
    assert varlen[0].dtype == torch.float32 and not torch.equal(exact[0], runs[0])
    dynamo.reset()
    dynamo.utils.counters.clear()
    model.model.base_model.compile(dynamic=True, backend="aot_eager")
    compiled = logprobs_and_gradient(model, lengths)
    for other in ([31, 9], [60, 2], [12] * 5):
        logprobs_and_gradient(model, other)
    assert not dynamo.utils.counters["graph_break"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for one in (exact, runs, compiled):
        assert (one[0] - varlen[0]).abs().max() < 5e-2
        assert (one[1] - varlen[1]).norm() < 3e-2 * varlen[1].norm()
