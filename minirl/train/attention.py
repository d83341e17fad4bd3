"""Attention over sequences packed end to end, none of which sees another.

Registers "minirl_packed" as an attention of transformers; the boundaries reach it as keyword
arguments of the model's forward. On CUDA in half precision it is torch's variable-length attention;
else each run of neighbours of equal length is one causal SDPA. An answer that shares its prompt has
more keys than queries, the prompt's and its own (`Keys`): its causality is from the lower right.
Leaves out sliding windows shorter than the sequences, soft caps and sinks: those are errors.
Axes: T tokens, K keys, S1 sequences + 1, H heads, D of one, B sequences of a run, L tokens of one.
"""

from collections.abc import Sequence
from itertools import groupby
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
REPEAT_ON = {"cuda"}  # where float32 SDPA of grouped heads would hold all scores: L² of each head


class Boundaries(NamedTuple):
    """Where packed sequences begin and end, in the order in which a policy takes it."""

    positions_T: Tensor  # int64, from 0 in each sequence
    cu_seqlens_S1: Tensor  # int32
    max_seqlen: int


class Keys(NamedTuple):
    """What packed queries see, where it is not just themselves."""

    rows_K: Tensor  # which token each key is; a sequence's last ones are its queries
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
    keys: Keys | None = None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. `rest` holds its arguments for other kernels."""
    needs = [n for n in ("softcap", "s_aux", "position_bias") if rest.get(n) is not None]
    window, longest = rest.get("sliding_window"), keys.max_seqlen if keys else max_seqlen
    if window is not None and window < longest:
        needs.append(f"a sliding window of {window} tokens for sequences of {longest}")
    if needs:
        layer = type(module).__name__
        raise MinirlError(f"{layer} needs {needs[0]}, which packed attention does not support")
    qkv = [x[0].transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD)]
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if keys is not None:
        qkv[1:] = (x_THD.index_select(0, keys.rows_K) for x_THD in qkv[1:])
        bounds = (cu_seqlens, keys.cu_seqlens_S1, max_seqlen, keys.max_seqlen)
    if value_1HTD.device.type in VARLEN_ON and value_1HTD.dtype in HALF:
        return _varlen(qkv, bounds, scaling)[None], None
    return _by_runs(qkv, bounds[:2], scaling)[None], None


def _varlen(
    qkv: list[Tensor], bounds: tuple[Tensor, Tensor, int, int], scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Autocast does not know this kernel, and norms over heads leave queries and keys in float32.
    query_THD, key_KHD, value_KHD = (x.to(qkv[2].dtype) for x in qkv)
    is_grouped, causal = query_THD.shape[1] != key_KHD.shape[1], (-1, 0)  # torch's spelling
    options: dict[str, Any] = {"window_size": causal, "enable_gqa": is_grouped}
    out = varlen_attn(query_THD, key_KHD, value_KHD, *bounds, scale=scaling, **options)
    assert isinstance(out, Tensor)
    return out


@torch.compiler.disable  # its shapes are new in every micro-batch: each would be compiled
def _by_runs(qkv: list[Tensor], bounds: tuple[Tensor, ...], scaling: float | None) -> Tensor:
    lengths = zip(*(cu_S1.diff().tolist() for cu_S1 in bounds), strict=True)
    runs = [(len(list(run)), *n) for n, run in groupby(lengths)]  # neighbours of equal lengths
    sizes_q, sizes_k = [num * q for num, q, _ in runs], [num * k for num, _, k in runs]
    # split, not slices: the backward of a slice writes a gradient of all T tokens, for each slice.
    parts = (x.split(n) for x, n in zip(qkv, (sizes_q, sizes_k, sizes_k), strict=True))
    outs = []
    for (num, *_), *qkv_LHD in zip(runs, *parts, strict=True):
        qkv_BHLD = [x.unflatten(0, (num, -1)).transpose(1, 2) for x in qkv_LHD]
        outs.append(_causal(qkv_BHLD, scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def _causal(qkv_BHLD: list[Tensor], scaling: float | None) -> Tensor:
    """From the lower right, where SDPA's own is from the upper left. So where keys outnumber
    queries it takes a mask, or, where there are only a few more, pads the queries in front."""
    query_BHLD, key_BHLD, value_BHLD = qkv_BHLD
    num_q, num_k = query_BHLD.shape[2], key_BHLD.shape[2]
    num_more, is_causal = num_k - num_q, 3 * num_q > 2 * num_k
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scaling, "enable_gqa": True}
    if key_BHLD.device.type in REPEAT_ON:
        options["enable_gqa"], num = False, query_BHLD.shape[1] // key_BHLD.shape[1]
        key_BHLD, value_BHLD = (x.repeat_interleave(num, 1) for x in (key_BHLD, value_BHLD))
    if not is_causal:
        options["attn_mask"] = query_BHLD.new_ones(num_q, num_k).tril(num_more).bool()
    elif num_more:
        query_BHLD = F.pad(query_BHLD, (0, 0, num_more, 0))
    out_BHLD = F.scaled_dot_product_attention(query_BHLD, key_BHLD, value_BHLD, **options)
    return out_BHLD[:, :, num_more:] if is_causal and num_more else out_BHLD


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
