"""Packed attention: equals SDPA under a block mask, boundaries are right, refusals are clear."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.errors import MinirlError
from minirl.train.attention import boundaries, packed_attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def random_qkv(
    num_tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, num_tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def packed(qkv: list[Tensor], lengths: list[int], **rest: Any) -> Tensor:
    _, cu_seqlens, longest = boundaries(lengths, qkv[0].device)
    bounds: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
    return packed_attention(nn.Identity(), *qkv, None, scaling=0.3, dropout=0.0, **bounds, **rest)[
        0
    ]


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize(
    ("lengths", "device"),
    [
        ([5], "cpu"),
        ([7, 7, 7, 3, 3, 1], "cpu"),
        ([1, 9, 2, 2, 30, 1, 1], "cpu"),
        pytest.param([70, 33, 33, 1], "cuda", marks=ON_GPU),
    ],
)
def test_equals_sdpa_with_a_block_mask(lengths: list[int], device: str) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    qkv = random_qkv(sum(lengths), device, dtype)
    assert_equals_block_mask(qkv, lengths, tolerance)


def assert_equals_block_mask(qkv: list[Tensor], lengths: list[int], tolerance: float) -> None:
    mask_TT = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    expected_1HTD = F.scaled_dot_product_attention(
        *qkv, attn_mask=mask_TT.to(qkv[0].device), scale=0.3, enable_gqa=True
    )
    outs = (packed(qkv, lengths), expected_1HTD.transpose(1, 2))
    weight_1THD = torch.randn_like(outs[0])
    ours, theirs = ([out, *torch.autograd.grad((out * weight_1THD).sum(), qkv)] for out in outs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_a_sliding_window_is_refused_only_where_it_would_matter() -> None:
    qkv = random_qkv(8)
    torch.testing.assert_close(packed(qkv, [5, 3], sliding_window=5), packed(qkv, [5, 3]))
    with pytest.raises(MinirlError, match="sliding window of 4 tokens"):
        packed(qkv, [5, 3], sliding_window=4)
    with pytest.raises(MinirlError, match="needs softcap"):
        packed(qkv, [5, 3], softcap=30.0)
