"""This rank's part of a tensor that a framework has sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gradwire.comm.torch_internals import shards_of


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, another tensor as it is; both share memory with it."""
    if (shards := shards_of(tensor)) is not None:
        return shards[0].tensor if shards else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return where this rank's shard of a tensor begins along its first dimension; 0 of one that is not sharded."""
    if (shards := shards_of(tensor)) is not None:
        return int(shards[0].metadata.shard_offsets[0]) if shards else 0
    if not isinstance(tensor, DTensor):
        return 0
    (dim,) = (dim for dim, placement in enumerate(tensor.placements) if placement == Shard(0))
    mesh = tensor.device_mesh
    return min(mesh.get_local_rank(dim) * -(-tensor.shape[0] // mesh.size(dim)), tensor.shape[0])


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether an optimizer would use this rank's part of a gradient; one of zeros is that of an unused parameter."""
    return parameter.grad is not None and bool(local(parameter.grad).count_nonzero())
