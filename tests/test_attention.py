"""Packed attention: what it cannot do is refused, and the branch that CUDA takes computes the same.
That it equals one sequence at a time, forward and backward, is in test_policy.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
import varlen_cpu  # noqa: F401  registers the kernel
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from minirl.errors import MinirlError
from minirl.train import attention, policy
from minirl.train.attention import boundaries, packed_attention
from minirl.train.policy import Policy, load_policy


def packed(qkv: list[Tensor], lengths: list[int], **rest: Any) -> Tensor:
    _, cu_seqlens, longest = boundaries(lengths, qkv[0].device)
    bounds: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
    given: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0, **bounds, **rest}
    return packed_attention(nn.Identity(), *qkv, None, **given)[0]


def test_a_sliding_window_is_refused_only_where_it_would_matter() -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(1, heads, 8, 8) for heads in (4, 2, 2)]
    torch.testing.assert_close(packed(qkv, [5, 3], sliding_window=5), packed(qkv, [5, 3]))
    with pytest.raises(MinirlError, match="sliding window of 4 tokens"):
        packed(qkv, [5, 3], sliding_window=4)
    with pytest.raises(MinirlError, match="needs softcap"):
        packed(qkv, [5, 3], softcap=30.0)


# The branch that CUDA takes, on a CPU kernel for torch's own operation ----------------------------


@pytest.fixture()
def model(tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """Loaded and checked in float32, as on CUDA, and then used as there."""
    found = load_policy(str(tied_folder), "bfloat16")
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    return found


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
    logprobs_T, _ = model(tokens_T, boundaries(lengths))
    (logprobs_T * torch.linspace(-1, 1, len(logprobs_T))).sum().backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters()]
    return logprobs_T.detach(), torch.cat(grads)


def test_bfloat16_compiled_or_not(model: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logprobs are the same. One graph without a break serves every shape."""
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
