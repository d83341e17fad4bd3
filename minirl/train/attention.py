"""Attention over sequences packed end to end, none of which sees another.

Registers "minirl_packed" as an attention of transformers; the boundaries reach it as keyword
arguments of the model's forward. On CUDA in half precision it is torch's variable-length attention;
else each run of neighbours of equal length is one causal SDPA over views: no copy, padding or mask.
Leaves out sliding windows shorter than the sequences, soft caps and sinks: those are errors.
Axes: T tokens, S1 sequences + 1, H heads, D of one head, B sequences of a run, L tokens of one.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.devices import hide_broken_torchvision
from minirl.errors import MinirlError

hide_broken_torchvision()

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

NAME = "minirl_packed"
HALF = (torch.bfloat16, torch.float16)  # what torch's variable-length kernel computes in
VARLEN_ON = {"cuda"}  # where it has one


class Boundaries(NamedTuple):
    """Where packed sequences begin and end, in the order in which a policy takes it."""

    positions_T: Tensor  # int64, from 0 in each sequence
    cu_seqlens_S1: Tensor  # int32
    max_seqlen: int


def boundaries(lengths: Sequence[int], device: torch.device | str = "cpu") -> Boundaries:
    """Of sequences of these lengths, packed in this order."""
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    ends_S = lengths_S.cumsum(0)
    starts_T = (ends_S - lengths_S).repeat_interleave(lengths_S)
    positions_T = torch.arange(len(starts_T)) - starts_T
    cu_seqlens_S1 = F.pad(ends_S, (1, 0)).to(torch.int32)
    return Boundaries(positions_T.to(device), cu_seqlens_S1.to(device), max(lengths))


def packed_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. `rest` holds its arguments for other kernels."""
    needs = [n for n in ("softcap", "s_aux", "position_bias") if rest.get(n) is not None]
    window = rest.get("sliding_window")
    if window is not None and window < max_seqlen:
        needs.append(f"a sliding window of {window} tokens for sequences of {max_seqlen}")
    if needs:
        layer = type(module).__name__
        raise MinirlError(f"{layer} needs {needs[0]}, which packed attention does not support")
    qkv_THD = [x[0].transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD)]
    if value_1HTD.device.type in VARLEN_ON and value_1HTD.dtype in HALF:
        return _varlen(qkv_THD, cu_seqlens, max_seqlen, scaling)[None], None
    return _by_runs(qkv_THD, cu_seqlens, scaling)[None], None


def _varlen(
    qkv_THD: list[Tensor], cu_seqlens_S1: Tensor, max_seqlen: int, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Autocast does not know this kernel, and norms over heads leave queries and keys in float32.
    query_THD, key_THD, value_THD = (x.to(qkv_THD[2].dtype) for x in qkv_THD)
    bounds = (cu_seqlens_S1, cu_seqlens_S1, max_seqlen, max_seqlen)
    is_grouped, causal = query_THD.shape[1] != key_THD.shape[1], (-1, 0)  # torch's spelling
    options: dict[str, Any] = {"window_size": causal, "enable_gqa": is_grouped}
    out = varlen_attn(query_THD, key_THD, value_THD, *bounds, scale=scaling, **options)
    assert isinstance(out, Tensor)
    return out


@torch.compiler.disable  # its shapes are new in every micro-batch: each would be compiled
def _by_runs(qkv_THD: list[Tensor], cu_seqlens_S1: Tensor, scaling: float | None) -> Tensor:
    lengths = [end - start for start, end in pairwise(cu_seqlens_S1.tolist())]
    runs = [(len(list(run)), length) for length, run in groupby(lengths)]  # neighbours of a length
    sizes = [num * length for num, length in runs]
    outs = []
    # split, not slices: the backward of a slice writes a gradient of all T tokens, for each slice.
    for run, *qkv in zip(runs, *(x.split(sizes) for x in qkv_THD), strict=True):
        query_BHLD, key_BHLD, value_BHLD = (x.unflatten(0, run).transpose(1, 2) for x in qkv)
        out_BHLD = F.scaled_dot_product_attention(
            query_BHLD, key_BHLD, value_BHLD, is_causal=True, scale=scaling, enable_gqa=True
        )
        outs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
