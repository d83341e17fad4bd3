"""Tensors of which each rank holds a slice (DTensor, under train.shard = "full") or all.

Takes a tensor of either kind, so that its callers need not ask which. Leaves out who slices:
`optimizer.placed`.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def own_slice(tensor: Tensor) -> Tensor:
    """What this rank holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Of slices, gathered: a collective. Else the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def slice_for(parameter: Tensor, given: Tensor) -> Tensor:
    """The part of a whole tensor that belongs to this rank's slice of a parameter."""
    given = given.to(parameter.device)
    if not isinstance(parameter, DTensor) or not given.ndim:
        return given
    mesh, how = parameter.device_mesh, parameter.placements
    return distribute_tensor(given, mesh, how, src_data_rank=None).to_local()
