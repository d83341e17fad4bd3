"""A CPU kernel for torch's variable-length attention, so that the branch that CUDA takes runs here.

Import it, and `varlen_attn` works on CPU tensors, forward and backward. Causality is bottom-right,
as in the CUDA kernel: the last query of a sequence sees its last key, whatever the two lengths.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _sequences(query: Tensor, key: Tensor, *bounds: Tensor) -> Iterator[tuple[slice, slice]]:
    assert query.dtype == key.dtype in (torch.bfloat16, torch.float16)
    assert {cu.dtype for cu in bounds} == {torch.int32}
    spans = ([slice(*pair) for pair in pairwise(cu.tolist())] for cu in bounds)
    return zip(*spans, strict=True)


def _probabilities(query_HQD: Tensor, key_HKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of each query over the keys, and their log-sum-exp."""
    num_q, num_k = query_HQD.shape[1], key_HKD.shape[1]
    is_hidden = torch.ones(num_q, num_k).triu(num_k - num_q + 1).bool()
    scores_HQK = (query_HQD @ key_HKD.transpose(1, 2) * scale).masked_fill(is_hidden, -torch.inf)
    return scores_HQK.softmax(-1), scores_HQK.logsumexp(-1)


def _heads_first(tensor: Tensor, at: slice, repeats: int = 1) -> Tensor:
    return tensor[at].transpose(0, 1).float().repeat_interleave(repeats, 0)


@varlen._varlen_attn.register_kernel("cpu")
def forward(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window, *rest):  # type: ignore[no-untyped-def]
    assert is_causal and list(window) == [-1, 0]
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    repeats = query.shape[1] // key.shape[1]
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for at_q, at_k in _sequences(query, key, cu_q, cu_k):
        keys, values = (_heads_first(x, at_k, repeats) for x in (key, value))
        probabilities, lse[:, at_q] = _probabilities(_heads_first(query, at_q), keys, scale)
        out[at_q] = (probabilities @ values).transpose(0, 1).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    d_out, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale, *rest
):  # type: ignore[no-untyped-def]
    repeats = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for at_q, at_k in _sequences(query, key, cu_q, cu_k):
        asked, d_O = _heads_first(query, at_q), _heads_first(d_out, at_q)
        keys, values = (_heads_first(x, at_k, repeats) for x in (key, value))
        P, _ = _probabilities(asked, keys, scale)
        d_P = d_O @ values.transpose(1, 2)
        d_S = P * (d_P - (d_P * P).sum(-1, keepdim=True)) * scale
        grads[0][at_q] += (d_S @ keys).transpose(0, 1)
        for grad, own in zip(grads[1:], (d_S.mT @ asked, P.mT @ d_O), strict=True):
            grad[at_k] += own.unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))
