"""The branch of packed attention that CUDA takes, on a CPU kernel for torch's own operation."""

from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo
import varlen_cpu  # noqa: F401  registers the kernel
from test_attention import assert_equals_block_mask, random_qkv
from torch import Tensor

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
